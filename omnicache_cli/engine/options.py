"""What a vLLM engine is started with: its arguments and the environment, checked before it starts.

Knows no engine: see `launch`.
"""

import contextlib
import dataclasses
import difflib
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from omnicache_cli import advice
from omnicache_cli.errors import BadInputError, EngineFailedError, EngineMissingError, UsageError
from omnicache_cli.trace.workload import Prompt


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine is started with."""

    model: str
    args: Mapping[str, Any]  # further EngineArgs fields by vLLM's names
    engine_process: bool = False  # engine core and workers in children


def prepare_environment(*, engine_process: bool, quiet_engine: bool = True) -> None:
    """Set what vLLM reads when it is imported; what the user has set stays."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if engine_process else "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if quiet_engine:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def check_engine_args(options: EngineOptions, args_class: Any = None) -> None:
    """UsageError: an argument this vLLM does not know, with the nearest that it does.

    `args_class`: vLLM's EngineArgs, or a subclass with more fields.
    """
    known = {field.name for field in dataclasses.fields(args_class or engine_args_class())}
    for name in options.args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see vLLM's engine arguments"
            raise UsageError(f"vLLM has no engine argument {name!r}; {hint}")


def engine_config(options: EngineOptions, args_class: Any = None) -> Any:
    """The VllmConfig that these options lead to, without an engine. EngineFailedError: none."""
    make = args_class or engine_args_class()
    try:
        return make(model=options.model, **options.args).create_engine_config()
    except Exception as error:
        raise EngineFailedError(f"vLLM did not start: {told(error)}") from error


def lora_args(prompts: Iterable[Prompt]) -> dict[str, Any]:
    """Engine arguments that prompts with LoRA adapters need."""
    adapters = {prompt.lora for prompt in prompts if prompt.lora is not None}
    return {"enable_lora": True, "max_loras": len(adapters)} if adapters else {}


def check_model(model: str) -> str:
    """A folder with a config.json, or a hub id. BadInputError: it looks like a path, not there."""
    try:
        path = Path(model).expanduser()
    except RuntimeError as error:
        raise BadInputError(f"cannot read the model path {model}: {error}") from error
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise BadInputError(f"{path} holds no config.json; name the folder of a model")
        return str(path)
    looks_like_path = model.startswith((".", "~", "/")) or model.count("/") != 1
    if path.exists() or looks_like_path:
        raise BadInputError(
            f"no model folder {model}; make a tiny one: omnicache tiny-model text tiny"
        )
    return model


def parse_engine_value(text: str) -> Any:
    """The VALUE of --engine KEY=VALUE: JSON where it is JSON, else a string."""
    try:
        return msgspec.json.decode(text.encode())
    except (RecursionError, UnicodeEncodeError) as error:
        raise UsageError(
            f"the value of --engine {text[:40]!r}… is neither JSON nor plain text ({error})"
        ) from error
    except msgspec.DecodeError:
        return {"True": True, "False": False, "None": None}.get(text, text)


def vllm_version() -> str | None:
    """Version of the vLLM that is loaded in this process."""
    version = getattr(sys.modules.get("vllm"), "__version__", None)
    return None if version is None else str(version)


def engine_args_class() -> Any:
    try:
        from vllm.engine.arg_utils import EngineArgs
    except IMPORT_ERRORS as error:
        raise missing_engine(error) from error
    return EngineArgs


IMPORT_ERRORS = (ImportError, OSError, RuntimeError)
"""What the import of vLLM ends in where a library that it loads is broken, or built for another."""


def missing_engine(error: BaseException, purpose: str = "") -> EngineMissingError:
    """What an import of vLLM ended in, and the line that mends it. `purpose`: what needs vLLM."""
    why = f", and {purpose}" if purpose else ""
    if isinstance(error, ModuleNotFoundError) and error.name == "vllm":
        return EngineMissingError(f"vLLM is not installed{why}; {advice.install_vllm()}")
    mend = advice.mend_for(error) or advice.ASK_THE_DOCTOR
    return EngineMissingError(f"vLLM does not import{why}: {first_line(error)}; {mend}")


def told(error: BaseException) -> str:
    """An error of vLLM's in one line, with what to do about it where it is known."""
    mend = advice.mend_for(error)
    return first_line(error) if mend is None else f"{first_line(error).rstrip('.')}; {mend}"


def first_line(error: BaseException) -> str:
    """The first line of an error that says something; of a pydantic error its first message."""
    text = str(error)
    if hasattr(error, "errors"):  # pydantic counts its errors in the first line
        with contextlib.suppress(Exception):
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            text = f"{where}: {first['msg']}" if where else first["msg"]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
