"""What simulate predicts is what the real engine did, request by request, for each tiny model."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from omnicache_cli.engine.environment import Recording
from omnicache_cli.engine.launch import Engine
from omnicache_cli.engine.options import EngineOptions
from omnicache_cli.engine.tracing import tracing
from omnicache_cli.prefix.prompts import Adapter
from omnicache_cli.simulate.recorded import RecordedEngine, RecordedRequests, recorded_engine
from omnicache_cli.simulate.replay import Admitted, Arrivals, Replay, Replica
from omnicache_cli.simulate.request import SimRequest
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.summary import Summary, summarize
from omnicache_cli.trace.workload import Prompt, Workload
from tests.engine import test_trace
from tests.engine.kinds import COMMON, Case, case, ids

IMAGE = Path(__file__).parents[2] / "examples" / "circle.png"
OTHER_IMAGE = IMAGE.with_name("square.png")


def image_case() -> Case:
    """Images of 64 tokens, in a pool that holds few of them."""
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [
        Prompt(f"{text}Describe the first of them in a long sentence.", None, (IMAGE,)),
        Prompt(f"{text}Describe the first of them in a long sentence.", None, (OTHER_IMAGE,)),
        Prompt(f"{text}Describe the first of them in a word.", None, (IMAGE,)),
        Prompt(None, ids(1, 150)),
    ]
    workload = Workload(tuple(prompts), num_rounds=2, concurrency=3, max_tokens=40, ignore_eos=True)
    args = {
        **COMMON,
        "max_model_len": 352,
        "num_gpu_blocks_override": 12,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }
    return Case(args, workload)


def case_of(kind: str, model: Path) -> Case:
    if kind == "image":
        return image_case()
    if kind == "text":
        return Case({**test_trace.ARGS, "enable_prefix_caching": True}, test_trace.WORKLOAD)
    found = case(kind, model)
    if kind == "lora":
        return Case({**found.args, "num_gpu_blocks_override": 35}, found.workload)
    return found


Hit = tuple[str, int, bool]
"""Request, hit tokens, resumed."""


@dataclass
class Real:
    """A workload on a real engine."""

    sent: Case
    run: Run
    hits: list[Hit]
    summary: Summary

    @property
    def engine(self) -> RecordedEngine:
        return recorded_engine(self.run, None)


@pytest.fixture(scope="module", params=["text", "image", "sliding", "hybrid", "lora"])
def real(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Real:
    model = tiny_models[request.param]
    sent = case_of(request.param, model)
    folder = tmp_path_factory.mktemp("real") / "run"
    folder.mkdir()
    with (
        tracing(folder, Recording(token_ids=True)),
        Engine(EngineOptions(str(model), sent.args)) as engine,
    ):
        engine.run(sent.workload)
    run = Run(folder)
    hits = [
        (one.request.external_id, one.hit_tokens, one.resumed)
        for step in run.steps()
        for one in step.scheduled
        if one.hit_tokens is not None
    ]
    found = Real(sent, Run(folder), hits, summarize(Run(folder)))
    assert found.engine.source.enable_prefix_caching
    return found


def replay(
    real: Real, arrivals: Arrivals, num_blocks: int | None = None
) -> tuple[Replay, list[Hit]]:
    from omnicache_cli.engine.modelfree.prompts import parse_group
    from omnicache_cli.engine.modelfree.replay import ReplayPool, SharedHashes
    from omnicache_cli.engine.modelfree.scheduler import PoolPlan

    engine = real.engine
    plan = PoolPlan(tuple(parse_group(one) for one in engine.group_texts()))
    plan = replace(plan, **engine.settings(), num_blocks=num_blocks or engine.num_blocks)
    hits: list[Hit] = []

    def admitted(_: int, one: Admitted) -> None:
        hits.append((one.request.name, one.hit_tokens, one.resumed))

    pool = ReplayPool(plan, SharedHashes())
    return Replay([Replica(pool, None)], arrivals, on_admitted=admitted), hits


def agree(real: Real, replayed: Replay, hits: list[Hit]) -> None:
    assert replayed.refused is None
    assert hits == real.hits
    totals, summary = replayed.totals, real.summary
    assert totals.hit_tokens == summary.hit_tokens
    assert totals.query_tokens == summary.queried_tokens
    assert totals.preemptions == summary.preemptions
    (replica,) = replayed.replicas
    (usage,) = summary.pools.values()
    watch = replica.pool.watch
    assert watch.evictions == summary.evicted_blocks
    assert watch.usage == usage


def test_the_workloads_evict_and_preempt(real: Real) -> None:
    """Otherwise the tests around this one prove less than they say."""
    assert real.summary.evicted_blocks
    assert real.summary.preemptions
    assert real.summary.hit_tokens
    assert any(resumed for _, _, resumed in real.hits)


def test_a_recorded_run_is_predicted_hit_by_hit(real: Real) -> None:
    replayed, hits = replay(real, Arrivals("step"))
    for request in RecordedRequests(real.run, real.engine):
        replayed.feed(request)
    replayed.finish()
    agree(real, replayed, hits)


def test_a_workload_is_predicted_from_its_tokens_alone(real: Real) -> None:
    """As a prompts file would have it: neither hashes nor answers nor arrivals of the run."""
    replayed, hits = replay(real, Arrivals(concurrency=real.sent.workload.concurrency))
    for round_of in rounds(real):
        for request in round_of:
            replayed.feed(request)
        replayed.finish()
    agree(real, replayed, hits)


def rounds(real: Real) -> Iterable[list[SimRequest]]:
    """The prompts in the order in which they were sent, with what the run knows of their tokens."""
    recorded = RecordedRequests(Run(real.run.folder), real.engine)
    by_name = {one.name: one for one in recorded}
    workload = real.sent.workload
    for number in range(1, workload.num_rounds + 1):
        found = []
        for index, prompt in enumerate(workload.prompts):
            one = by_name[f"p{index}-r{number}"]
            adapter = None if prompt.lora is None else Adapter(prompt.lora.name or "")
            found.append(
                replace(
                    one,
                    known=None,
                    adapter=adapter,
                    num_output_tokens=workload.max_tokens,
                    arrival_step=None,
                    arrival_seconds=None,
                )
            )
        yield found
