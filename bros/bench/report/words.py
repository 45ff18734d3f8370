"""A comparison in words: figures, names, the verdict and warnings."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

from bros.bench.client import Outcome
from bros.bench.metrics import ClassMetrics, confidence_interval
from bros.bench.results import BenchResult, CapacityResult, Scenario, ScenarioResult
from bros.core.config_sources import all_options
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Attainment

NOTHING = "-"
CLASS_NAMES = {ServiceClass.RT: "real-time", ServiceClass.BE: "best-effort"}

_OUTCOME_WORDS = {
    Outcome.COMPLETED: "completed",
    Outcome.CUT: "cut short",
    Outcome.REFUSED: "refused",
    Outcome.FAILED: "failed",
    Outcome.OPEN: "still open",
}


def percent(share: Attainment) -> str:
    """With one decimal, rounded down: never 100 if one was missed."""
    return NOTHING if share.value is None else f"{share.met * 1000 // share.decided / 10:.1f}"


def interval_percent(share: Attainment) -> str:
    """`65-99`: the 95 % confidence interval, rounded outwards."""
    interval = confidence_interval(share)
    if interval is None:
        return NOTHING
    parts = 1 if interval.high - interval.low > 0.04 else 10  # of a percent
    low = math.floor(100 * parts * interval.low + 1e-6) / parts
    high = math.ceil(100 * parts * interval.high - 1e-6) / parts
    return f"{low:g}-{high:g}"


def ms(seconds: float | None) -> str:
    """Milliseconds with at least three significant digits from 10 on."""
    if seconds is None:
        return NOTHING
    value = 1000 * seconds
    return f"{value:.1f}" if abs(value) < 99.95 else f"{value:.0f}"


def ratio(value: float | None) -> str:
    """In percent."""
    return NOTHING if value is None else f"{100 * value:.0f}"


def file_name(text: str) -> str:
    """`text` without characters that are special to a shell or a file system.

    Names in other scripts would all become `-`: they are told apart by a checksum.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", text)
    return plain if text.isascii() else f"{plain}-{zlib.crc32(text.encode()):08x}"


def all_objectives(bench: BenchResult) -> str:
    return "; in other runs ".join(map(objectives, bench.objectives)) or NOTHING


def objectives(slo: Slo) -> str:
    parts = []
    if slo.ttft_s is not None:
        parts.append(f"first token within {1000 * slo.ttft_s:g} ms")
    if slo.tpot_s is not None:
        parts.append(f"then one every {1000 * slo.tpot_s:g} ms")
    if slo.longest_gap_s is not None:
        parts.append(f"never {1000 * slo.longest_gap_s:g} ms apart")
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
    """Unique within a comparison: `S3 bros, 0.5/s`."""
    at = "" if result.rt_rate is None else f", {result.rt_rate:g}/s"
    return short_name(bench, result) + at


def short_name(bench: BenchResult, result: ScenarioResult) -> str:
    """Unique within the runs of one rate: `S3 bros`."""
    return f"{result.scenario} {server_name(bench, result.target, result.policy)}"


def counts(part: ClassMetrics) -> str:
    """`38 completed, 2 refused`."""
    found = [f"{n} {_OUTCOME_WORDS[outcome]}" for outcome, n in part.outcomes.items() if n]
    return ", ".join(found) or "none"


def verdict(bench: BenchResult) -> str:
    """The comparison in one sentence."""
    judged = [result for result in bench.results if result.rt.both_met.value is not None]
    # With --in-flight 0 a mixed run has real-time requests alone.
    mixed = [result for result in judged if result.scenario.mixed and result.be_digest]
    if mixed:
        return _mixed_finding(bench, mixed)
    if judged:
        worst = min(judged, key=_attainment)
        at = "" if worst.rt_rate is None else f"at {worst.rt_rate:g}/s "
        return f"Real-time requests alone: {at}{_attainment_words(bench, worst)}."
    if any(result.be.took_part for result in bench.results):
        best = max(bench.results, key=lambda result: result.be.tokens_per_s)
        return f"Best-effort requests alone: {best.be.tokens_per_s:.0f} tokens/s."
    return "Nothing was measured."


