"""From what a user asks for to what is sent in one run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bros.bench.plan import Backlog, Piece, Planned, Session, Turn, digest
from bros.bench.results import Scenario, Tried
from bros.bench.workloads.catalogue import Encoder, find
from bros.bench.workloads.contents import (
    TRACES,
    Arrivals,
    ClosedLoop,
    OpenLoop,
    RandomArrivals,
    RecordedArrivals,
    SendingTerms,
    cut,
    texts_of,
)
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Attainment

# ---- Plans made for larger models, fitted to the context of the one at hand; every change counted.
#
# First all lengths are multiplied by one factor (1 leaves them), then what is still too long is
# cut or left out:
#
#     factor   the end of every piece moves from token n of its prompt to floor(n x factor), an
#              answer becomes floor(tokens x factor); the last piece and the answer keep 1 at
#              least. Prompts that began with the same pieces still do, and differ after them
#     CLIP     the longer of prompt and answer gives way until both fit, at most down to half the
#              limit, then the other one too; prompts lose their end, which is where requests with
#              a common prefix differ: scale those
#     SKIP     the request is left out; of a session, also all that come after it


_MOST_IN_VAIN = 10_000


class Overlong(StrEnum):
    """What becomes of a request whose prompt and answer exceed the limit together."""

    CLIP = "clip"
    SKIP = "skip"


@dataclass(slots=True)
class FitCounts:
    """requests: seen.
    scaled: shorter because of the factor.
    clipped, skipped: too long (after scaling); skipped includes the later turns of their sessions.
    sessions: left out entirely.
    """

    requests: int = 0
    scaled: int = 0
    clipped: int = 0
    skipped: int = 0
    sessions: int = 0


class Fitted(NamedTuple):
    sessions: list[Session]
    counts: FitCounts


class Fitter:
    """Fits one request after the other and counts.

    limit: tokens of prompt and answer together, at least 2. factor: in (0, 1]. Raises ConfigError
    for others.
    """

    def __init__(self, limit: int, overlong: Overlong, factor: float = 1.0) -> None:
        if limit < 2:
            raise ConfigError(f"no request fits a limit of {limit} tokens")
        if not 0 < factor <= 1:
            raise ConfigError(f"lengths can be scaled by more than 0 and at most 1, not {factor}")
        self.limit = limit
        self._overlong = overlong
        self._factor = factor
        self.counts = FitCounts()

    def request(self, planned: Planned) -> Planned | None:
        """As it fits; None if it is skipped."""
        self.counts.requests += 1
        fitted = self._scale(planned)
        if fitted != planned:
            self.counts.scaled += 1
        if _total(fitted) <= self.limit:
            return fitted
        if self._overlong is Overlong.SKIP:
            self.counts.skipped += 1
            return None
        self.counts.clipped += 1
        return self._clip(fitted)

    def session(self, session: Session) -> Session | None:
        """With the turns that fit; None if not even the first does."""
        turns: list[Turn] = []
        for turn in session.turns:
            request = self.request(turn.request)
            if request is None:
                left_out = len(session.turns) - len(turns) - 1
                self.counts.requests += left_out
                self.counts.skipped += left_out
                break
            turns.append(turn._replace(request=request))
        if not turns:
            self.counts.sessions += 1
            return None
        return session._replace(turns=tuple(turns))

    def _scale(self, planned: Planned) -> Planned:
        if self._factor == 1.0:
            return planned
        pieces: list[Piece] = []
        whole, end, scaled_end = planned.prompt_tokens, 0, 0
        for piece in planned.prompt:
            end += piece.tokens
            start, scaled_end = scaled_end, self._scaled(end)
            if end == whole:  # the last one
                scaled_end = max(scaled_end, start + 1)
            if scaled_end > start:
                pieces.append(piece._replace(tokens=scaled_end - start))
        return dataclasses.replace(
            planned,
            prompt=tuple(pieces),
            output_tokens=max(1, self._scaled(planned.output_tokens)),
        )

    def _scaled(self, tokens: int) -> int:
        return math.floor(tokens * self._factor)

    def _clip(self, planned: Planned) -> Planned:
        half = self.limit // 2
        output_tokens = min(planned.output_tokens, max(half, self.limit - planned.prompt_tokens))
        return dataclasses.replace(
            planned,
            prompt=cut(planned.prompt, self.limit - output_tokens),
            output_tokens=output_tokens,
        )


def fit(sessions: Iterable[Session], limit: int, overlong: Overlong, factor: float = 1.0) -> Fitted:
    """Sessions none of whose requests has more than `limit` tokens in prompt and answer.

    What the server adds to a prompt (a chat template, a first token) is not counted here: take it
    off the limit (Prompts.added_tokens). Raises ConfigError if limit or factor is impossible.
    """
    fitter = Fitter(limit, overlong, factor)
    fitted = [fitter.session(session) for session in sessions]
    return Fitted([session for session in fitted if session is not None], fitter.counts)


def factor_for(sessions: Sequence[Session], limit: int) -> float:
    """A factor (at most 1) with which all requests fit `limit` tokens; 1 if they do anyway."""
    totals = (_total(turn.request) for session in sessions for turn in session.turns)
    longest = max(totals, default=0)
    # One token less, because a last piece keeps one where it would have none.
    return 1.0 if longest <= limit else (limit - 1) / longest


@dataclass(frozen=True, slots=True)
class FittedBacklog:
    """A plan.Backlog whose requests are all fitted.

    counts: of all requests that have been taken so far.
    """

    backlog: Backlog
    fitter: Fitter

    @property
    def label(self) -> str:
        return self.backlog.label

    @property
    def in_flight(self) -> int:
        return self.backlog.in_flight

    @property
    def counts(self) -> FitCounts:
        return self.fitter.counts

    @property
    def texts(self) -> Mapping[str, str]:
        return texts_of(self.backlog)

    def requests(self, seed: int) -> Iterator[Planned]:
        """Endless; raises ConfigError when next to nothing of the backlog fits."""
        in_vain = 0
        for planned in self.backlog.requests(seed):
            fitted = self.fitter.request(planned)
            if fitted is not None:
                in_vain = 0
                yield fitted
                continue
            in_vain += 1
            if in_vain == _MOST_IN_VAIN:
                raise ConfigError(
                    f"{self.label}: {in_vain} requests after each other are too long for "
                    f"{self.fitter.limit} tokens; clip or scale them"
                )


def _total(planned: Planned) -> int:
    return planned.prompt_tokens + planned.output_tokens


# ---- Which runs make a comparison.
#
#     bros servers of our own, one per policy          a server that runs already
#     S0   real-time alone      under `bros`           classes told
#     S1   mixed, unprotected   under `fcfs`           classes not told
#     S2   best-effort alone    under `fcfs`           classes told
#     S3   mixed, protected     under each other one   classes told
#
# If the policy of a row is not among those compared, the first one takes its place; S1 then has
# none.


_PROTECTED, _UNPROTECTED = "bros", "fcfs"


class Case(NamedTuple):
    """One run.

    rate: real-time requests per second; None without any, or as recorded.
    """

    scenario: Scenario
    rate: float | None

    @property
    def tells_classes(self) -> bool:
        return self.scenario is not Scenario.S1


def mixed_scenario(policy: str | None, *, has_classes: bool) -> Scenario:
    """The most that a server can do for a mixed load. policy: None if it is not known."""
    return Scenario.S3 if has_classes and policy != _UNPROTECTED else Scenario.S1


def cases_of_policy(
    policy: str,
    policies: Sequence[str],
    rates: Sequence[float | None],
    scenarios: Collection[Scenario],
) -> list[Case]:
    """The runs on a server of our own with `policy`, one of `policies`."""
    alone = _PROTECTED if _PROTECTED in policies else policies[0]
    bound = _UNPROTECTED if _UNPROTECTED in policies else policies[0]
    mixed = mixed_scenario(policy, has_classes=True)
    wanted: list[Case] = []
    if policy == alone:
        wanted += [Case(Scenario.S0, rate) for rate in rates]
    if policy == bound:
        wanted.append(Case(Scenario.S2, None))
    wanted += [Case(mixed, rate) for rate in rates]
    return [case for case in wanted if case.scenario in scenarios]


def cases_of_target(
    rates: Sequence[float | None], scenarios: Collection[Scenario], *, has_classes: bool
) -> list[Case]:
    """The runs on a server given by URL. has_classes: it can be told what is best-effort."""
    wanted = [Case(Scenario.S0, rate) for rate in rates]
    wanted.append(Case(Scenario.S2, None))
    mixed = dict.fromkeys((Scenario.S1, mixed_scenario(None, has_classes=has_classes)))
    wanted += [Case(scenario, rate) for scenario in mixed for rate in rates]
    return [case for case in wanted if case.scenario in scenarios]


_DIGESTED = 256
"""So many requests of a backlog, which is endless, make its digest (and its notes)."""

_GROUPED = 1000
"""A backlog has as many groups with common prefixes as so many requests would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLoad:
    """What is to be sent.

    rt, be: of workloads.names.NAMES.
    in_flight: best-effort requests.
    longest_prompt: of real-time requests, in tokens; longer ones are cut.
    forced: answers have exactly the planned lengths.
    sessions: about so many of the longest run, which decides how many groups share prefixes.
    speed: of a trace.
    factor, overlong: how plans are fitted to the context of the model.
    slo: what real-time requests ask the server for; empty leaves it to the server.
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

    rate: sessions per second; None without any.
    rt_digest, be_digest: plan.digest of the sessions and of the first of the backlog, empty
        without.
    notes: for people.
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


def make_plan(wanted: RequestedLoad, case: Case, context: int, tokenizer: Encoder) -> Plan:
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


def _real_time(wanted: RequestedLoad, case: Case, context: int, tokenizer: Encoder) -> _RealTime:
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
    terms = SendingTerms(ServiceClass.RT, "rt", wanted.slo, wanted.forced, wanted.longest_prompt)
    loop = OpenLoop(found.content, arrivals, terms)
    sessions = loop.sessions(wanted.duration_s, wanted.seed)
    fitted = fit(sessions, context, wanted.overlong, wanted.factor)
    return _RealTime(
        fitted.sessions,
        loop.label,
        loop.texts,
        (*found.notes, *_changes("real-time", fitted.counts, context)),
    )


def _best_effort(wanted: RequestedLoad, context: int, tokenizer: Encoder) -> FittedBacklog | None:
    if wanted.in_flight == 0:
        return None
    content = find(
        wanted.be, seed=wanted.seed, requests=_GROUPED, tokenizer=tokenizer, zipf=wanted.zipf
    ).content
    terms = SendingTerms(ServiceClass.BE, "be", forced=wanted.forced)
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


# ---- The highest rate that a server carries within its objectives.


Attempt = Callable[[float], Awaitable[Attainment]]
"""Requests per second in; out, how many of them met both objectives."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rates low, low + step, ... up to high, in requests per second. step > 0."""

    low: float
    high: float
    step: float

    @property
    def count(self) -> int:
        return int((self.high - self.low) / self.step + 1e-9) + 1

    def rate(self, index: int) -> float:
        return round(self.low + index * self.step, 9)


