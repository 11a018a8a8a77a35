"""Builds tiny models with random weights that vLLM really loads: one function, one table.

A builder returns the files of a model as bytes and touches no disk; `folder` puts them there.
Neither knows an engine: torch and transformers are imported inside the builders.
"""

from collections.abc import Callable
from pathlib import Path

from omnicache_cli import advice
from omnicache_cli.engine.options import first_line
from omnicache_cli.engine.tiny_kinds import TINY_MODEL_KINDS
from omnicache_cli.engine.tiny_models.folder import check_folder, write_folder
from omnicache_cli.engine.tiny_models.hybrid import hybrid_model_files
from omnicache_cli.engine.tiny_models.image import image_model_files
from omnicache_cli.engine.tiny_models.lora import lora_model_files
from omnicache_cli.engine.tiny_models.mla import mla_model_files
from omnicache_cli.engine.tiny_models.omni import omni_model_files
from omnicache_cli.engine.tiny_models.sliding import sliding_model_files
from omnicache_cli.engine.tiny_models.text import text_model_files, wide_model_files
from omnicache_cli.errors import EngineMissingError, UsageError

ModelFiles = dict[str, bytes]  # path inside the folder, with / -> content

BUILDERS: dict[str, Callable[[], ModelFiles]] = {
    "text": text_model_files,
    "image": image_model_files,
    "sliding": sliding_model_files,
    "mla": mla_model_files,
    "hybrid": hybrid_model_files,
    "wide": wide_model_files,
    "lora": lora_model_files,
    "omni": omni_model_files,
}


def build_tiny_model(kind: str, directory: Path, *, force: bool = False) -> None:
    """Put the tiny model of `kind` into `directory`; the same bytes every time.

    All or nothing: after a failure the folder is what it was. With `force` a folder that an
    earlier call built is replaced, any other that holds files is refused even so.
    """
    if kind not in BUILDERS:
        known = ", ".join(TINY_MODEL_KINDS)
        raise UsageError(f"there is no tiny model kind {kind!r}; choose one of: {known}")
    check_folder(directory, force=force)
    try:
        files = BUILDERS[kind]()
    except (ImportError, RuntimeError) as error:
        if symptom := advice.symptom_of(error):
            raise EngineMissingError(
                f"cannot build the tiny {kind} model: {symptom.cause}; {symptom.mend()}"
            ) from error
        if not isinstance(error, ImportError):
            raise
        raise EngineMissingError(
            f"cannot build the tiny {kind} model without torch and transformers: "
            f"{first_line(error)}; vLLM brings both: {advice.install_vllm()}"
        ) from error
    write_folder(files, directory, kind=kind, force=force)
