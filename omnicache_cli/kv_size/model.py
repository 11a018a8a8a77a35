"""From MODEL on the command line to the model's caching layers.

MODEL is a folder, a config.json, or a hub id. The config class of transformers is asked, in a
child process, only where config.json is silent on a field that the architecture needs.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omnicache_cli import advice
from omnicache_cli.errors import BadInputError
from omnicache_cli.kv_size.architectures.table import ARCHITECTURES, Family
from omnicache_cli.kv_size.fields import Fields, NeedsClassDefaults
from omnicache_cli.kv_size.layers import Model

CHILD = Path(__file__).with_name("class_defaults.py")
CHILD_SECONDS = 60

TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal and omni configs keep the language model, as vLLM finds it."""

WHOLE_MODEL = ("dtype", "torch_dtype", "quantization_config")
"""Fields that an omni model may state once for all its stages."""

OMNI_STAGES = ("thinker_config", "talker_config", "token2wav_config", "code2wav_config")


class UnknownArchitectureError(BadInputError):
    """The fast path has no family for the architecture; vLLM itself may have."""


@dataclass(frozen=True)
class ModelConfig:
    """A config.json, and its class defaults where they had to be asked for."""

    path: Path  # of config.json
    values: Mapping[str, Any]
    stage: str | None = None  # of an omni model

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of the asked stage; the whole one where the model has no stages."""
        stage = self.stage or ("thinker_config" if "thinker_config" in self.values else None)
        if stage is None:
            return self.values
        if not isinstance(self.values[stage], Mapping):
            raise BadInputError(
                f"{self.path}: field {stage} is {self.values[stage]!r}, not an object of fields"
            )
        whole = {name: self.values[name] for name in WHOLE_MODEL if name in self.values}
        return {**whole, **self.values[stage]}

    @cached_property
    def _text_with_path(self) -> tuple[Mapping[str, Any], str]:
        config, path = self.config, f"{self.stage}." if self.stage else ""
        if not self.stage and "thinker_config" in self.values:
            path = "thinker_config."
        for _ in range(3):
            for name in TEXT_CONFIGS:
                if isinstance(config.get(name), Mapping):
                    config, path = config[name], f"{path}{name}."
                    break
            else:
                return config, path
        return config, path

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's config (get_hf_text_config)."""
        return self._text_with_path[0]

    @property
    def text_path(self) -> str:
        return self._text_with_path[1]

    @property
    def architecture(self) -> str:
        names = self.config.get("architectures") or self.values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise BadInputError(
                f"{self.path}: field architectures is {names!r}, so nothing says how the model "
                "caches; complete the config.json"
            )
        return names[0]

    @property
    def stages(self) -> tuple[str, ...]:
        """Of an omni model, each with a KV cache of its own."""
        return tuple(
            name
            for name in OMNI_STAGES
            if isinstance(self.values.get(name), Mapping)
            and any(key in self.values[name] for key in ("text_config", "num_hidden_layers"))
        )


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading a model gave: its layers, the configs they came from, and who was asked."""

    model: Model
    config: Mapping[str, Any]
    text: Mapping[str, Any]
    source: ModelConfig
    defaults: str | None  # "transformers 5.14.1", where class defaults were needed
    asked_for: str | None  # the field that needed them


def open_config(model: str, stage: str | None = None) -> ModelConfig:
    """BadInputError: no such file, or it is no JSON object."""
    path = Path(model)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        if Path(model).exists() or model.count("/") != 1 or model.startswith((".", "/")):
            raise BadInputError(f"{path} does not exist; name a model's folder or its config.json")
        from omnicache_cli.kv_size.hub import config_from_hub

        path = config_from_hub(model)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInputError(f"{path} cannot be read as JSON: {error}; name a config.json") from None
    if not isinstance(values, dict):
        raise BadInputError(f"{path} is a JSON {type(values).__name__}, not an object of fields")
    quantization = path.with_name("hf_quant_config.json")
    if "quantization_config" not in values and quantization.exists():
        values["quantization_config"] = json.loads(quantization.read_text(encoding="utf-8"))
    config = ModelConfig(path, values, stage)
    if stage is not None and stage not in config.stages:
        raise BadInputError(
            f"{path} has no stage {stage}; "
            + (
                f"it has: {', '.join(config.stages)}"
                if config.stages
                else "its model has no stages: leave out --stage"
            )
        )
    return config


Ask = Callable[[str, str], Mapping[str, Any]]
"""Given a model's folder and a stage or "", what `class_defaults.answer` gives for it."""


def ask_child(folder: str, stage: str = "") -> Mapping[str, Any]:
    """class_defaults in a process of its own, where torch is blocked."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    ran = subprocess.run(
        [sys.executable, "-P", str(CHILD), folder, stage],
        capture_output=True,
        text=True,
        timeout=CHILD_SECONDS,
        env=environment,
        check=False,
    )
    answer: Mapping[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return answer


def read_model(source: ModelConfig, ask: Ask = ask_child) -> Reading:
    """BadInputError names the field that is missing or not understood."""
    name = source.architecture
    family = ARCHITECTURES.get(name)
    if family is None:
        raise UnknownArchitectureError(
            f"field architectures has {name}, which the fast path does not understand; "
            "use --exact, which asks vLLM's own model code"
        )
    try:
        text = Fields(source.text, source.text_path, complete=False, absent=family.absent)
        return Reading(_read(family, text, name), source.config, source.text, source, None, None)
    except NeedsClassDefaults as missing:
        field = missing.field
    config, filled, version = class_defaults(source, field, ask)
    model = _read(family, Fields(filled, source.text_path, complete=True), name)
    return Reading(model, config, filled, source, version, field)


def _read(family: Family, text: Fields, architecture: str) -> Model:
    try:
        return family.read(text, architecture)
    except ZeroDivisionError:
        raise BadInputError(
            f"a field of {text.path or 'the config'} that {architecture} divides by is 0, such as "
            "num_attention_heads; correct the config.json"
        ) from None


def bare_reading(source: ModelConfig) -> Reading:
    """What options are resolved with when only vLLM knows the architecture: no layers."""
    text = source.text
    heads, layers = text.get("num_attention_heads"), text.get("num_hidden_layers")
    model = Model(
        source.architecture,
        (),
        num_hidden_layers=layers if isinstance(layers, int) else 1 << 30,
        num_attention_heads=heads if isinstance(heads, int) else 0,
        uses_mla=text.get("kv_lora_rank") is not None,
    )
    return Reading(model, source.config, text, source, None, None)


def class_defaults(
    source: ModelConfig, field: str, ask: Ask = ask_child
) -> tuple[Mapping[str, Any], Mapping[str, Any], str]:
    """The config and its text config with the class's defaults, and who filled them in."""
    if source.path.name != "config.json":
        raise BadInputError(
            f"{source.path} is silent on {field}; to let transformers fill in its class defaults, "
            "name the file config.json"
        )
    try:
        answer = ask(str(source.folder), source.stage or "")
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise BadInputError(
            f"{source.path} is silent on {field}, and the config class could not be asked: {error}"
        ) from None
    if "missing" in answer:
        raise BadInputError(
            f"{source.path} is silent on {field}, and transformers, whose config class knows it, "
            f"is not installed: {advice.install_extra('kv-size')}, or complete the config.json"
        )
    if "refused" in answer:
        raise BadInputError(
            f"{source.path} is silent on {field}, and transformers does not know it: "
            f"{answer['refused']}; complete the config.json"
        )
    return answer["config"], answer["text"], f"transformers {answer['version']}"
