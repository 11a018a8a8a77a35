"""No wrapper comes between vLLM and its own method, whatever vLLM gives it and whatever we do."""

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy", reason="the probe runs beside vLLM, which brings numpy")

from omnicache_cli.engine.probe import recorder as recording
from omnicache_cli.engine.probe.hooks import HOOKS
from omnicache_cli.engine.probe.wrapping import PROBE_ATTRIBUTE, Wrap

WRAPPERS = {
    f"{module.rpartition('.')[2]}.{owner}.{method}": make
    for module, owners in HOOKS.items()
    for owner, methods in owners.items()
    for method, make in methods.items()
}


class Failing:
    """A probe in which everything fails."""

    def __init__(self, recorder: recording.Recorder) -> None:
        self.recorder = recorder
        self.busy = self.forwarding = self.sampling = self.updating = False
        self.allocate_ns = 0

    def __getattr__(self, name: str) -> Any:
        raise ZeroDivisionError(name)


class Traced:
    """A vLLM object; the wrapped method hands back what it was given."""

    calls: int = 0


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[recording.Recorder]:
    yield recording.begin(recording.Settings(str(tmp_path), "00" * 16))
    recording.end()


def called(make: Wrap, owner: Traced, *args: Any, **kwargs: Any) -> Any:
    def method(self: Traced, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return args, kwargs

    return make(method)(owner, *args, **kwargs)


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("probe", [None, "failing"])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((7,), {}), ((7, 8, 9), {"surprise": 1}), ((), {"surprise": 1})],
)
def test_arguments_that_nobody_expects_reach_vllms_method_once(
    name: str,
    probe: str | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    recorder: recording.Recorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    owner = Traced()
    if probe is not None:
        setattr(owner, PROBE_ATTRIBUTE, Failing(recorder))
    if name.endswith("free_blocks") and args:  # these are blocks, of which vLLM reads a list
        args = ([args[0]], *args[1:])
    found = called(WRAPPERS[name], owner, *args, **kwargs)
    if not name.endswith("__init__"):  # which returns nothing
        assert found == (args, kwargs)
    assert owner.calls == 1


@pytest.mark.parametrize(
    ("args", "kwargs"), [((iter([1, 2]),), {}), ((), {"ordered_blocks": iter([1, 2])})]
)
def test_blocks_that_come_as_an_iterator_are_read_once(
    args: tuple[Any, ...], kwargs: dict[str, Any], recorder: recording.Recorder
) -> None:
    owner = Traced()
    setattr(owner, PROBE_ATTRIBUTE, Failing(recorder))
    found = called(WRAPPERS["block_pool.BlockPool.free_blocks"], owner, *args, **kwargs)
    assert [*found[0], *found[1].values()] == [[1, 2]]


class Counting:
    """A scheduler's probe, as far as `add_request` asks it."""

    def __init__(self, recorder: recording.Recorder) -> None:
        self.recorder = recorder
        self.added: list[str] = []

    def is_live(self, request_id: str) -> bool:
        return request_id in self.added

    def add_request(self, request: Any) -> None:
        self.added.append(request.request_id)


def test_a_request_that_an_override_hands_on_is_added_once(recorder: recording.Recorder) -> None:
    """As the schedulers of vLLM-Omni do: their add_request calls vLLM's, and both are wrapped."""
    make = WRAPPERS["scheduler.Scheduler.add_request"]

    class Request:
        request_id = "r0"

    def base(self: Traced, request: Any) -> None:
        self.calls += 1

    inner = make(base)

    def override(self: Traced, request: Any) -> None:
        inner(self, request)

    owner = Traced()
    probe = Counting(recorder)
    setattr(owner, PROBE_ATTRIBUTE, probe)
    make(override)(owner, Request())
    assert (owner.calls, probe.added) == (1, ["r0"])
