"""What each command needs, and what follows for it from the checks.

Every command of the table in `cli/commands.py` has a line in NEEDS; a test compares them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from omnicache_cli.doctor.check import Check

Verdict = Literal["works", "works with limits", "does not work"]


@dataclass(frozen=True, slots=True)
class Needs:
    """By names of checks."""

    must: tuple[str, ...] = ()
    may: Mapping[str, str] = field(default_factory=dict)  # -> what the command cannot do without
    sound: tuple[str, ...] = ()  # it does without them, but not with broken ones


ENGINE = ("vllm",)
ON_AN_ENGINE = {
    "torchvision": "no models with images or audio",
    "two ranks": "no --tensor-parallel-size 2",
    "memory": "large models may not start",
    "disk": "the engine may not start",
}

NEEDS: Mapping[str, Needs] = {
    "demo": Needs(("vllm", "torchvision"), {"vllm-omni": "omnicache's own tensor cache only"}),
    "trace": Needs(("vllm", "plugins"), {**ON_AN_ENGINE, "soundfile": "no prompts with audio"}),
    "show": Needs(),
    "explain": Needs((), {"vllm": "recorded runs only, no --prompts and no --lint"}),
    "verify": Needs(ENGINE, {**ON_AN_ENGINE, "vllm-omni": "no --cache vllm-omni and no --stage"}),
    "kv-size": Needs(
        (),
        {
            "transformers": "what config.json leaves to the model's class is not known",
            "huggingface_hub": "no hub ids",
            "vllm": "no --exact and no --check",
        },
    ),
    "simulate": Needs(ENGINE, {"zstandard": "no workloads in zstd"}),
    "profile": Needs(
        ("py-spy", "psutil", "ptrace"), {"vllm": "running engines only: --pid and -- COMMAND"}
    ),
    "export": Needs((), {"pyarrow": "no --to parquet"}),
    "monitor": Needs(("httpx", "prometheus_client"), {"zmq": "no KV events"}),
    "doctor": Needs(),
    "tiny-model": Needs(
        ("torch", "transformers"), {"torchvision": "no models with images"}, sound=("torchvision",)
    ),
}

STOPS = frozenset({"broken", "missing"})

EVERY = ("Python",)
"""What all commands need."""


@dataclass(frozen=True, slots=True)
class Judged:
    command: str
    verdict: Verdict
    because: tuple[str, ...] = ()  # one sentence for each check that stands in the way
    mends: tuple[str, ...] = ()


def judge(command: str, checks: Mapping[str, Check]) -> Judged:
    """What follows for one command. KeyError: it is not in NEEDS, or asks for no check."""
    needs = NEEDS[command]
    stopped = [checks[name] for name in needs.must if checks[name].state in STOPS]
    stopped += [checks[name] for name in needs.sound if checks[name].state == "broken"]
    if stopped:
        return _judged(command, "does not work", [_said(one) for one in stopped], stopped)
    limited = [checks[name] for name in (*EVERY, *needs.must) if checks[name].state != "ok"]
    sentences = [_said(one) for one in limited]
    for name, lost in needs.may.items():
        check = checks[name]
        if check.state in STOPS:
            sentences.append(f"{name}: {lost}")
        elif check.state == "limits":
            sentences.append(_said(check))
        else:
            continue
        limited.append(check)
    return _judged(command, "works with limits" if limited else "works", sentences, limited)


def judge_all(commands: Sequence[str], checks: Sequence[Check]) -> list[Judged]:
    by_name = {one.name: one for one in checks}
    return [judge(command, by_name) for command in commands]


def _said(check: Check) -> str:
    return f"{check.name}: {check.found}"


def _judged(
    command: str, verdict: Verdict, sentences: Sequence[str], checks: Sequence[Check]
) -> Judged:
    mends = dict.fromkeys(check.mend for check in checks if check.mend)
    return Judged(command, verdict, tuple(sentences), tuple(mends))
