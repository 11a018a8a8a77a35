"""Keeps what passes between the stages of vLLM-Omni, in whichever process it passes.

Installed by our plugin where the environment names a folder: `verify --deploy-config` does. One
safetensors file for each payload; `trace`'s rules hold: an error never reaches vLLM.
"""

import functools
import json
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from omnicache_cli.verify.crossings import ERROR_SUFFIX, META, SUFFIX, Direction

_MARK = "__omnicache_wire__"
_counts: Counter[tuple[int, Direction]] = Counter()


def install(folder: str) -> None:
    """Wrap the connector of vLLM-Omni's runners. Harmless when repeated."""
    from vllm_omni.distributed.omni_connectors.model_runner import omni_connector_payload_transport

    owner = omni_connector_payload_transport._OmniConnectorPayloadTransportMixin
    for name, around in (
        ("_build_custom_process_payload", _sent),
        ("recv_full_payload_inputs", _received),
    ):
        original = owner.__dict__[name]
        if not hasattr(original, _MARK):
            wrapper = around(original, Path(folder))
            setattr(wrapper, _MARK, True)
            setattr(owner, name, wrapper)


def _sent(original: Any, folder: Path) -> Any:
    """Around the function that packs what a finished request hands to the next stage."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        payload = original(self, *args, **kwargs)
        if payload is not None:
            request = args[0] if args else kwargs.get("request_id")
            _keep(folder, self, Direction.SENT, str(request), payload)
        return payload

    return method


def _received(original: Any, folder: Path) -> Any:
    """Around the function that hands on what has come from the stage before."""

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        payloads = original(self, *args, **kwargs)
        for request, payload in (payloads or {}).items():
            _keep(folder, self, Direction.RECEIVED, str(request), payload)
        return payloads

    return method


def _keep(folder: Path, runner: Any, direction: Direction, request: str, payload: Any) -> None:
    stage_id = -1
    try:
        config = runner._get_model_config()
        stage_id = int(config.stage_id)
        number = _counts[stage_id, direction]
        _counts[stage_id, direction] += 1
        meta = {
            "stage_id": stage_id,
            "stage": str(config.model_stage),
            "direction": direction,
            "number": number,
            "request": request,
        }
        name = f"{stage_id}.{direction}.{number:06d}.{os.getpid()}{SUFFIX}"
        _write(folder / name, tensors_of(payload), meta)
    except Exception as error:  # a pipeline without a recording beats no pipeline
        text = f"stage {stage_id}, {direction}: {error!r}"
        (folder / f"{stage_id}.{direction}.{os.getpid()}{ERROR_SUFFIX}").write_text(text)


def tensors_of(payload: Any) -> dict[str, torch.Tensor]:
    """A payload's tensors, and its lists of numbers as tensors, by dotted names."""
    found: dict[str, torch.Tensor] = {}
    _collect("", payload, found)
    return found


def _collect(name: str, value: Any, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name] = value.detach().to("cpu", copy=True).contiguous()
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _collect(f"{name}.{key}" if name else str(key), one, found)
    elif isinstance(value, list | tuple) and value:
        if all(isinstance(one, int | float) for one in value):
            found[name] = torch.tensor(value)
        else:
            for index, one in enumerate(value):
                _collect(f"{name}.{index}", one, found)
    elif isinstance(value, int | float):
        found[name] = torch.tensor(value)


def _write(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> None:
    """Whole or not at all; private."""
    from safetensors.torch import save

    content = save(tensors, {META: json.dumps(meta)})
    temporary = path.with_name(f".{path.name}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)
    temporary.replace(path)
