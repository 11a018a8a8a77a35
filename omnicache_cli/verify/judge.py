"""Puts both checks together: a verdict for every request and key.

Integrity: restored rows are bit for bit what was written (see `integrity`). Parity: all rows
against a run without a cache, within the noise floor (see `floor`). Tokens and log probabilities
are judged in the same way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from omnicache_cli.trace.workload import Prompt
from omnicache_cli.verify.assembly import Rows, assemble, common
from omnicache_cli.verify.compare import Bound, Difference, compare_rows
from omnicache_cli.verify.faults import Fault, contents
from omnicache_cli.verify.floor import HEADROOM, Floor, Floors, comparable_rows, first_other_token
from omnicache_cli.verify.integrity import Broken, Earlier, IntegrityCheck, Origins, Wrong
from omnicache_cli.verify.ledger import Ledger
from omnicache_cli.verify.results import Pair, Place, Verdict
from omnicache_cli.verify.runs import RequestRun, RunRows

TOKENS = "tokens"
LOGPROBS = "logprobs"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Instead of the noise floor: |found - expected| <= atol + rtol * |expected|."""

    atol: float
    rtol: float


@dataclass(frozen=True, slots=True)
class Runs:
    """All runs of one scenario. Requests with a cache have names of their own."""

    scenario: str
    baseline: RunRows  # without a cache, each prompt alone
    shapes: Sequence[RunRows]  # without a cache, in other batch shapes
    warm: Sequence[RunRows]  # with the cache, in the order in which they ran
    again: RunRows  # the last of them once more
    prompt_of: Mapping[str, str]  # request with a cache -> request of the baseline
    must_hit: frozenset[str]  # requests without a hit of which nothing is verified
    unproved: str | None = None  # why the scenario did not show what it is for
    prompts: Mapping[str, Prompt] = field(default_factory=dict)  # of the baseline


@dataclass(frozen=True, slots=True)
class _Request:
    """One request under judgement."""

    runs: Runs
    run: RunRows
    request: RequestRun
    cold: RequestRun
    must_hit: bool
    broken: Broken
    origins: Origins

    @property
    def split(self) -> int | None:
        return first_other_token(self.cold, self.request)


