"""The loop: sample, hand it on, wait; until the time is over or nobody wants more."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnicache_cli.errors import OmnicacheError
from omnicache_cli.monitor.events import EventReader
from omnicache_cli.monitor.fleet import Fleet, Sample
from omnicache_cli.monitor.rules import Rule
from omnicache_cli.monitor.scrape import Scraper, Target


@dataclass(frozen=True, slots=True)
class Plan:
    """What is watched, and for how long. `num_samples` or `duration` is None for no end."""

    targets: Sequence[Target]
    rules: Sequence[Rule]
    headers: dict[str, str]
    events: Sequence[str]
    replays: Sequence[str]
    interval: float  # seconds, as the next two
    window: float
    timeout: float
    duration: float | None
    num_samples: int | None


def watch(plan: Plan, on_sample: Callable[[Fleet, Sample], None]) -> Fleet:
    """Calls `on_sample` with each sample. KeyboardInterrupt ends it, and is no error.

    OmnicacheError: no server could be read at the start, or one of the events' endpoints.
    """
    reader = EventReader(plan.events, plan.replays)
    fleet = Fleet(plan.targets, plan.rules, plan.events, plan.window)
    with reader, Scraper(plan.targets, plan.headers, plan.timeout) as scraper:
        begun = time.monotonic()
        if plan.events:  # a subscription takes a moment to reach the publisher
            reader.wait_until(begun + 0.2)
        try:
            _loop(plan, fleet, reader, scraper, on_sample)
        except KeyboardInterrupt:
            if fleet.whole() is None:
                raise
    return fleet


def _loop(
    plan: Plan,
    fleet: Fleet,
    reader: EventReader,
    scraper: Scraper,
    on_sample: Callable[[Fleet, Sample], None],
) -> None:
    due = begun = time.monotonic()
    number = 0
    while True:
        scraped = scraper.scrape()
        reader.wait_until(time.monotonic())  # what was published until now
        sample = fleet.add(
            scraped,
            monotonic=time.monotonic(),
            time=time.time(),
            events=reader.snapshot(),
            event_notes=[line for log in reader.logs for line in log.notes()],
        )
        number += 1
        if number == 1:
            _refuse_if_nothing(sample)
        on_sample(fleet, sample)
        if plan.num_samples is not None and number >= plan.num_samples:
            return
        # After a slow server at once; the samples that it cost are not made up for.
        due = max(due + plan.interval, time.monotonic())
        if plan.duration is not None and due > begun + plan.duration and number > 1:
            return
        reader.wait_until(due)


def _refuse_if_nothing(sample: Sample) -> None:
    """A wrong URL is said at once; a server that goes away later is not the end."""
    if len(sample.errors) == len(sample.servers):
        raise worst(sample.errors)


def worst(errors: Sequence[OmnicacheError]) -> OmnicacheError:
    """The one with the highest exit code: a server that is away before a page that is no page."""
    return max(errors, key=lambda error: error.exit_code)
