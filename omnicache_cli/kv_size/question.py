"""One `omnicache kv-size` from what was asked to a report and an exit code.

The engine room is not known here: `ask_exact` is handed down, and called only where asked for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from omnicache_cli.errors import EXIT_DIFFERS, EXIT_DONE, UsageError
from omnicache_cli.kv_size import answers
from omnicache_cli.kv_size.check import ExactAnswer, check_sections, exact_refusal, exact_report
from omnicache_cli.kv_size.draft import draft_layers
from omnicache_cli.kv_size.estimate import Estimate, estimate, with_memory
from omnicache_cli.kv_size.explain import explain
from omnicache_cli.kv_size.hardware import Card, card_named, memory_bytes
from omnicache_cli.kv_size.layers import Layer
from omnicache_cli.kv_size.memory import (
    DEFAULT_UTILIZATION,
    Budget,
    activation_interval,
    budget,
    graph_interval,
    share_warning,
    weights_interval,
)
from omnicache_cli.kv_size.modalities import item_tokens, parse_audio, parse_image, parse_video
from omnicache_cli.kv_size.model import (
    Reading,
    UnknownArchitectureError,
    bare_reading,
    open_config,
    read_model,
)
from omnicache_cli.kv_size.omni_cache import host_memory, thinker_keys
from omnicache_cli.kv_size.options import Options, Settings, resolve
from omnicache_cli.kv_size.report import estimate_report
from omnicache_cli.kv_size.startup_log import compare_log, options_of_log, read_log
from omnicache_cli.kv_size.sweep import parse_sweep, run_sweep
from omnicache_cli.kv_size.weights import read_weights
from omnicache_cli.kv_size.whatif import MODALITIES, parse_shares, partition
from omnicache_cli.report.model import Lines, Report, Section

AskExact = Callable[[str, Settings, Sequence[int] | None, "Drafter | None"], ExactAnswer]
"""Given a model's folder, settings, bytes per worker and a drafter, what vLLM's own code counts."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """By vLLM's names; `folder` is None where the model drafts by layers of its own."""

    method: str
    folder: str | None


@dataclass(frozen=True, slots=True)
class Question:
    """As typed; amounts and lists are still text."""

    model: str
    options: Options
    stage: str | None = None
    available_kv_memory: tuple[str, ...] = ()
    gpu: str | None = None
    gpu_memory: str | None = None
    gpu_memory_utilization: float | None = None
    weights: str | None = None
    activation_memory: str | None = None
    enforce_eager: bool = False
    length: int | None = None
    speculative_model: str | None = None
    exact: bool = False
    check: bool = False
    explain: bool = False
    sweeps: tuple[str, ...] = ()
    startup_log: Path | None = None
    images: tuple[str, ...] = ()
    videos: tuple[str, ...] = ()
    audios: tuple[str, ...] = ()
    tensor_cache: bool = False
    modal_budget: str | None = None
    compression: str | None = None
    need_tokens: int | None = None
    need_concurrency: float | None = None


@dataclass(frozen=True, slots=True)
class Answered:
    """A report, and EXIT_DIFFERS where a need is not met or the two paths differ."""

    report: Report
    exit_code: int


def answer(question: Question, ask_exact: AskExact) -> Answered:
    """UsageError and BadInputError say which option or field is wrong."""
    _refuse_contradictions(question)
    card = _card(question)
    source = open_config(question.model, question.stage)
    try:
        reading = read_model(source)
    except UnknownArchitectureError:
        if not question.exact:
            raise
        reading = bare_reading(source)
    if question.exact:
        return _exact(question, reading, card, ask_exact)
    return _Fast(question, reading, card, ask_exact).answered()


def _refuse_contradictions(question: Question) -> None:
    if question.length is not None and question.length < 1:
        raise UsageError(f"--length is {question.length}; give a number from 1")
    if question.need_concurrency is not None and not isfinite(question.need_concurrency):
        raise UsageError(f"--need-concurrency is {question.need_concurrency}; give a number")
    if question.exact and question.check:
        raise UsageError("--exact and --check cannot be combined; --check runs both paths")
    if question.exact and (beside := _asked_of_fast_path(question)):
        raise UsageError(
            f"{beside} is answered by the fast path; leave out --exact, or compare with --check"
        )
    if question.available_kv_memory and (question.gpu or question.gpu_memory):
        raise UsageError(
            "--available-kv-memory is what is left of a card; leave out --gpu and --gpu-memory"
        )
    if question.check and question.stage not in (None, "thinker_config"):
        raise UsageError(
            f"--check --stage {question.stage}: vLLM itself runs only an omni model's thinker; "
            "leave out --check"
        )
    if not (question.gpu or question.gpu_memory):
        of_a_card = {
            "--gpu-memory-utilization": question.gpu_memory_utilization,
            "--weights": question.weights,
            "--activation-memory": question.activation_memory,
        }
        for name, value in of_a_card.items():
            if value is not None:
                raise UsageError(f"{name} says what a card holds; give --gpu or --gpu-memory too")
    if question.gpu and question.gpu_memory:
        raise UsageError("--gpu and --gpu-memory both name a card; give one of them")


