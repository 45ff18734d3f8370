"""Predicts how long LLM calls take, from the engine's cost model and from earlier calls.

  submitted             first token                     last token
      | queueing | prefill | decode ............................. |

    queueing   mean of recent calls of the class: time from submission to first token less predicted
               prefill; it fades while no call is observed, because it depends on the load of the
               moment
    prefill    `Prices.prefill_s` of the prompt tokens that are not expected to be cached, in one
               step, for all calls of the session that run together; times the slope of time to
               first token over it in recent calls of the class
    decode     per expected output token, `Prices.decode_s` in steps with a row of each call of the
               session that runs together with it and of real-time requests of others, on the line
               through the actual seconds per token of recent calls of the class: its slope is how
               fast the machine is, its offset what best-effort rows and the pace add

No figure mixes two of these parts: a call that was cached or queued, or was preempted while it
decoded, changes only the part that it tells something about. What other calls of its own session
took is known too, and is not counted as load of others. What calls wait outside of the engine (for
one that is up, behind a limit of their tenant, for a transform) says nothing about other calls, and
is not predicted.

What these parts are there for, as the median error of the predicted completion of programs over 30
simulated settings (test_calibration.py in tests/semantic has some of them): 6 %. Without a slope of
decode steps it is 9 %, with lines through 15 calls also 10 %, and with only task groups as calls
that run together also 12 %.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bros.core.fair import FairMemory
from bros.core.interfaces import Prices
from bros.core.request import ServiceClass

Function = tuple[str, str]
"""(tenant, name of the function): calls of one function have similar lengths."""

MAX_NAMES = 10_000
"""Functions that are remembered; the least recently observed are forgotten."""

FIRST_GUESS_TOKENS = 128.0
"""Expected output tokens of a function before its first observation."""

GUESSED_PRICES = Prices(token_s=0.001, row_s=0.03)
"""Of an engine without a cost model. What recent calls took relative to them corrects them."""

_QUEUEING_FADES_S = 30.0
"""Queueing that is not observed again fades by a factor of e in this time."""

_RECENT = 40
"""Calls that a line goes through. One preempted call among them does not move it, and the members
of one task group are too few to decide it."""

_EVERY = 4
"""Calls after which slopes are computed anew: that takes 0.2 ms."""

_MIN_SLOPES = 10
"""Fewest pairs of calls with different predictions whose median slope says something."""

_AGREEMENT = 2.0
"""Slopes agree if the quarter points of all of them are at most this factor apart."""

_OTHERS_NOW = 0.5
"""How much the requests that are open now count in a prediction; the usual number has the rest."""

FIRST_GUESS_CHARS = 4.0
"""Characters per token of a prompt before the first observation."""

_CORRECTION_LIMIT = 16.0
"""A corrected step takes at most this times what the cost model says, and at least its inverse."""


@dataclass(slots=True)
class Average:
    """Exponentially weighted mean and variance: those of all values until there are 1 / weight."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, value: float, weight: float) -> None:
        """weight: share of the latest value."""
        self.count += 1
        weight = max(weight, 1.0 / self.count)
        change = value - self.mean
        self.mean += weight * change
        self.variance = (1.0 - weight) * (self.variance + weight * change * change)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallWork:
    """What the engine has to do for one LLM call.

    prompt_tokens: length of its prompt.
    cached_tokens: prompt tokens that are expected to be cached.
    cached_beside: those that the calls which run together with it find cached: also what it shares
        with them and computes itself. None: as many.
    output_tokens: expected output tokens.
    members: mean number of LLM calls of its session that are prefilled and decode together with it,
        itself included.
    others: real-time requests beside its session that are open now.
    """

    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    cached_beside: float | None = None
    members: float = 1.0
    others: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """An LLM call that has ended.

    service_class: its class from submission to end; None if it has changed, or if it was
        submitted more than once: then its times say nothing.
    prompt_tokens: length of its prompt.
    cached_tokens: prompt tokens that were cached.
    output_tokens: generated tokens.
    ttft_s: from its submission to the engine, the one that was accepted, to its first token.
    decode_s: from its first token to its last.
    rows: mean number of LLM calls of its session that decoded meanwhile, itself included.
    others: mean number of real-time requests beside its session that were open meanwhile.
    prefilled_before_s: `model_prefill_s` of other calls of its session before its first token.
    prefilled_after_s: the same between its first token and its last.
    """

    service_class: ServiceClass | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    decode_s: float
    rows: float = 1.0
    others: float = 0.0
    prefilled_before_s: float = 0.0
    prefilled_after_s: float = 0.0


