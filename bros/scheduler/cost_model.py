"""The cost model: predicts how long a step will take (BROS 3.1, with chunked prefill).

    T(step) = constant                              weights are read once, whatever the batch
            + token_s  x padded tokens              matrix products, every token of the step
            + sum of slope x tokens beyond a knot   where products become compute-bound
            + sample_s x rows that sample a token   the head and sampling
            + pair_s   x chunk x context pairs      attention of prompt chunks
            + context_s x context of decode rows    attention of decode rows, with
            + unique_context_s x unique context     shared prefixes read once
    swap(step) = swap_constant_s + swap_token_s x tokens copied to the device, if any
               + swap_out_constant_s + swap_out_token_s x tokens copied to the host, if any

swap(step) is added to T(step); where the device overlaps copies with computation, the longer of
the two counts. A `StepLoad` holds the sums, so adding a candidate costs the same for every batch
size. profiling/ measures steps, fits models and stores them.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from operator import itemgetter

from bros.core.interfaces import Grouping, Prices


class StepLoad:
    """The input of a cost model: running sums over the chunks of a step.

    A chunk of one token is a decode row, all others are prompt chunks. One of which some layers are
    computed already counts as the rest of it, so that numbers need not be whole.

    tokens: of all chunks.
    decode_rows: chunks of one token.
    samples: prompt chunks that end their prompt (decode rows always sample a token), and what
        decode rows that count in part lack of a whole sample.
    pairs: sum of n * context + n * (n + 1) / 2 over prompt chunks of n tokens.
    context: sum of context + 1 over decode rows.
    unique_context: the same, where prefixes that rows share count once.
    swap_tokens: tokens copied between host and device for this step.
    swap_out_tokens: how many of these are copied to the host.
    """

    __slots__ = (
        "context",
        "decode_rows",
        "pairs",
        "samples",
        "swap_out_tokens",
        "swap_tokens",
        "tokens",
        "unique_context",
    )

    def __init__(self) -> None:
        self.tokens: float = 0
        self.decode_rows: float = 0
        self.samples: float = 0
        self.pairs = 0.0
        self.context: float = 0
        self.unique_context: float = 0
        self.swap_tokens = 0
        self.swap_out_tokens = 0

    def snapshot(self) -> StepLoad:
        """A load with the same numbers."""
        load = StepLoad()
        for name in self.__slots__:
            setattr(load, name, getattr(self, name))
        return load

    def copy_out(self, tokens: int) -> None:
        """Add tokens that are copied to the host; a negative number takes some back."""
        self.swap_tokens += tokens
        self.swap_out_tokens += tokens

    def add(
        self,
        tokens: int,
        context: int,
        sampled: bool,
        shared: int = 0,
        swapped: int = 0,
        done: float = 0.0,
        sign: int = 1,
    ) -> None:
        """Add a chunk of `tokens` after `context` cached tokens.

        sampled: the chunk ends its prompt, so a token is sampled.
        shared: how many fewer context tokens the step reads because this row shares prefixes; that
            includes tokens of other rows that share them only with this one.
        swapped: tokens that are restored to the device for it.
        done: the share of its layers that is computed already, a multiple of 1/64.
        sign: -1 takes back an `add` with the same arguments, and leaves the same bits.
        """
        share = sign * (1.0 - done) if done else sign
        self.tokens += share * tokens
        if tokens == 1:
            self.decode_rows += share
            self.samples += sign * done
            self.context += share * (context + 1)
            self.unique_context += share * (context + 1 - shared)
        else:
            self.pairs += share * (tokens * context + tokens * (tokens + 1) / 2)
            self.samples += sign * sampled
        self.swap_tokens += sign * swapped

    def add_rows(self, count: int, context: int, shared: int = 0, swapped: int = 0) -> None:
        """`add` for `count` decode rows with sums of `context`, `shared` and `swapped`: most of the
        calls. Negative numbers take rows back."""
        self.swap_tokens += swapped
        self.tokens += count
        self.decode_rows += count
        self.context += context + count
        self.unique_context += context + count - shared


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A fitted step time model; coefficients are seconds per unit and not negative.

    hinges: (knot, slope) pairs, each adding slope seconds for every padded token above knot; a
        slope may be negative as long as no sum of token_s and slopes is.
    padding: (limit, multiple) pairs with rising limits: up to `limit` tokens, a step costs as much
        as the next multiple; above the last limit, its multiple applies.
    swap_out_constant_s, swap_out_token_s: of copies to the host.
    swap_constant_s, swap_token_s: of copies to the device.
    overlap_swap: copies overlap with the computation.
    """

    constant_s: float
    token_s: float
    sample_s: float
    pair_s: float
    context_s: float
    unique_context_s: float = 0.0
    hinges: tuple[tuple[int, float], ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    swap_constant_s: float = 0.0
    swap_token_s: float = 0.0
    swap_out_constant_s: float = 0.0
    swap_out_token_s: float = 0.0
    overlap_swap: bool = False
    _known: dict[float, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def padded(self, tokens: float) -> float:
        """Tokens that the device computes for `tokens`, with padding."""
        if not self.padding:
            return tokens
        index = bisect.bisect_left(self.padding, tokens, key=itemgetter(0))
        index = min(index, len(self.padding) - 1)
        multiple = self.padding[index][1]
        return -(-tokens // multiple) * multiple

    def seconds(self, load: StepLoad) -> float:
        """Time of the step; 0 for an empty one."""
        if load.tokens == 0:
            return 0.0
        computing = (
            self._products(load.tokens)
            + self.sample_s * (load.samples + load.decode_rows)
            + self.pair_s * load.pairs
            + self.context_s * load.context
            + self.unique_context_s * load.unique_context
        )
        if load.swap_tokens == 0:
            return computing
        swapping = self.swap_seconds(load)
        return max(computing, swapping) if self.overlap_swap else computing + swapping

    def swap_seconds(self, load: StepLoad) -> float:
        """Time of the step's copies alone."""
        out, seconds = load.swap_out_tokens, 0.0
        if out:
            seconds = self.swap_out_constant_s + self.swap_out_token_s * out
        if back := load.swap_tokens - out:
            seconds += self.swap_constant_s + self.swap_token_s * back
        return seconds

    def decode_seconds(self, load: StepLoad) -> float:
        """Time of a step of only the decode rows; 0 if there are none."""
        if load.decode_rows == 0:
            return 0.0
        return (
            self._products(load.decode_rows)
            + self.sample_s * load.decode_rows
            + self.context_s * load.context
            + self.unique_context_s * load.unique_context
        )

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """Time of a prompt of `tokens` after `context` cached ones, in its own step."""
        if tokens < 2:
            load = StepLoad()
            load.add(tokens, context, True)
            return self.seconds(load)
        # Written out: 0.5 instead of 1.9 us, for each late prompt of a step.
        pairs = tokens * context + tokens * (tokens + 1) / 2
        return self._products(tokens) + self.sample_s + self.pair_s * pairs

    def prices(self, most_tokens: int) -> Prices:
        """What work costs beside other work, for routers and for predictions of whole calls.

        A prompt token costs the mean slope from half of `most_tokens`, the most tokens of a step,
        to all of them. Output tokens cost what they do in a step of their own, without padding.
        """
        half = max(1, most_tokens // 2)
        token_s = (self._products(2 * half) - self._products(half)) / half
        return Prices(
            constant_s=self.constant_s,
            token_s=token_s,
            pair_s=self.pair_s,
            row_s=self.token_s + self.sample_s,
            context_s=self.context_s + self.unique_context_s,
            hinges=self.hinges,
        )

    def _products(self, tokens: float) -> float:
        seconds = self._known.get(tokens)
        if seconds is None:
            seconds = self._known[tokens] = self._matrix_products(tokens)
        return seconds

    def _matrix_products(self, tokens: float) -> float:
        padded = self.padded(tokens)
        seconds = self.constant_s + self.token_s * padded
        for knot, slope in self.hinges:
            if padded > knot:
                seconds += slope * (padded - knot)
        return seconds


_RHO_LOW, _RHO_HIGH = 0.5, 2.0
_RATIO_LOW, _RATIO_HIGH = 0.8, 1.25
_MAX_SLOWDOWN = 10.0
_SLOWDOWN_ALPHA = 0.05
_FACTOR_STEP = 0.01
_RARE_QUANTILE, _RARE_STEP = 0.999, 0.1
_MIN_RARE, _MAX_RARE = 1.04, 2.0


class StepTimePredictor:
    """A CostModel corrected online by the measured times of steps.

    Each phase has a factor rho, a moving average of actual / predicted clipped to [0.5, 2] (BROS
    3.1): rho_decode scales the time of the decode rows alone, rho_prefill what the prompt chunks
    add to it. They follow quickly, as a slow step rarely comes alone where others use the same
    cores (the deviations of two steps in sequence have a correlation of 0.8), but no single step
    moves them by more than a quarter times `alpha`.

    An objective is a percentile and not a mean, so `safe_seconds` multiplies with a safety factor
    that follows the `quantile` of actual / predicted: it rises a little after each step that takes
    longer, and falls less after each that does not. `rare_factor` does the same for the 99.9th
    percentile, in larger steps, as what is rare is seen rarely. On shared cores it is further away
    than it is for a normal distribution: of 3,258 steps of the hybrid load 5 % took more than 1.12
    times as long as expected, and 0.4 % more than 1.5 times. One slow step raises it by 0.1, which
    takes a thousand others to forget; meanwhile best-effort work leaves more time before first
    tokens.

    Ablation: tight, attainment -15 points without a margin; tiers, -7 points with a fixed one; slow
    machine, p99 gap +24 % without rho.

    safety_factor: follows `quantile`.
    rare_factor: follows the 99.9th percentile.
    slowdown: slow moving average of actual / predicted by the model alone.
    grouping: which shared prefixes are read once; None if the model does not account for them.
    """

    def __init__(
        self,
        model: CostModel,
        *,
        alpha: float = 0.15,
        quantile: float = 0.95,
        max_factor: float = 1.5,
        grouping: Grouping | None = None,
    ) -> None:
        self.model = model
        self.grouping = grouping
        self.rho_prefill = 1.0
        self.rho_decode = 1.0
        self.safety_factor = 1.05
        self.rare_factor = 1.10
        self.slowdown = 1.0
        self._alpha = alpha
        self._quantile = quantile
        self._max_factor = max_factor

    @property
    def rare_share(self) -> float:
        """The share of a time that a safe prediction may take, if it is to leave the margin of
        `rare_factor`. Ablation: one-token flood, attainment -4 points without."""
        return min(self.safety_factor / self.rare_factor, 1.0)

    def seconds(self, load: StepLoad) -> float:
        """The expected time of a step."""
        decode, rest = self._phases(load)
        return self.rho_decode * decode + self.rho_prefill * rest

    def safe_seconds(self, load: StepLoad) -> float:
        """The expected time with safety margin, which a step rarely exceeds."""
        if load.decode_rows == load.tokens and not (load.swap_tokens or load.samples):
            return self.safety_factor * self.rho_decode * self.model.decode_seconds(load)
        return self.safety_factor * self.seconds(load)

    def prefill_seconds(self, tokens: int, context: int = 0) -> float:
        """The expected time of a prompt in its own step."""
        return self.rho_prefill * self.model.prefill_seconds(tokens, context)

    def added_prefill_seconds(self, tokens: int) -> float:
        """The expected time that `tokens` add to a step with as many prompt tokens."""
        return self.prefill_seconds(2 * tokens) - self.prefill_seconds(tokens)

    def observe(self, load: StepLoad, actual_s: float) -> None:
        """Correct the factors by a step that ran. Outliers are clipped."""
        decode, rest = self._phases(load)
        expected = self.rho_decode * decode + self.rho_prefill * rest
        if expected <= 0.0:
            return
        slowdown = min(actual_s / (decode + rest), _MAX_SLOWDOWN)
        self.slowdown += _SLOWDOWN_ALPHA * (slowdown - self.slowdown)
        ratio = actual_s / expected
        self._follow(ratio)
        decode = self.rho_decode * decode / expected
        ratio = min(max(ratio, _RATIO_LOW), _RATIO_HIGH)
        self.rho_decode = _corrected(self.rho_decode, ratio, self._alpha * decode)
        self.rho_prefill = _corrected(self.rho_prefill, ratio, self._alpha * (1.0 - decode))

    def _phases(self, load: StepLoad) -> tuple[float, float]:
        """The model's time of the decode rows alone, and what the rest of the step adds."""
        decode = self.model.decode_seconds(load)
        if load.decode_rows == load.tokens and not (load.swap_tokens or load.samples):
            return decode, 0.0
        return decode, self.model.seconds(load) - decode

    def _follow(self, ratio: float) -> None:
        self.safety_factor = _followed(
            self.safety_factor, ratio, self._quantile, _FACTOR_STEP, 1.0, self._max_factor
        )
        self.rare_factor = _followed(
            self.rare_factor, ratio, _RARE_QUANTILE, _RARE_STEP, _MIN_RARE, _MAX_RARE
        )


def _followed(
    factor: float, ratio: float, quantile: float, step: float, least: float, most: float
) -> float:
    """One step of a stochastic search for a quantile of the ratios."""
    return min(max(factor + step * (quantile - (ratio <= factor)), least), most)


def _corrected(rho: float, ratio: float, weight: float) -> float:
    return min(max(rho * (1.0 + weight * (ratio - 1.0)), _RHO_LOW), _RHO_HIGH)