def _asked_of_fast_path(question: Question) -> str | None:
    asked = {
        "--stage": question.stage,
        "--length": question.length,
        "--explain": question.explain,
        "--sweep": question.sweeps,
        "--startup-log": question.startup_log,
        "--image": question.images,
        "--video": question.videos,
        "--audio": question.audios,
        "--tensor-cache": question.tensor_cache,
        "--modal-budget": question.modal_budget,
        "--compression": question.compression,
    }
    return next((name for name, value in asked.items() if value), None)


def _card(question: Question) -> Card | None:
    if question.gpu is not None:
        return card_named(question.gpu)
    if question.gpu_memory is not None:
        size = memory_bytes(question.gpu_memory, "--gpu-memory")
        return Card(question.gpu_memory, size, "--gpu-memory")
    return None


def _given(question: Question) -> list[int] | None:
    amounts = question.available_kv_memory
    return [memory_bytes(one, "--available-kv-memory") for one in amounts] or None


def _exact(
    question: Question, reading: Reading, card: Card | None, ask_exact: AskExact
) -> Answered:
    settings = resolve(question.options, reading.model, reading.config, reading.text, card)
    folder, drafter = str(reading.source.folder), _drafter(question)
    exact = ask_exact(folder, settings, _given(question), drafter)
    memory: answers.Answer = ([], {})
    available = _given(question)
    if card is not None:
        left = ask_budget(question, reading, settings, card, exact.weight_bytes)
        exact, most = (
            ask_exact(folder, settings, [max(amount, 0)], drafter)
            for amount in (left.available.low, left.available.high)
        )
        memory = answers.memory_answer(left, _exact_capacity(exact), _exact_capacity(most))
        available = [left.available.low]
    refused = exact_refusal(exact, settings, available)
    report = exact_report(str(reading.source.path), settings, exact, memory, refused)
    code = _verdict(question, refused, exact.kv_cache_tokens, exact.max_concurrency)
    return Answered(report, code)


def _exact_capacity(found: ExactAnswer) -> answers.Capacity:
    return answers.Capacity(found.num_blocks, found.kv_cache_tokens, found.max_concurrency)


def _drafter(question: Question) -> Drafter | None:
    method = question.options.speculative_method
    if method is None:
        return None
    if method == "ngram":
        raise UsageError("--exact and --check do not count ngram speculation; leave them out")
    model = question.speculative_model
    return Drafter(method, None if model is None else str(open_config(model).folder))


def ask_budget(
    question: Question, reading: Reading, settings: Settings, card: Card, exact: int | None
) -> Budget:
    """`exact` is the weights' bytes by vLLM's own model, where that was asked."""
    given = question.weights and memory_bytes(question.weights, "--weights")
    activations = question.activation_memory
    activation_bytes = activations and memory_bytes(activations, "--activation-memory")
    return budget(
        card,
        DEFAULT_UTILIZATION
        if question.gpu_memory_utilization is None
        else question.gpu_memory_utilization,
        weights_interval(
            read_weights(reading.source.folder), given or None, exact, settings, reading.model
        ),
        activation_interval(settings, reading.text, activation_bytes or None),
        graph_interval(question.enforce_eager or question.options.platform == "cpu"),
    )


def _verdict(
    question: Question, refusal: str | None, tokens: int | None, concurrency: float | None
) -> int:
    """Whether vLLM starts and every need is met. UsageError: a need without memory."""
    needs = (("--need-tokens", question.need_tokens, tokens),)
    more = (("--need-concurrency", question.need_concurrency, concurrency),)
    for name, need, there in (*needs, *more):
        if need is None:
            continue
        if there is None:
            raise UsageError(f"{name} needs --available-kv-memory, --gpu-memory or --gpu")
        if there < need:
            return EXIT_DIFFERS
    return EXIT_DIFFERS if refusal else EXIT_DONE