@dataclass(slots=True)
class _FunctionStats:
    tokens: Average = field(default_factory=Average)
    chars_per_token: Average = field(default_factory=Average)


class _Calibration:
    """Actual seconds over predicted ones in recent calls, as slope * predicted + offset.

    Both are medians. Until the slope is known it is 1, or with GUESSED_PRICES, which may be wrong
    by any factor, the median of actual / predicted.

    only_longer: what is not predicted makes calls longer only. Then a known slope remains while
        later calls do not agree on one, but it is at most the median of actual / predicted: calls
        of equal x tell no slope, and would never correct one that is too large.
    """

    def __init__(self, *, only_longer: bool) -> None:
        self._only_longer = only_longer
        self._points: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._until_slope = 0
        self._known: float | None = None
        self.slope = 1.0
        self.offset_s = 0.0

    def add(self, predicted_s: float, actual_s: float, guessed: bool) -> None:
        """A call took actual_s. guessed: predicted_s is by GUESSED_PRICES."""
        self._points.append((predicted_s, actual_s))
        self._until_slope -= 1
        if self._until_slope <= 0:
            self._until_slope = _EVERY if len(self._points) >= _EVERY * _EVERY else 1
            self._known = _slope(self._points) or (self._known if self._only_longer else None)
        if self._known is not None:
            if self._only_longer:
                most = _median(self._ratios(), usual=self._known)
                self._known = min(self._known, max(most, 1.0 / _CORRECTION_LIMIT))
            self.slope = self._known
        elif guessed:
            self.slope = _median(self._ratios(), usual=1.0)
        else:
            self.slope = 1.0
        self.offset_s = _median((y - self.slope * x for x, y in self._points), usual=0.0)

    def _ratios(self) -> Iterator[float]:
        """Actual / predicted of the calls that are not much shorter than the longest one."""
        least = max(x for x, _ in self._points) / 5.0
        return (y / x for x, y in self._points if x > least)


@dataclass(slots=True)
class _ClassEstimates:
    """What recent calls of a class tell.

    queueing_s: as of the time queued_s.
    others: real-time requests beside the session that were open.
    first: times to first token over predicted prefills. A prompt token takes as long whether calls
        wait in queues or not.
    step: seconds per output token over predicted decode steps. The number of best-effort rows
        varies between steps.
    """

    queueing_s: float = 0.0
    queued_s: float = 0.0
    others: Average = field(default_factory=Average)
    first: _Calibration = field(default_factory=lambda: _Calibration(only_longer=True))
    step: _Calibration = field(default_factory=lambda: _Calibration(only_longer=False))


