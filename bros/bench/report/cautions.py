"""What makes the figures of a comparison doubtful, in words."""

from __future__ import annotations

from collections.abc import Iterator

from bros.bench.metrics import ClassMetrics
from bros.bench.records import Outcome
from bros.bench.report.alike import differences
from bros.bench.report.words import CLASS_NAMES, ms, name_of, ordered
from bros.bench.results import BenchResult, ScenarioResult

MAX_CLIENT_SHARE = 0.05
"""A client that takes more of the cores than this may slow down a server beside it."""
MAX_OVERDUE = 0.05
"""With a larger share of its requests open and overdue, a server is stalled or overloaded."""


def warnings(bench: BenchResult) -> list[str]:
    """What makes the figures doubtful, a sentence each; most of them begin with a run's name."""
    found = []
    for result in ordered(bench):
        name = name_of(bench, result)
        found += [f"{name}: {text}" for text in _about_client(result)]
        for service_class, part in result.metrics.by_class.items():
            kind = CLASS_NAMES[service_class]
            found += [f"{name}: {text}" for text in _about_class(part, kind)]
    return found + differences(bench)


def _about_client(result: ScenarioResult) -> Iterator[str]:
    client = result.client
    if client.fell_behind:
        yield (
            "the client fell behind its schedule, so that the load was not what was asked for "
            f"(sent late by {ms(client.lateness_p50_s)} ms at the median, "
            f"{ms(client.lateness_p99_s)} ms at p99, {ms(client.lateness_max_s)} ms at most)"
        )
    if client.cpu_share > MAX_CLIENT_SHARE:
        yield f"the client took {100 * client.cpu_share:.0f} % of the processor cores"


def _about_class(part: ClassMetrics, kind: str) -> Iterator[str]:
    if part.errors:
        why = "; ".join(f"{count} x {reason}" for reason, count in part.reasons.items())
        yield f"{part.errors} of {part.requests} {kind} requests were not completed: {why}"
    if part.requests and not part.completed:
        still_open = part.outcomes[Outcome.OPEN]
        yield f"not one of {part.requests} {kind} requests was completed; {still_open} are open"
    if part.overdue > MAX_OVERDUE * part.requests:
        yield (
            f"{part.overdue} of {part.requests} {kind} requests were still open and overdue at "
            "the end; they count as missed, with the time so far"
        )
    if part.unsent:
        yield f"{part.unsent} of {part.requests} {kind} requests came due and were never sent"
    if part.relegated:
        yield f"{part.relegated} of {part.requests} {kind} requests were served as best-effort"
