"""In which functions the samples were."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from omnicache_cli.profile.recording import MAIN_THREAD, StackRecording

SITE_PACKAGES = "site-packages/"


@dataclass(frozen=True, slots=True)
class HotFunction:
    """A function, and the weight of the stacks that end in it and of those that have it."""

    name: str
    file: str
    self_weight: int
    total_weight: int


@dataclass(frozen=True, slots=True)
class Hottest:
    """Functions by self weight, of `weight` in all."""

    functions: list[HotFunction]
    weight: int


def hottest(recordings: Iterable[StackRecording], *, main_thread_only: bool) -> Hottest:
    """Over all recordings. A function that calls itself counts once in a stack."""
    own: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    weight_of_all = 0
    for recording in recordings:
        names = [(frame.name, short_file(frame.file)) for frame in recording.frames]
        for stack, weight in _stacks(recording, main_thread_only=main_thread_only).items():
            weight_of_all += weight
            own[names[stack[-1]]] += weight
            for name in {names[one] for one in stack}:
                total[name] += weight
    functions = [HotFunction(*name, own[name], weight) for name, weight in total.items()]
    functions.sort(key=lambda one: (-one.self_weight, -one.total_weight, one.file, one.name))
    return Hottest(functions, weight_of_all)


def _stacks(recording: StackRecording, *, main_thread_only: bool) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    for thread in recording.threads:
        if not main_thread_only or thread.name == MAIN_THREAD:
            for stack, weight in thread.stacks:
                if stack:
                    found[stack] += weight
    return found


def short_file(path: str) -> str:
    """A file as one knows it: below site-packages, otherwise its last two parts."""
    _, found, rest = path.rpartition(SITE_PACKAGES)
    return rest if found else "/".join(path.split("/")[-2:])