class Estimates:
    """What earlier calls tell about later ones. Times are seconds of one monotonic clock.

    What is learned of texts (lengths) is of one tenant; what is learned of the
    engine (how fast it is, how long requests wait) is of all.

    weight: weight of the latest observation in averages.
    """

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self._functions: FairMemory[Function, _FunctionStats] = FairMemory(MAX_NAMES)
        self._chars_per_token: dict[str, Average] = {}  # by tenant
        self._classes = {service_class: _ClassEstimates() for service_class in ServiceClass}

    def expected_tokens(self, function: Function, max_tokens: int | None) -> float:
        """Expected output tokens of a call; at least 1, at most max_tokens."""
        return self.longest_tokens(function, max_tokens, 1)

    def longest_tokens(self, function: Function, max_tokens: int | None, calls: int) -> float:
        """Expected output tokens of the longest of several calls; at least 1, at most max_tokens.

        It is the mean plus sqrt(2 ln calls) standard deviations, which is what the largest of
        many values of a normal distribution tends to.
        """
        stats = self._functions.get(function)
        if stats is None or not stats.tokens.count:  # of its first calls only prompts are known
            expected = FIRST_GUESS_TOKENS
        else:
            spread = math.sqrt(stats.tokens.variance)
            expected = stats.tokens.mean + math.sqrt(2.0 * math.log(max(1, calls))) * spread
        return max(1.0, expected if max_tokens is None else min(expected, float(max_tokens)))

    def queueing_s(self, service_class: ServiceClass, now: float) -> float:
        """Expected seconds before a request of this class runs, from recent calls."""
        stats = self._classes[service_class]
        return stats.queueing_s * math.exp(min(0.0, stats.queued_s - now) / _QUEUEING_FADES_S)

    def prompt_tokens(self, function: Function, chars: float) -> float:
        """Expected tokens of a prompt, from its characters."""
        stats = self._functions.get(function)
        tenant, _ = function
        known = self._chars_per_token.get(tenant)
        if stats is not None and stats.chars_per_token.count:
            known = stats.chars_per_token
        return chars / (FIRST_GUESS_CHARS if known is None else known.mean or FIRST_GUESS_CHARS)

    def prefill_s(
        self,
        prompt_tokens: float,
        cached_tokens: float,
        prices: Prices | None,
        service_class: ServiceClass = ServiceClass.RT,
        members: float = 1.0,
        cached_beside: float | None = None,
    ) -> float:
        """Predicted seconds to compute what is not cached of the prompts of all members.

        prices: None if the engine has no cost model. members, cached_beside: see CallWork.
        """
        constant_s = (prices or GUESSED_PRICES).constant_s
        beside = cached_tokens if cached_beside is None else cached_beside
        own_s = model_prefill_s(prompt_tokens, cached_tokens, prices)
        beside_s = (members - 1.0) * model_prefill_s(prompt_tokens, beside, prices)
        return self._classes[service_class].first.slope * (constant_s + own_s + beside_s)

    def decode_s(
        self,
        tokens: float,
        context: float,
        prices: Prices | None,
        service_class: ServiceClass,
        rows: float = 1.0,
        others: float = 0.0,
    ) -> float:
        """Predicted seconds to decode tokens after `context`.

        rows: rows of the same program in these steps.
        others: real-time requests beside it that are open now.
        """
        stats = self._classes[service_class]
        step, usual = stats.step, stats.others.mean
        # Those that are open now end meanwhile, and as many as usual take their place.
        step_s = _step_s(context, rows + _OTHERS_NOW * others + (1.0 - _OTHERS_NOW) * usual, prices)
        corrected_s = step.slope * step_s + step.offset_s
        limit = _CORRECTION_LIMIT
        return tokens * min(max(corrected_s, step_s / limit), step_s * limit)

    def seconds(
        self,
        work: CallWork,
        prices: Prices | None,
        now: float,
        service_class: ServiceClass = ServiceClass.RT,
    ) -> float:
        """Predicted seconds of a call from its submission to the engine, or of a whole task group
        whose members are such calls.

        service_class: real-time by default, because a call whose deadline is near becomes that.
        """
        context = work.prompt_tokens + work.output_tokens / 2
        return (
            self.queueing_s(service_class, now)
            + self.prefill_s(
                work.prompt_tokens,
                work.cached_tokens,
                prices,
                service_class,
                work.members,
                work.cached_beside,
            )
            + self.decode_s(
                work.output_tokens, context, prices, service_class, work.members, work.others
            )
        )

    def observe_tokens(self, function: Function, output_tokens: int) -> None:
        """Count the tokens that a call of this function generated."""
        self._function(function).tokens.add(output_tokens, self._weight)

    def observe(
        self, function: Function, call: ObservedCall, prices: Prices | None, now: float
    ) -> None:
        """A call of this function has ended."""
        self.observe_tokens(function, call.output_tokens)
        if call.service_class is None:
            return
        stats = self._classes[call.service_class]
        own_s = model_prefill_s(call.prompt_tokens, call.cached_tokens, prices)
        constant_s = (prices or GUESSED_PRICES).constant_s
        prefill_s = constant_s + call.prefilled_before_s + own_s
        stats.first.add(prefill_s, call.ttft_s, prices is None)
        slope = stats.first.slope
        waited_s = call.ttft_s - slope * prefill_s
        before_s = self.queueing_s(call.service_class, now)
        stats.queueing_s = before_s + self._weight * (max(0.0, waited_s) - before_s)
        stats.queued_s = now
        if call.output_tokens > 1:
            context = call.prompt_tokens + call.output_tokens / 2
            decode_s = call.decode_s - slope * call.prefilled_after_s
            took_s = decode_s / (call.output_tokens - 1)
            stats.others.add(call.others, self._weight)
            step_s = _step_s(context, max(1.0, call.rows) + call.others, prices)
            stats.step.add(step_s, took_s, prices is None)

    def observe_prompt(self, function: Function, chars: float, tokens: int) -> None:
        """Learn how many characters a token has, from a prompt of this function."""
        if tokens:
            of_tenant = self._chars_per_token.setdefault(function[0], Average())
            for average in (of_tenant, self._function(function).chars_per_token):
                average.add(chars / tokens, self._weight)

    def _function(self, function: Function) -> _FunctionStats:
        """The statistics of a function, which counts as the latest one from now on."""
        stats = self._functions.get(function) or _FunctionStats()
        tenant, _ = function
        self._functions.put(tenant, function, stats)
        return stats


