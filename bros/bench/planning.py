"""From the options of `bros bench` to the requests of each run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bros.bench.plan import Backlog, Piece, Planned, Session, SessionRequest, digest
from bros.bench.results import CapacityTrial, Scenario
from bros.bench.workloads.catalogue import Encoder, find_content
from bros.bench.workloads.contents import (
    TRACES,
    Arrivals,
    ClosedLoop,
    OpenLoop,
    RandomArrivals,
    RecordedArrivals,
    RequestTemplate,
    cut,
    texts_of,
)
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import Attainment

# ---- Fitting plans to the context length of the model; every change is counted.
#
# First all lengths are multiplied by one factor (1: unchanged), then requests that are still too
# long are clipped or skipped:
#
#     factor   the end of every piece moves from token n of its prompt to floor(n x factor), the
#              output length becomes floor(tokens x factor); the last piece and the output keep at
#              least 1 token. Shared prefixes stay shared, and prompts still differ after them
#     CLIP     the longer of prompt and output is shortened until both fit, at most down to half
#              the limit, then the other one too. Prompts lose their end, which is where requests
#              with a shared prefix differ: scale those
#     SKIP     the request is left out, and with it all later turns of its session


_MAX_SKIPPED_IN_A_ROW = 10_000


class Overlong(StrEnum):
    """How to treat a request whose prompt and output exceed the limit together."""

    CLIP = "clip"
    SKIP = "skip"


@dataclass(slots=True)
class FitCounts:
    """requests: all that were fitted.
    scaled: shortened by the factor.
    clipped: too long after scaling.
    skipped: likewise, including the later turns of their sessions.
    sessions: skipped entirely.
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
    """Fits requests and counts the changes.

    limit: tokens of prompt and output together, at least 2.
    factor: in (0, 1].
    Raises ConfigError for other values.
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
        """The fitted request; None if it is skipped."""
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
        """The session with the turns that fit; None if the first one does not."""
        turns: list[SessionRequest] = []
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
    """Fit all requests to `limit` tokens of prompt and output.

    Subtract what the server adds to a prompt (chat template, BOS; Prompts.added_tokens) from the
    limit beforehand. Raises ConfigError for an invalid limit or factor.
    """
    fitter = Fitter(limit, overlong, factor)
    fitted = [fitter.session(session) for session in sessions]
    return Fitted([session for session in fitted if session is not None], fitter.counts)


@dataclass(frozen=True, slots=True)
class FittedBacklog:
    """A plan.Backlog with fitted requests.

    counts: of the requests iterated over so far.
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
        """Endless; raises ConfigError if hardly any request of the backlog fits."""
        skipped_in_a_row = 0
        for planned in self.backlog.requests(seed):
            fitted = self.fitter.request(planned)
            if fitted is not None:
                skipped_in_a_row = 0
                yield fitted
                continue
            skipped_in_a_row += 1
            if skipped_in_a_row == _MAX_SKIPPED_IN_A_ROW:
                raise ConfigError(
                    f"{self.label}: {skipped_in_a_row} requests in a row are too long for "
                    f"{self.fitter.limit} tokens; clip or scale them"
                )


def _total(planned: Planned) -> int:
    return planned.prompt_tokens + planned.output_tokens


# ---- The runs of a comparison.
#
#     scenario                  bros servers started here   server given by --target
#     S0   real-time alone      policy `bros`               requests name their class
#     S1   mixed, unprotected   policy `fcfs`               requests do not name their class
#     S2   best-effort alone    policy `fcfs`               requests name their class
#     S3   mixed, protected     every other policy          requests name their class
#
# If the policy of S0 or S2 is not among --policies, its first one is used instead. Without `fcfs`
# there is no S1.


_PROTECTED_POLICY, _UNPROTECTED_POLICY = "bros", "fcfs"


class Case(NamedTuple):
    """One run.

    rate: real-time requests per second; None without any, or if a trace determines it.
    """

    scenario: Scenario
    rate: float | None

    @property
    def sends_classes(self) -> bool:
        return self.scenario is not Scenario.S1


def mixed_scenario(policy: str | None, *, has_classes: bool) -> Scenario:
    """The scenario of a mixed run: S3 if the server protects real-time requests, else S1.

    policy: None if unknown.
    """
    return Scenario.S3 if has_classes and policy != _UNPROTECTED_POLICY else Scenario.S1


def cases_of_policy(
    policy: str,
    policies: Sequence[str],
    rates: Sequence[float | None],
    scenarios: Collection[Scenario],
) -> list[Case]:
    """The runs on a bros server started with `policy`, one of `policies`."""
    alone = _PROTECTED_POLICY if _PROTECTED_POLICY in policies else policies[0]
    bound = _UNPROTECTED_POLICY if _UNPROTECTED_POLICY in policies else policies[0]
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
    """The runs on a server given by URL. has_classes: its requests can name their class."""
    wanted = [Case(Scenario.S0, rate) for rate in rates]
    wanted.append(Case(Scenario.S2, None))
    mixed = dict.fromkeys((Scenario.S1, mixed_scenario(None, has_classes=has_classes)))
    wanted += [Case(scenario, rate) for scenario in mixed for rate in rates]
    return [case for case in wanted if case.scenario in scenarios]


_DIGEST_REQUESTS = 256
"""Number of requests of the endless backlog that its digest and notes cover."""

