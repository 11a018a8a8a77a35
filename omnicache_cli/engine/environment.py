"""The environment that makes vLLM processes trace: one variable, and our name among the plugins."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path

from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE, PLUGIN_NAME


def tracing_variables(
    folder: Path,
    environment: Mapping[str, str],
    *,
    token_ids: bool = False,
    all_ranks: bool = False,
) -> dict[str, str]:
    """What to add to `environment` so that every vLLM process under it traces into `folder`.

    VLLM_PLUGINS selects plugins by name where it is set; there our name is added.
    """
    settings = {
        "folder": str(folder.absolute()),
        "salt_key": secrets.token_hex(16),
        "token_ids": token_ids,
        "all_ranks": all_ranks,
    }
    variables = {ENVIRONMENT_VARIABLE: json.dumps(settings)}
    selected = environment.get("VLLM_PLUGINS")
    if selected is not None and PLUGIN_NAME not in selected.split(","):
        variables["VLLM_PLUGINS"] = ",".join(filter(None, (selected, PLUGIN_NAME)))
    return variables