@dataclass(frozen=True, slots=True)
class Judge:
    """What is the same for all scenarios."""

    keys: Sequence[str]
    block_size: int
    floors: Floors
    tolerance: Tolerance | None = None
    failing_rows: dict[tuple[str, str, str], dict[str, Tensor]] = field(default_factory=dict)

    def pairs(self, runs: Runs, earlier: Earlier = ()) -> list[Pair]:
        """Requests in the order in which they ran, those that filled the cache first."""
        origins = Origins(runs.warm, earlier)
        check = IntegrityCheck(Ledger(), origins, self.keys, self.block_size)
        pairs: list[Pair] = []
        for run in runs.warm:
            broken = check.broken(run)
            for name, request in run.requests.items():
                cold = runs.baseline.requests[runs.prompt_of[name]]
                must_hit = name in runs.must_hit
                one = _Request(runs, run, request, cold, must_hit, broken, origins)
                pairs += [self._rows(one, key) for key in self.keys]
                pairs += self._payload(one)
                pairs += [self._tokens(one), self._logprobs(one)]
        return pairs

    def _rows(self, one: _Request, key: str) -> Pair:
        floor = self.floors.by_key.get(key, Floor())
        expected = assemble(one.runs.baseline.computed, one.cold.request, key)
        found = assemble(one.run.delivered, one.request.request, key)
        wrong = one.broken.get((one.request.request, key)) or _incomplete(one, key, expected, found)
        if wrong is not None and wrong.fault is Fault.UNKNOWN and _changes(one, key):
            text = f"{wrong.diagnosis}, and changes when the same is run again"
            wrong = Wrong(Fault.UNSTABLE, text, wrong.place)
        gap: Difference | None = None
        errors: list[float | None] = []
        if expected is not None and found is not None:
            end = comparable_rows(one.cold, one.split)
            positions, wanted, got = common(expected.up_to(end), found.up_to(end))
            if wanted.shape != got.shape or wanted.dtype != got.dtype:
                wrong = wrong or Wrong(
                    Fault.KIND,
                    f"rows of {tuple(got.shape[1:])} {got.dtype}, without a cache they are "
                    f"{tuple(wanted.shape[1:])} {wanted.dtype}",
                )
            else:
                gap = compare_rows(wanted, got, positions, self._bound(floor))
                by_position = dict(zip(positions, gap.errors, strict=True))
                errors = [by_position.get(position) for position in range(end)]
                wrong = wrong or self._beyond(one, key, gap, got, positions, floor)
                if wrong is not None:
                    self.failing_rows[one.runs.scenario, one.request.request, key] = {
                        "expected": wanted.contiguous(),
                        "found": got.contiguous(),
                        "positions": torch.tensor(positions),
                    }
        restored = [piece for piece in one.run.delivered if piece.request == one.request.request]
        pair = replace(
            self._pair(one, key, gap is not None and gap.num_differing_rows > 0, wrong),
            num_rows=0 if found is None else len(found.positions),
            num_restored_rows=sum(piece.hit_tokens for piece in restored if key in piece.rows),
            noise_floor=floor.absolute,
            relative_floor=floor.relative,
            allowed=None if self.tolerance is not None else HEADROOM * floor.relative,
            row_errors=tuple(errors),
        )
        if gap is None:
            return pair
        return replace(
            pair,
            num_bytes=gap.num_bytes,
            num_differing_rows=gap.num_differing_rows,
            max_abs_error=gap.max_abs_error,
            relative_error=gap.max_relative_error,
        )

    def _payload(self, one: _Request) -> list[Pair]:
        """What is not per token: of each key the first step in which it was changed."""
        became: dict[str, Wrong | None] = {}
        for piece in one.run.delivered:
            if piece.request != one.request.request:
                continue
            for key, text in piece.payload.items():
                wrong = None if text is None else Wrong(Fault.PAYLOAD, f"step {piece.step}: {text}")
                became[key] = became.get(key) or wrong
        return [self._pair(one, key, False, wrong) for key, wrong in became.items()]

    def _bound(self, floor: Floor) -> Bound:
        if self.tolerance is not None:
            return Bound(atol=self.tolerance.atol, rtol=self.tolerance.rtol)
        return Bound(HEADROOM * floor.relative)

    def _beyond(
        self,
        one: _Request,
        key: str,
        gap: Difference,
        found: Tensor,
        positions: Sequence[int],
        floor: Floor,
    ) -> Wrong | None:
        """Rows that are further from the baseline than rounding explains."""
        position = gap.first_position
        if position is None:
            return None
        if self.tolerance is not None:
            limit = f"beyond atol {self.tolerance.atol:g}, rtol {self.tolerance.rtol:g}"
        elif floor.relative:
            limit = f"beyond twice the noise floor of {floor.relative:.2g}"
        else:
            limit = "and runs without a cache do not differ at all"
        slot = _slot_of(one, position)
        place = Place(
            position,
            position // self.block_size,
            None if slot is None else slot // self.block_size,
            slot,
            _step_of(one, position),
            gap.first_column,
            gap.expected_values,
            gap.found_values,
        )
        error = f"{gap.max_relative_error:.2g} of its size"
        row = found[positions.index(position)][None]
        adapter = self._adapter(one, key, position, row, floor)
        if adapter is not None:
            text = f"row {position} is off by {error}, {limit}: it is that of the same prompt"
            return Wrong(Fault.OTHER_ADAPTER, f"{text} {adapter}", place)
        if position >= one.request.hit_tokens:
            text = f"row {position}, computed after the hit, is off by {error}, {limit}"
            return Wrong(Fault.WRONG_KV if one.request.hit_tokens else Fault.UNKNOWN, text, place)
        text = f"row {position}, restored, is off by {error}, {limit}"
        (content,) = contents(row)
        donors = [
            origin
            for origin in one.origins.of(key).origins(content)
            if origin.request != one.request.request
        ]
        if not donors:
            return Wrong(Fault.UNKNOWN, text, place)
        donor = donors[-1]
        theirs = f"{donor.request}, position {donor.position}"
        text += f": a false hit, it is that of {theirs}, which has other tokens"
        return Wrong(Fault.OTHER_REQUEST, text, place)

    def _adapter(
        self, one: _Request, key: str, position: int, row: Tensor, floor: Floor
    ) -> str | None:
        """With which other adapter the same prompt gives this row, without a cache."""
        own = one.runs.prompts.get(one.cold.request)
        for name, other in one.runs.prompts.items():
            if own is None or other.lora == own.lora or replace(other, lora=own.lora) != own:
                continue
            rows = assemble(one.runs.baseline.computed, name, key)
            if rows is None or position not in rows.positions:
                continue
            theirs = rows.rows[rows.positions.index(position)][None]
            if compare_rows(theirs, row, [position], self._bound(floor)).first_position is None:
                return "without an adapter" if other.lora is None else f"with {other.lora.label}"
        return None

    def _tokens(self, one: _Request) -> Pair:
        """Output tokens. Another one is rounding where the choice was that close."""
        split = one.split
        differs = split is not None or len(one.cold.tokens) != len(one.request.tokens)
        wrong: Wrong | None = None
        if split is None and differs:
            wrong = Wrong(
                Fault.OUTPUT,
                f"{len(one.request.tokens)} output tokens, without a cache {len(one.cold.tokens)}",
            )
        elif split is not None and not self._is_close_call(one, split):
            chosen = one.request.tokens[split].token_id
            wrong = Wrong(
                Fault.OUTPUT,
                f"output token {split} is {chosen}, without a cache "
                f"{one.cold.tokens[split].token_id}, by a margin that rounding does not explain",
                Place(one.cold.num_prompt_tokens + split, None, None, None, None),
            )
        return self._pair(one, TOKENS, differs, wrong)

    def _is_close_call(self, one: _Request, split: int) -> bool:
        """Some run without a cache chose otherwise too, or its two best are that close."""
        for shape in one.runs.shapes:
            again = shape.requests.get(one.cold.request)
            other = None if again is None else first_other_token(one.cold, again)
            if other is not None and other <= split:
                return True
        margin = one.cold.tokens[split].margin
        return margin is not None and margin <= HEADROOM * self.floors.logprob

    def _logprobs(self, one: _Request) -> Pair:
        """Of the tokens that both runs chose."""
        pairs = zip(one.cold.tokens[: one.split], one.request.tokens[: one.split], strict=False)
        gaps = [abs(cold.logprob - warm.logprob) for cold, warm in pairs]
        worst = max(gaps, default=0.0)
        floor = self.floors.logprob
        limit = HEADROOM * floor
        if self.tolerance is not None:
            limit = self.tolerance.atol
        wrong = None
        if not worst <= limit:
            index = gaps.index(worst)
            wrong = Wrong(
                Fault.OUTPUT,
                f"the log probability of output token {index} is off by {worst:.2g}, beyond "
                f"{limit:.2g}",
                Place(one.cold.num_prompt_tokens + index, None, None, None, None),
            )
        pair = self._pair(one, LOGPROBS, worst > 0, wrong)
        return replace(
            pair, max_abs_error=worst if gaps else None, noise_floor=floor, allowed=limit
        )

    def _pair(self, one: _Request, key: str, differs: bool, wrong: Wrong | None) -> Pair:
        hit = one.request.hit_tokens
        if wrong is not None:
            verdict, diagnosis = Verdict.CORRUPTION, wrong.diagnosis
        elif one.must_hit and one.runs.unproved is not None:
            verdict, diagnosis = Verdict.NOTHING, one.runs.unproved
        elif one.must_hit and not hit and one.request.num_prompt_tokens > self.block_size:
            verdict = Verdict.NOTHING
            diagnosis = "vLLM reports no cached token for this request: nothing was restored"
        elif differs:
            verdict = Verdict.ROUNDING
            diagnosis = "as far from the baseline as runs without a cache are from each other"
        else:
            verdict, diagnosis = Verdict.EQUAL, ""
        return Pair(
            one.runs.scenario,
            one.request.request,
            key,
            verdict,
            diagnosis,
            hit,
            hit // self.block_size,
            place=None if wrong is None else wrong.place,
            fault=None if wrong is None else wrong.fault,
            must_hit=one.must_hit,
        )