_GROUP_BASIS = 1000
"""A backlog has as many groups with shared prefixes as this number of requests would have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedLoad:
    """The load that the options ask for.

    rt, be: workloads, one of workloads.contents.NAMES each.
    in_flight: best-effort requests in flight.
    drain_s: how long open requests may go on after duration_s.
    sessions: expected number in the longest run, which determines how many groups share prefixes.
    longest_prompt: of real-time requests, in tokens; longer ones are cut.
    burstiness: of arrivals, see RandomArrivals.
    zipf: skew of the popularity of groups, see SharedPrefixContent.
    speed: speed-up of a trace.
    forced: responses have exactly the planned lengths.
    factor, overlong: how plans are fitted to the context length, see Fitter.
    slo: objectives that real-time requests send; empty: the server's defaults apply.
    """

    rt: str = "lmsys"
    be: str = "synthetic"
    in_flight: int = 16
    duration_s: float = 120.0
    drain_s: float = 0.0
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
    """The requests of one run.

    rate: sessions per second; None without any.
    texts: piece key -> text, for pieces of real text.
    rt_digest, be_digest: plan.digest of the sessions and of the first requests of the backlog;
        empty without any.
    notes: human-readable remarks on what was left out or shortened.
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
    """context: maximum tokens of prompt and output together.

    Raises ConfigError for unknown workloads and unusable files.
    """
    sessions, rt_label, rt_texts, notes = _real_time(wanted, case, context, tokenizer)
    backlog = None if case.scenario is Scenario.S0 else _best_effort(wanted, context, tokenizer)
    first: list[Planned] = []
    if backlog is not None:
        first = list(itertools.islice(backlog.requests(wanted.seed), _DIGEST_REQUESTS))
        notes = (*notes, *_fit_notes("best-effort", backlog.counts, context))
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
    """A seed for the words of prompts that differs between runs, so that a server with a prefix
    cache has no hits from the previous run."""
    return zlib.crc32(f"{seed}/{case.scenario}/{case.rate}".encode())


def has_recorded_times(name: str) -> bool:
    """Whether a workload has recorded arrival times and thus no rate."""
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
    found = find_content(
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
    template = RequestTemplate(
        ServiceClass.RT, "rt", wanted.slo, wanted.forced, wanted.longest_prompt
    )
    loop = OpenLoop(found.content, arrivals, template)
    sessions = loop.sessions(wanted.duration_s, wanted.seed)
    fitted = fit(sessions, context, wanted.overlong, wanted.factor)
    return _RealTime(
        fitted.sessions,
        loop.label,
        loop.texts,
        (*found.notes, *_fit_notes("real-time", fitted.counts, context)),
    )


def _best_effort(wanted: RequestedLoad, context: int, tokenizer: Encoder) -> FittedBacklog | None:
    if wanted.in_flight == 0:
        return None
    content = find_content(
        wanted.be, seed=wanted.seed, requests=_GROUP_BASIS, tokenizer=tokenizer, zipf=wanted.zipf
    ).content
    template = RequestTemplate(ServiceClass.BE, "be", forced=wanted.forced)
    loop = ClosedLoop(content, wanted.in_flight, template)
    return FittedBacklog(loop, Fitter(context, wanted.overlong, wanted.factor))


def _fit_notes(kind: str, counts: FitCounts, context: int) -> Iterator[str]:
    of = f"of {counts.requests} {kind} requests"
    if counts.scaled:
        yield f"{counts.scaled} {of} were scaled down"
    if counts.clipped:
        yield f"{counts.clipped} {of} were cut to fit the context of {context} tokens"
    if counts.skipped:
        yield f"{counts.skipped} {of} were left out: longer than the context of {context} tokens"


# ---- The search for a server's capacity.


Attempt = Callable[[float], Awaitable[Attainment]]
"""Runs a rate (requests per second); returns the attainment of both objectives."""


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
    """rate: the highest passing rate; None if the lowest one failed.
    tried: in the order of the runs.
    """

    rate: float | None
    tried: tuple[CapacityTrial, ...]


async def find_capacity(attempt: Attempt, rates: Range, asked: float) -> CapacitySearch:
    """Bisection; assumes that a server that fails at a rate also fails at all higher rates.

    asked: required share of real-time requests that meet both objectives.
    """
    tried: list[CapacityTrial] = []
    verdicts: dict[int, bool] = {}
    while (index := next_index(verdicts, rates.count)) is not None:
        rate = rates.rate(index)
        tried.append(CapacityTrial(rate=rate, both_met=await attempt(rate)))
        verdicts[index] = tried[-1].meets(asked)
    passed = [index for index, good in verdicts.items() if good]
    return CapacitySearch(rates.rate(max(passed)) if passed else None, tuple(tried))


def next_index(verdicts: Mapping[int, bool], count: int) -> int | None:
    """The index of 0 .. count - 1 to try next; None once the boundary is known.

    The lowest comes first, because if it fails the search is over; then the highest.
    """
    if not verdicts:
        return 0
    passed = max((index for index, good in verdicts.items() if good), default=-1)
    failed = min((index for index, good in verdicts.items() if not good), default=count)
    if failed == count and count - 1 not in verdicts:
        return count - 1
    return None if failed <= passed + 1 else (passed + failed) // 2