class CapacitySearch(NamedTuple):
    """rate: None if not even the lowest was good enough.
    tried: in the order they were.
    """

    rate: float | None
    tried: tuple[Tried, ...]


async def find_capacity(attempt: Attempt, rates: Range, asked: float) -> CapacitySearch:
    """Bisection; takes for granted that what is too much stays too much at higher rates.

    asked: least share of real-time requests within both objectives.
    """
    tried: list[Tried] = []
    verdicts: dict[int, bool] = {}
    while (index := next_index(verdicts, rates.count)) is not None:
        rate = rates.rate(index)
        tried.append(Tried(rate=rate, both_met=await attempt(rate)))
        verdicts[index] = tried[-1].keeps(asked)
    passed = [index for index, good in verdicts.items() if good]
    return CapacitySearch(rates.rate(max(passed)) if passed else None, tuple(tried))


def next_index(verdicts: Mapping[int, bool], count: int) -> int | None:
    """Which of 0 .. count - 1 to try next; None once the border between good and bad is known.

    The lowest first: where that fails there is nothing to look for. Then the highest.
    """
    if not verdicts:
        return 0
    passed = max((index for index, good in verdicts.items() if good), default=-1)
    failed = min((index for index, good in verdicts.items() if not good), default=count)
    if failed == count and count - 1 not in verdicts:
        return count - 1
    return None if failed <= passed + 1 else (passed + failed) // 2
