"""What a comparison says, in words: names, the verdict and what to be careful about."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bros.bench.metrics import ClassMetrics
from bros.bench.records import Outcome
from bros.bench.results import BenchResult, CapacityResult, Scenario, ScenarioResult
from bros.core.request import ServiceClass, Slo
from bros.simulator.metrics import Share

NOTHING = "-"
CLASS_NAMES = {ServiceClass.RT: "real-time", ServiceClass.BE: "best-effort"}
MAX_CLIENT_SHARE = 0.05
"""A client that takes more of the cores than this may slow down a server beside it."""
MAX_OVERDUE = 0.05
"""With a larger share of its requests open and overdue, a server is stalled or overloaded."""

_WORDS = {
    Outcome.COMPLETED: "completed",
    Outcome.CUT: "cut short",
    Outcome.REFUSED: "refused",
    Outcome.FAILED: "failed",
    Outcome.OPEN: "still open",
}


def percent(share: Share) -> str:
    """With one decimal; never 100 if one was missed."""
    return NOTHING if share.value is None else f"{share.met * 1000 // share.decided / 10:.1f}"


def ms(seconds: float | None) -> str:
    """Milliseconds with three digits or more."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def ratio(value: float | None) -> str:
    """In percent."""
    return NOTHING if value is None else f"{100 * value:.0f}"


def file_name(text: str) -> str:
    """`text` with nothing in it that is special to a shell or a file system."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def objectives(slo: Slo) -> str:
    parts = []
    if slo.ttft_s is not None:
        parts.append(f"first token within {1000 * slo.ttft_s:g} ms")
    if slo.tpot_s is not None:
        parts.append(f"then one every {1000 * slo.tpot_s:g} ms")
    return ", ".join(parts) or "none"


def ordered(bench: BenchResult) -> list[ScenarioResult]:
    """By rate, those without last; then by scenario, in the order in which they were run."""
    return sorted(bench.results, key=lambda r: (r.rt_rate is None, r.rt_rate or 0.0, r.scenario))


def server_name(bench: BenchResult, target: str, policy: str | None) -> str:
    """The policy; the server, too, if there are several."""
    several = len({result.target for result in bench.results}) > 1
    if policy is None or policy == target:
        return target
    return f"{target} {policy}" if several else policy


def name_of(bench: BenchResult, result: ScenarioResult) -> str:
    """Unlike that of any other run: `S3 bros, 0.5/s`."""
    server = server_name(bench, result.target, result.policy)
    at = "" if result.rt_rate is None else f", {result.rt_rate:g}/s"
    return f"{result.scenario} {server}{at}"


def counts(part: ClassMetrics) -> str:
    """`38 completed, 2 refused`."""
    found = [f"{n} {_WORDS[outcome]}" for outcome, n in part.outcomes.items() if n]
    return ", ".join(found) or "none"


def verdict(bench: BenchResult) -> str:
    """The comparison in one sentence."""
    judged = [result for result in bench.results if result.rt.both_met.value is not None]
    mixed = [result for result in judged if result.scenario.mixed]
    if mixed:
        return _mixed_finding(bench, mixed)
    if judged:
        worst = min(judged, key=_attainment)
        at = "" if worst.rt_rate is None else f"at {worst.rt_rate:g}/s "
        return f"Real-time requests alone: {at}{_kept(bench, worst)}."
    if any(result.be.requests for result in bench.results):
        best = max(bench.results, key=lambda result: result.be.tokens_per_s)
        return f"Best-effort requests alone: {best.be.tokens_per_s:.0f} tokens/s."
    return "Nothing was measured."


def capacity(bench: BenchResult, found: CapacityResult) -> str:
    name = server_name(bench, found.target, found.policy)
    share = f"at least {100 * found.asked:g} % of real-time requests within their objectives"
    if found.rate is None:
        return f"At no rate tried does {name} keep {share}."
    return f"{name} keeps {share} up to {found.rate:g} requests/s."


def warnings(bench: BenchResult) -> list[str]:
    """What makes the figures doubtful, a sentence each; most of them begin with a run's name."""
    found = []
    for result in ordered(bench):
        name = name_of(bench, result)
        found += [f"{name}: {text}" for text in _about_client(result)]
        for service_class, part in result.metrics.by_class.items():
            kind = CLASS_NAMES[service_class]
            found += [f"{name}: {text}" for text in _about_class(part, kind)]
    return found


def _mixed_finding(bench: BenchResult, mixed: Sequence[ScenarioResult]) -> str:
    """At the highest rate: the best, preferably protected, and the best of the others."""
    highest = max(result.rt_rate or 0.0 for result in mixed)
    at_highest = [result for result in mixed if (result.rt_rate or 0.0) == highest]
    best = max(at_highest, key=lambda r: (r.scenario is Scenario.S3, _attainment(r)))
    text = f"At {highest:g} real-time requests/s beside best-effort work, {_kept(bench, best)}"
    efficiency = bench.be_efficiency(best, Scenario.S2)
    if efficiency is not None:
        text += f", with {100 * efficiency:.0f} % of the best-effort throughput of a free server"
    others = [result for result in at_highest if result is not best]
    if others:
        second = max(others, key=_attainment)
        name = server_name(bench, second.target, second.policy)
        text += f"; {name} met those of {percent(second.rt.both_met)} %"
        if (efficiency := bench.be_efficiency(second, Scenario.S2)) is not None:
            text += f", with {100 * efficiency:.0f} % of the throughput"
    return text + "."


def _kept(bench: BenchResult, result: ScenarioResult) -> str:
    name = server_name(bench, result.target, result.policy)
    share = result.rt.both_met
    return (
        f"{name} met the objectives of {percent(share)} % of real-time requests "
        f"({share.met} of {share.decided})"
    )


def _attainment(result: ScenarioResult) -> float:
    return result.rt.both_met.value or 0.0


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