def capacity(bench: BenchResult, found: CapacityResult) -> str:
    name = server_name(bench, found.target, found.policy)
    share = f"at least {100 * found.asked:g} % of real-time requests within their objectives"
    decided = _search_evidence(found)
    if found.rate is None:
        return f"At no rate tried does {name} keep {share}{decided}."
    return f"{name} keeps {share} up to {found.rate:g} requests/s{decided}."


def _search_evidence(found: CapacityResult) -> str:
    """The attainment at the best rate and at the lowest failing one, as far as there are any."""
    passed = [tried for tried in found.tried if tried.rate == found.rate]
    failed = [tried for tried in found.tried if not tried.meets(found.asked)]
    border = [*passed, *sorted(failed, key=lambda tried: tried.rate)[:1]]
    texts = [
        f"{tried.both_met.met} of {tried.both_met.decided} decided requests at {tried.rate:g}/s"
        for tried in border
    ]
    return f": {', '.join(texts)}" if texts else ""


def _mixed_finding(bench: BenchResult, mixed: Sequence[ScenarioResult]) -> str:
    """The best run at the highest rate, S3 before S1, and the best of the others."""
    highest = max(result.rt_rate or 0.0 for result in mixed)
    at_highest = [result for result in mixed if (result.rt_rate or 0.0) == highest]
    best = max(at_highest, key=lambda r: (r.scenario is Scenario.S3, _attainment(r)))
    text = f"At {highest:g} real-time requests/s beside best-effort work, "
    text += _attainment_words(bench, best)
    efficiency = bench.be_efficiency(best, Scenario.S2)
    if efficiency is not None:
        text += f", with {100 * efficiency:.0f} % of the best-effort throughput of S2"
    others = [result for result in at_highest if result is not best]
    if others:
        second = max(others, key=lambda r: (_attainment(r), r.be.tokens_per_s))
        name = server_name(bench, second.target, second.policy)
        text += f"; {name} met those of {percent(second.rt.both_met)} %"
        if (efficiency := bench.be_efficiency(second, Scenario.S2)) is not None:
            text += f", with {100 * efficiency:.0f} % of the throughput"
    return text + "."


def _attainment_words(bench: BenchResult, result: ScenarioResult) -> str:
    name = server_name(bench, result.target, result.policy)
    share = result.rt.both_met
    return (
        f"{name} met the objectives of {percent(share)} % of real-time requests "
        f"({share.met} of {share.decided})"
    )


def _attainment(result: ScenarioResult) -> float:
    return result.rt.both_met.value or 0.0


# ---- Whether the runs of a report are comparable.


_MAX_NAMES = 4
_COMPARED_ELSEWHERE = ("--slo-ttft", "--slo-tpot", "--seed", "--model")


class _Trait(NamedTuple):
    """A property in which comparable runs agree.

    words: for the warning, "... than RUN".
    of: the property of a run; None if it does not apply.
    among: groups the runs; only runs of one group are compared.
    """

    words: str
    of: Callable[[ScenarioResult], Hashable]
    among: Callable[[ScenarioResult], Hashable]


def _all_runs(run: ScenarioResult) -> Hashable:
    return None


def _server_options(run: ScenarioResult) -> Hashable:
    """The options that the command passed to servers."""
    settings = run.command.settings
    known = {option.flag for option in all_options()}
    return frozenset(
        (flag, value)
        for flag, value in settings.items()
        if flag in known and flag not in _COMPARED_ELSEWHERE
    )


def _machine(run: ScenarioResult) -> Hashable:
    environment = run.command.environment
    return (environment.cpu, environment.cores, environment.memory_bytes)


def _versions(run: ScenarioResult) -> Hashable:
    environment = run.command.environment
    packages = frozenset(environment.packages.items())
    return (environment.bros, environment.commit, environment.python, packages)


