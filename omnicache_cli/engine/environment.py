"""The environment that makes vLLM processes trace: one variable, and our name among the plugins."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from omnicache_cli.engine.plugin import ENVIRONMENT_VARIABLE, PLUGIN_NAME


@dataclass(frozen=True, slots=True)
class Recording:
    """What is to be recorded beyond the usual."""

    token_ids: bool = False  # of the prompts
    all_ranks: bool = False  # further tensor-parallel ranks in full
    check_hashes: bool = False  # recompute the hash of every block that enters the cache


def tracing_variables(
    folder: Path, environment: Mapping[str, str], recording: Recording | None = None
) -> dict[str, str]:
    """What to add to `environment` so that every vLLM process under it traces into `folder`.

    VLLM_PLUGINS selects plugins by name where it is set; there our name is added.
    """
    settings = {
        "folder": str(folder.absolute()),
        "salt_key": secrets.token_hex(16),
        **asdict(recording or Recording()),
    }
    variables = {ENVIRONMENT_VARIABLE: json.dumps(settings)}
    selected = environment.get("VLLM_PLUGINS")
    if selected is not None and PLUGIN_NAME not in selected.split(","):
        variables["VLLM_PLUGINS"] = ",".join(filter(None, (selected, PLUGIN_NAME)))
    return variables
