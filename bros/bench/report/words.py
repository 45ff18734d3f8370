"""What a comparison says, in words: figures, names and the verdict."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from bros.bench.confidence import likely
from bros.bench.metrics import ClassMetrics
from bros.bench.records import Outcome
from bros.bench.results import BenchResult, CapacityResult, Scenario, ScenarioResult
from bros.core.request import ServiceClass, Slo
from bros.simulator.metrics import Share

NOTHING = "-"
CLASS_NAMES = {ServiceClass.RT: "real-time", ServiceClass.BE: "best-effort"}

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


def likely_percent(share: Share) -> str:
    """`65-99`: the 95 % interval, rounded away from the share; NOTHING of nothing."""
    interval = likely(share)
    if interval is None:
        return NOTHING
    parts = 1 if interval.high - interval.low > 0.04 else 10  # of a percent
    low = math.floor(100 * parts * interval.low + 1e-6) / parts
    high = math.ceil(100 * parts * interval.high - 1e-6) / parts
    return f"{low:g}-{high:g}"


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


def all_objectives(bench: BenchResult) -> str:
    return "; in other runs ".join(map(objectives, bench.objectives)) or NOTHING


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
    at = "" if result.rt_rate is None else f", {result.rt_rate:g}/s"
    return short_name(bench, result) + at


def short_name(bench: BenchResult, result: ScenarioResult) -> str:
    """Unlike that of any other run at the same rate: `S3 bros`."""
    return f"{result.scenario} {server_name(bench, result.target, result.policy)}"


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
    decided = _decided(found)
    if found.rate is None:
        return f"At no rate tried does {name} keep {share}{decided}."
    return f"{name} keeps {share} up to {found.rate:g} requests/s{decided}."


def _decided(found: CapacityResult) -> str:
    """What the border rests on: the best rate and the next one tried, as far as there are any."""
    passed = [tried for tried in found.tried if tried.rate == found.rate]
    failed = [tried for tried in found.tried if not tried.keeps(found.asked)]
    border = [*passed, *sorted(failed, key=lambda tried: tried.rate)[:1]]
    texts = [
        f"{tried.both_met.met} of {tried.both_met.decided} decided requests at {tried.rate:g}/s"
        for tried in border
    ]
    return f": {', '.join(texts)}" if texts else ""


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
        second = max(others, key=lambda r: (_attainment(r), r.be.tokens_per_s))
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