class _Fast:
    """The fast path's answer, section by section."""

    def __init__(
        self, question: Question, reading: Reading, card: Card | None, ask_exact: AskExact
    ) -> None:
        self.question, self.reading, self.card, self.ask_exact = question, reading, card, ask_exact
        self.log = read_log(question.startup_log) if question.startup_log is not None else None
        self.options, self.from_log = question.options, list[str]()
        if self.log is not None:
            self.options, self.from_log = options_of_log(self.log, question.options)
        self.draft = self._draft_layers()
        self.sections: list[Section] = []
        self.result: dict[str, Any] = {}
        self.warnings: list[str] = []
        self.exit_code = EXIT_DONE

    def answered(self) -> Answered:
        question = self.question
        found = self._with_memory(self._count(self.options, _given(question)))
        self.exit_code = _verdict(question, found.refusal(), found.tokens, found.concurrency)
        length = question.length or found.settings.max_model_len
        self._items(found)
        if question.tensor_cache:
            self._tensor_cache(found)
        for sweep in question.sweeps:
            self._sweep(sweep, found)
        if self.log is not None:
            older = replace(self.options, async_scheduling=False)
            findings = compare_log(
                self.log,
                lambda memory: self._count(self.options, memory),
                lambda memory: self._count(older, memory),
                _given(question),
            )
            self._add(answers.log_answer(self.log, findings, self.from_log))
        if question.check:
            self._check(found)
        if question.explain:
            lines = explain(self.reading, found, length)
            self._add(([Lines("The arithmetic", lines)], {"explain": lines}))
        if len(self.reading.source.stages) > 1 and question.stage is None:
            stages = ", ".join(self.reading.source.stages)
            self.warnings.append(
                f"an omni model: each stage has a cache of its own; this is the thinker's. Stages: "
                f"{stages}; choose with --stage"
            )
        report = estimate_report(
            self.reading, found, length, self.sections, self.result, self.warnings
        )
        return Answered(report, self.exit_code)

    def _count(self, options: Options, available: Sequence[int] | None) -> Estimate:
        return estimate(self.reading, options, available, self.card, self.draft)

    def _add(self, part: answers.Answer) -> None:
        sections, result = part
        self.sections += sections
        self.result |= result

    def _draft_layers(self) -> Sequence[Layer]:
        question = self.question
        drafter = None
        if question.speculative_model is not None:
            drafter = read_model(open_config(question.speculative_model))
        return draft_layers(
            self.reading,
            question.options.speculative_method,
            question.options.num_speculative_tokens,
            drafter,
        )

    def _with_memory(self, found: Estimate) -> Estimate:
        if self.card is None:
            return found
        left = ask_budget(self.question, self.reading, found.settings, self.card, None)
        low = with_memory(found, [max(left.available.low, 0)])
        high = with_memory(found, [max(left.available.high, 0)])
        pools = [
            answers.Capacity(one.pool.num_blocks, one.tokens, one.concurrency)
            for one in (low, high)
        ]
        self._add(answers.memory_answer(left, *pools))
        if (warning := share_warning(left.available.high, self.card)) is not None:
            self.warnings.append(warning)
        return low

    def _items(self, found: Estimate) -> None:
        question = self.question
        asked = [
            *map(parse_image, question.images),
            *map(parse_video, question.videos),
            *map(parse_audio, question.audios),
        ]
        config, folder = self.reading.config, self.reading.source.folder
        items = [item_tokens(one, config, folder) for one in asked]
        if items:
            self._add(answers.items_answer(items, found))
        if question.modal_budget is None and question.compression is None:
            return
        if found.tokens is None:
            raise UsageError(
                "--modal-budget and --compression need --available-kv-memory or a card"
            )
        sizes = {one.item.modality: one.tokens for one in items if one.tokens}
        shares = partition(
            found.tokens,
            parse_shares(question.modal_budget, "--modal-budget"),
            parse_shares(question.compression, "--compression"),
            {name: sizes[name] for name in MODALITIES if name in sizes},
        )
        self._add(answers.whatif_answer(shares))

    def _tensor_cache(self, found: Estimate) -> None:
        whole = self.reading.source.values
        keys = thinker_keys(whole, self.reading.text, found.settings.dtype)
        memory = host_memory(found, keys)
        if memory is None:
            raise UsageError("--tensor-cache needs --available-kv-memory or a card")
        self._add(answers.host_answer(memory))

    def _sweep(self, text: str, found: Estimate) -> None:
        sweep = parse_sweep(text)
        memory = [worker.available_bytes for worker in found.pool.workers]
        known = [one for one in memory if one is not None]
        if self.card is not None and sweep.name == "max_num_batched_tokens":
            points = run_sweep(sweep, self.options, self._count_on_card)
        else:
            points = run_sweep(
                sweep, self.options, lambda options: self._count(options, known[:1] or None)
            )
        sections, result = answers.sweep_answer(sweep.name, points)
        self._add((sections, result))
        self.result.setdefault("sweeps", []).append(result["sweep"])

    def _count_on_card(self, options: Options) -> Estimate:
        """Activations change with the batch, so each point has a budget of its own."""
        if self.card is None:
            return self._count(options, None)
        found = self._count(options, None)
        left = ask_budget(self.question, self.reading, found.settings, self.card, None)
        return with_memory(found, [max(left.available.low, 0)])

    def _check(self, found: Estimate) -> None:
        memory = [worker.available_bytes for worker in found.pool.workers]
        known = [one for one in memory if one is not None]
        folder = str(self.reading.source.folder)
        exact = self.ask_exact(folder, found.settings, known or None, _drafter(self.question))
        sections, result, agrees = check_sections(found, exact)
        self._add((sections, result))
        if not agrees:
            self.exit_code = EXIT_DIFFERS
