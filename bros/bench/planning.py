"""From what a user asks for to what is sent in one run."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bros.bench.cases import Case
from bros.bench.plan import Planned, Session, digest
from bros.bench.results import Scenario
from bros.bench.workloads.arrivals import Arrivals, RandomArrivals, RecordedArrivals
from bros.bench.workloads.catalogue import find
from bros.bench.workloads.content import texts_of
from bros.bench.workloads.fitting import FitCounts, FittedBacklog, Fitter, Overlong, fit
from bros.bench.workloads.loops import ClosedLoop, OpenLoop, Terms
from bros.bench.workloads.names import TRACES
from bros.bench.workloads.sharegpt import Encoder
from bros.core.request import ServiceClass, Slo

_DIGESTED = 256
"""So many requests of a backlog, which is endless, make its digest (and its notes)."""

_GROUPED = 1000
"""A backlog has as many groups with common prefixes as so many requests would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be sent.

    rt, be: of workloads.names.NAMES. in_flight: best-effort requests. longest_prompt: of
    real-time requests, in tokens; longer ones are cut. forced: answers have exactly the planned
    lengths. sessions: about so many of the longest run, which decides how many groups share
    prefixes. speed: of a trace. factor, overlong: how plans are fitted to the context of the
    model. slo: what real-time requests ask the server for; empty leaves it to the server.
    """

    rt: str = "lmsys"
    be: str = "synthetic"
    in_flight: int = 16
    duration_s: float = 120.0
    seed: int = 0
    sessions: int = 1000
    longest_prompt: int | None = None
    burstiness: float = 1.0
    zipf: float = 0.0
    speed: float = 1.0
    forced: bool = True
    factor: float = 1.0
    overlong: Overlong = Overlong.CLIP
    slo: Slo = Slo()


class Plan(NamedTuple):
    """One run.

    rate: sessions per second; None without any. rt_digest, be_digest: plan.digest of the sessions
    and of the first of the backlog, empty without. notes: for people.
    """

    sessions: Sequence[Session]
    backlog: Iterator[Planned]
    in_flight: int
    rate: float | None
    rt_label: str
    be_label: str
    texts: Mapping[str, str]
    rt_digest: str
    be_digest: str
    notes: tuple[str, ...]


def make_plan(wanted: Wanted, case: Case, context: int, tokenizer: Encoder) -> Plan:
    """context: most tokens of prompt and answer together.

    Raises ConfigError for workloads that do not exist or files that cannot be used.
    """
    sessions, rt_label, rt_texts, notes = _real_time(wanted, case, context, tokenizer)
    backlog = None if case.scenario is Scenario.S0 else _best_effort(wanted, context, tokenizer)
    first: list[Planned] = []
    if backlog is not None:
        first = list(itertools.islice(backlog.requests(wanted.seed), _DIGESTED))
        notes = (*notes, *_changes("best-effort", backlog.counts, context))
    recorded = round(len(sessions) / wanted.duration_s, 4) if sessions else None
    return Plan(
        sessions=sessions,
        backlog=backlog.requests(wanted.seed) if backlog else iter(()),
        in_flight=backlog.in_flight if backlog else 0,
        rate=recorded if case.rate is None else case.rate,
        rt_label=rt_label,
        be_label=backlog.label if backlog else "",
        texts={**rt_texts, **texts_of(backlog)},
        rt_digest=digest(sessions, ()) if sessions else "",
        be_digest=digest((), first) if first else "",
        notes=notes,
    )


def text_seed(seed: int, case: Case) -> int:
    """Prompts of the same lengths have other words in other runs, so that a server that keeps
    prefixes does not know them from the run before."""
    return zlib.crc32(f"{seed}/{case.scenario}/{case.rate}".encode())


def has_own_times(name: str) -> bool:
    """Whether a workload brings its own arrival times, so that it has no rate."""
    kind, colon, _ = name.partition(":")
    return bool(colon) and kind in TRACES


class _RealTime(NamedTuple):
    sessions: list[Session]
    label: str
    texts: Mapping[str, str]
    notes: tuple[str, ...]


def _real_time(wanted: Wanted, case: Case, context: int, tokenizer: Encoder) -> _RealTime:
    if case.scenario is Scenario.S2:
        return _RealTime([], "", {}, ())
    found = find(
        wanted.rt,
        seed=wanted.seed,
        requests=wanted.sessions,
        tokenizer=tokenizer,
        zipf=wanted.zipf,
    )
    arrivals: Arrivals
    if found.arrivals is not None:
        arrivals = RecordedArrivals(found.arrivals.times_s, wanted.speed)
    else:
        arrivals = RandomArrivals(case.rate or 0.0, wanted.burstiness)
    terms = Terms(ServiceClass.RT, "rt", wanted.slo, wanted.forced, wanted.longest_prompt)
    loop = OpenLoop(found.content, arrivals, terms)
    sessions = loop.sessions(wanted.duration_s, wanted.seed)
    fitted = fit(sessions, context, wanted.overlong, wanted.factor)
    return _RealTime(
        fitted.sessions,
        loop.label,
        loop.texts,
        (*found.notes, *_changes("real-time", fitted.counts, context)),
    )


def _best_effort(wanted: Wanted, context: int, tokenizer: Encoder) -> FittedBacklog | None:
    if wanted.in_flight == 0:
        return None
    content = find(
        wanted.be, seed=wanted.seed, requests=_GROUPED, tokenizer=tokenizer, zipf=wanted.zipf
    ).content
    terms = Terms(ServiceClass.BE, "be", forced=wanted.forced)
    loop = ClosedLoop(content, wanted.in_flight, terms)
    return FittedBacklog(loop, Fitter(context, wanted.overlong, wanted.factor))


def _changes(kind: str, counts: FitCounts, context: int) -> Iterator[str]:
    of = f"of {counts.requests} {kind} requests"
    if counts.scaled:
        yield f"{counts.scaled} {of} were scaled down"
    if counts.clipped:
        yield f"{counts.clipped} {of} were cut to fit the context of {context} tokens"
    if counts.skipped:
        yield f"{counts.skipped} {of} were left out: longer than the context of {context} tokens"