def _incomplete(one: _Request, key: str, expected: Rows | None, found: Rows | None) -> Wrong | None:
    """Positions without a row: a delivery that is too short, or a key that is not there."""
    if expected is None:
        return None  # the model itself does not give this key
    if found is None:
        return Wrong(Fault.NEVER_CACHED, "no rows came back for this key")
    missing = found.missing(one.request.num_rows)
    if not missing:
        return None
    count = one.request.num_rows
    text = f"{count - len(missing)} rows instead of {count}: position {missing[0]} has none"
    return Wrong(
        Fault.SHORT_PREFIX, text, Place(missing[0], None, None, _slot_of(one, missing[0]), None)
    )


def _changes(one: _Request, key: str) -> bool:
    """The same request, run once more, is given other rows."""
    again = assemble(one.runs.again.delivered, one.request.request, key)
    now = assemble(one.run.delivered, one.request.request, key)
    if again is None or now is None or one.request.request not in one.runs.again.requests:
        return False
    _, first, second = common(now, again)
    return contents(first) != contents(second)


def _slot_of(one: _Request, position: int) -> int | None:
    for piece in one.run.delivered:
        if piece.request == one.request.request and position < len(piece.hit_slots):
            return piece.hit_slots[position]
    for computed in one.run.computed:
        offset = position - computed.first_position
        if computed.request == one.request.request and 0 <= offset < len(computed.slots):
            return computed.slots[offset]
    return None


def _step_of(one: _Request, position: int) -> int | None:
    """The step that delivered a position's row last."""
    steps = [
        piece.step
        for piece in one.run.delivered
        if piece.request == one.request.request
        and piece.rows
        and 0 <= position - piece.first_position < max(len(rows) for rows in piece.rows.values())
    ]
    return steps[-1] if steps else None