def model_prefill_s(prompt_tokens: float, cached_tokens: float, prices: Prices | None) -> float:
    """Seconds that a prefill adds to steps with other work, by the cost model alone."""
    computed = round(max(0.0, prompt_tokens - cached_tokens))
    return (prices or GUESSED_PRICES).prefill_s(computed, round(cached_tokens))


def _slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The median slope of the lines through two of these points whose x are more than a fifth of
    the largest apart (Theil-Sen).

    None if there are few of them or if they do not agree: where calls wait in queues, times to
    first token say nothing about prefills, and where all decode with as many rows, nothing tells a
    slower machine from rows of others.
    """
    if len(points) * (len(points) - 1) < 2 * _MIN_SLOPES:
        return None
    apart = max(x for x, _ in points) / 5.0
    slopes = sorted(
        (y - earlier_y) / (x - earlier_x)
        for number, (x, y) in enumerate(points)
        for earlier_x, earlier_y in itertools.islice(points, number)
        if abs(x - earlier_x) > apart
    )
    if len(slopes) < _MIN_SLOPES:
        return None
    quarter = len(slopes) // 4
    if slopes[-1 - quarter] > _AGREEMENT * max(0.0, slopes[quarter]):
        return None
    return min(max(statistics.median(slopes), 1.0 / _CORRECTION_LIMIT), _CORRECTION_LIMIT)


def _step_s(context: float, rows: float, prices: Prices | None) -> float:
    """Predicted seconds of a step of decode rows, each after `context`."""
    step_s = rows * (prices or GUESSED_PRICES).decode_s(1, round(context), rows)
    return max(step_s, 1e-9)


def _median(values: Iterable[float], usual: float) -> float:
    """The lower median of these and the usual one, so that one slow call does not count alone."""
    return statistics.median_low((usual, *values))