_TRAITS = (
    _Trait("different objectives", lambda r: r.command.slo if r.rt_digest else None, _all_runs),
    _Trait("different real-time requests", lambda r: r.rt_digest or None, lambda r: r.rt_rate),
    _Trait(
        "different best-effort requests",
        lambda r: (r.be_digest, r.be_load) if r.be_digest else None,
        _all_runs,
    ),
    _Trait(
        "a different measured time",
        lambda r: (r.metrics.window.start_s, r.metrics.window.end_s),
        _all_runs,
    ),
    _Trait(
        "latencies from another moment (due or sent)", lambda r: r.metrics.times_from, _all_runs
    ),
    _Trait("a different --drain", lambda r: r.command.settings.get("--drain", "0"), _all_runs),
    _Trait("a different endpoint", lambda r: r.command.settings.get("--endpoint"), _all_runs),
    _Trait("a different model", lambda r: r.command.settings.get("--model", ""), _all_runs),
    _Trait("a different machine", _machine, _all_runs),
    _Trait("different versions of bros or its packages", _versions, lambda r: r.target),
    _Trait("a different server version", lambda r: r.server_version, lambda r: r.target),
    _Trait("different server options", _server_options, lambda r: r.target),
)


def differences(bench: BenchResult) -> list[str]:
    """A sentence for each difference between runs that their names do not show."""
    runs = ordered(bench)
    return [text for trait in _TRAITS for text in _differences_in(bench, trait, runs)]


def _differences_in(
    bench: BenchResult, trait: _Trait, runs: Sequence[ScenarioResult]
) -> Iterator[str]:
    """Compares all runs with the first one of their group."""
    first: dict[Hashable, ScenarioResult] = {}
    others: dict[Hashable, list[ScenarioResult]] = {}
    for run in runs:
        if trait.of(run) is None:
            continue
        group = trait.among(run)
        if trait.of(run) != trait.of(first.setdefault(group, run)):
            others.setdefault(group, []).append(run)
    for group, found in others.items():
        names = [name_of(bench, run) for run in found]
        more = f"; and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        yield (
            f"{'; '.join(names[:_MAX_NAMES])}{more}: {trait.words} than "
            f"{name_of(bench, first[group])}"
        )


# ---- Warnings about questionable figures.


MAX_CLIENT_SHARE = 0.05
"""A client with a larger share of the cores may slow down a server on the same machine."""
MAX_OVERDUE = 0.05
"""With a larger share of open and overdue requests, a server is stalled or overloaded."""


def warnings(bench: BenchResult) -> list[str]:
    """One sentence per reason to distrust the figures; most begin with the name of a run."""
    found = []
    for result in ordered(bench):
        name = name_of(bench, result)
        found += [f"{name}: {text}" for text in _client_warnings(result)]
        for service_class, part in result.metrics.by_class.items():
            kind = CLASS_NAMES[service_class]
            found += [f"{name}: {text}" for text in _class_warnings(part, kind)]
    return found + differences(bench)


def _client_warnings(result: ScenarioResult) -> Iterator[str]:
    client = result.client
    if client.fell_behind:
        yield (
            "the client fell behind its schedule, so the load differs from the requested one "
            f"(sent late by {ms(client.lateness_p50_s)} ms at the median, "
            f"{ms(client.lateness_p99_s)} ms at p99, {ms(client.lateness_max_s)} ms at most)"
        )
    if client.cpu_share > MAX_CLIENT_SHARE:
        yield f"the client took {100 * client.cpu_share:.0f} % of the processor cores"


def _class_warnings(part: ClassMetrics, kind: str) -> Iterator[str]:
    if part.errors:
        why = "; ".join(f"{count} x {reason}" for reason, count in part.reasons.items())
        yield f"{part.errors} of {part.requests} {kind} requests were not completed: {why}"
    if part.requests and not part.completed:
        still_open = part.outcomes[Outcome.OPEN]
        yield f"none of {part.requests} {kind} requests was completed; {still_open} are open"
    if part.overdue > MAX_OVERDUE * part.requests:
        yield (
            f"{part.overdue} of {part.requests} {kind} requests were still open and overdue at "
            "the end; they count as missed, with the time so far"
        )
    if part.unsent:
        yield f"{part.unsent} of {part.requests} {kind} requests came due and were never sent"
    if part.without_text:
        yield f"{part.without_text} of {part.requests} {kind} requests were completed without text"
    if part.relegated:
        yield f"{part.relegated} of {part.requests} {kind} requests were served as best-effort"
