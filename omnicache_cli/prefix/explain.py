"""Why each prefix hit of a run ended where it did: what bound it, and what would have next."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from omnicache_cli.prefix.case import Case
from omnicache_cli.prefix.ledger import Entry, Ledger
from omnicache_cli.prefix.lookup import effective, layout_of
from omnicache_cli.prefix.reasons import Reason
from omnicache_cli.trace.records import Admission, EngineSource
from omnicache_cli.trace.run import Run
from omnicache_cli.trace.steps import Request, Step
from omnicache_cli.trace.views.view import is_engine, steps_of


@dataclass(frozen=True, slots=True)
class Explanation:
    """One lookup: a request's first one, or one after a preemption."""

    engine: str
    number: int
    external_id: str
    request_id: str
    step: int | None  # None: never admitted
    resumed: bool
    num_prompt_tokens: int | None  # None: its record was lost
    queried_tokens: int | None
    hit_tokens: int | None  # vLLM's own; None: the cache was not asked
    predicted_tokens: int | None  # by the rule, from the events; None: the rule is not known
    group_hit_tokens: tuple[int, ...]  # vLLM's own, of several groups
    reason: Reason
    following: Reason | None = None  # what would end the hit if the reason were out of the way
    donor: Entry | None = None  # of the last block that was hit
    warnings: tuple[str, ...] = ()


def explain_run(run: Run, engine: str | None) -> Iterator[Explanation]:
    """Every lookup, in the order in which they were made; then the requests that had none."""
    explainers: dict[str, Explainer] = {}
    for step in steps_of(run, engine):
        name = step.engine.engine
        if name not in explainers:
            explainers[name] = Explainer(step.engine)
        yield from explainers[name].add(step)
    for name, explainer in explainers.items():
        late = run.never_scheduled_on.get(name, [])
        yield from explainer.rest(late)
    for name, requests in run.never_scheduled_on.items():
        if name not in explainers and is_engine(run, name, engine):
            yield from (_never(name, one) for one in requests)


class Explainer:
    """Follows one engine."""

    def __init__(self, engine: EngineSource) -> None:
        self.engine = effective(engine)
        self.ledger = Ledger(self.engine)
        self.layout = layout_of(self.engine)
        self._waiting: dict[int, Request] = {}  # not admitted yet

    def add(self, step: Step) -> Iterator[Explanation]:
        for request in step.arrived:
            self._waiting[request.number] = request
        scheduled = {request.number: request for request in step.requests}
        for admission in self.ledger.follow(step):
            number = admission.request
            self._waiting.pop(number, None)
            known = self.ledger.known.get(number) or scheduled.get(number)
            if known is not None:
                yield self._explain(step, admission, known)
        gone = [one for one in self._waiting.values() if one.status is not None]
        for request in gone:  # aborted before it ran
            del self._waiting[request.number]
            yield _never(self.engine.engine, request)

    def rest(self, late: list[Request]) -> Iterator[Explanation]:
        for request in [*self._waiting.values(), *late]:
            yield _never(self.engine.engine, request)

    def _explain(self, step: Step, admission: Admission, request: Request) -> Explanation:
        asked = admission.queried_tokens > 0
        one = Explanation(
            self.engine.engine,
            request.number,
            request.external_id,
            request.record.request_id,
            step.number,
            admission.resumed,
            None if request.is_lost else request.record.num_prompt_tokens,
            admission.queried_tokens if asked else None,
            admission.hit_tokens if asked else None,
            None,
            tuple(admission.group_hit_tokens),
            _not_asked(self.engine, admission, request),
        )
        if not asked:
            return one
        if request.is_lost:
            return replace(one, reason=_unknown("the record of the request was lost", one))
        if self.layout is None:
            kinds = ", ".join(group.spec for group in self.engine.groups)
            return replace(one, reason=_unknown(f"the lookup of {kinds} is not known", one))
        case = Case(self.ledger, self.layout, request, admission)
        one = replace(one, predicted_tokens=case.hit(frozenset()), donor=case.donor())
        if one.predicted_tokens != one.hit_tokens:
            text = f"by the events of the run the hit would be {one.predicted_tokens} tokens"
            if self.ledger.first_gap is not None:
                text += f"; records were lost before step {self.ledger.first_gap}"
            return replace(one, reason=_unknown(text, one))
        first, following = case.reasons()
        return replace(one, reason=first, following=following, warnings=tuple(case.collisions()))


def _not_asked(engine: EngineSource, admission: Admission, request: Request) -> Reason:
    if not engine.enable_prefix_caching:
        return Reason("caching-off", 0, "prefix caching is off in this engine")
    if admission.session_prompt_tokens is not None:
        text = "a later part of a streaming-input session goes on with the blocks that it has"
        return Reason("session", 0, text)
    if request.record.skip_reading_prefix_cache:
        return Reason("skips-cache", 0, "the request asks not to read the prefix cache")
    return Reason("unknown", 0, "the cache was not asked, and the run does not say why")


def _unknown(text: str, one: Explanation) -> Reason:
    return Reason("unknown", one.hit_tokens or 0, text)


def _never(engine: str, request: Request) -> Explanation:
    return Explanation(
        engine,
        request.number,
        request.external_id,
        request.record.request_id,
        None,
        False,
        None if request.is_lost else request.record.num_prompt_tokens,
        None,
        None,
        None,
        (),
        Reason("never-admitted", 0, "it ended, or the run did, before it was admitted"),
    )
