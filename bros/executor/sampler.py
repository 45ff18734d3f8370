"""Chooses the next token of every row of logits.

Rows are handled one by one in NumPy: a row of logits fits into the cache, where NumPy's vector
loops are several times faster than torch operations over a whole batch (measured at 32 x 49152),
and a row that never meets another cannot depend on it.

Filters are thresholds: a token is allowed if its logit reaches a bound, so equal logits are allowed
or refused together. Among the allowed ones an exponential race (the Gumbel-max trick) decides,
first between blocks of the vocabulary and then within the block that won.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bros.core.plan import SampledToken, SampleSpec
from bros.core.request import SamplingParams, TokenLogprobs
from bros.kernels.staging import CopyEvent, to_device

_Floats32 = NDArray[np.float32]

BLOCK = 256
_SORTABLE = 4096  # numbers that are sorted sooner than counted
_BUCKETS = 2048
SMALLEST_TEMPERATURE = 1e-20  # below it, dividing by the temperature could overflow
_UINT64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
BLOCK_NOISE = 2**32  # noise from here on is for blocks, below it for tokens


class Sampler:
    """Stateless: a row's token depends on its logits and its spec alone, bit by bit."""

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """One token per row, with log-probabilities where they were asked for.

        logits: fp32 [rows, vocab], not changed; a copy is made if they are not on the CPU.
        Order: logit_bias, forbidden tokens, repetition, presence and frequency penalty,
        temperature, min_p, top_k, top_p. Log-probabilities are those of the model itself, before
        any of these. Raises ValueError if a row's best logit is not finite (NaN anywhere in the
        row counts), because whatever produced it is broken, or if every token is forbidden.
        """
        assert logits.dtype == torch.float32 and logits.dim() == 2
        rows: _Floats32 = logits.numpy(force=True)
        return [_sample_row(row, spec) for row, spec in zip(rows, specs, strict=True)]


def noise(seed: int, index: int, first: int, count: int) -> NDArray[np.float64]:
    """`count` exponential random numbers, numbered from `first`, of the draw (seed, index).

    SplitMix64 of the seed and the index starts a SplitMix64 sequence; number i is its i-th value,
    so it depends on (seed, index, i) alone.
    """
    start = noise_start(seed, index)
    state = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    state = state * np.uint64(GOLDEN) + np.uint64(start)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    numbers: NDArray[np.float64] = -np.log(((state >> np.uint64(11)) + 0.5) * 2.0**-53)
    return numbers


def noise_start(seed: int, index: int) -> int:
    """The state, an unsigned 64-bit number, from which the noise of a draw starts."""
    return _splitmix64(_splitmix64(seed & _UINT64) ^ index)


def why_no_token(peak: float) -> str:
    """The error of a row whose best logit is not finite."""
    return f"no token can be chosen: the best logit is {peak}"


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _UINT64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64
    return state ^ (state >> 31)


def _sample_row(raw: _Floats32, spec: SampleSpec) -> tuple[int, TokenLogprobs | None]:
    params = spec.params
    logits = _adjusted(raw, spec)
    token = int(logits.argmax())  # of equals the first; of NaN the first as well
    peak = float(logits[token])
    if not math.isfinite(peak):
        raise ValueError(why_no_token(peak))
    if not params.greedy:
        scaled = logits - np.float32(peak)
        with np.errstate(over="ignore"):  # far below the best is -inf, which is right
            scaled /= np.float32(max(params.temperature, SMALLEST_TEMPERATURE))
        token = _draw(scaled, spec)
    return token, None if params.logprobs is None else _logprobs(raw, token, params.logprobs)


def _adjusted(raw: _Floats32, spec: SampleSpec) -> _Floats32:
    """Logits with biases and penalties; `raw` itself if there are none."""
    params = spec.params
    if not (params.logit_bias or len(spec.forbidden) or params.needs_history):
        return raw
    logits = raw.copy()
    if params.logit_bias:
        biased = np.fromiter(params.logit_bias.keys(), np.intp, len(params.logit_bias))
        logits[biased] += np.fromiter(params.logit_bias.values(), np.float32, len(biased))
    if len(spec.forbidden):
        logits[np.asarray(spec.forbidden, np.intp)] = -np.inf
    if params.needs_history:
        _penalize(logits, np.asarray(spec.token_ids, np.intp), spec.prompt_len, params)
    return logits


def _penalize(
    logits: _Floats32, history: NDArray[np.intp], prompt_len: int, params: SamplingParams
) -> None:
    """In place. The repetition penalty pushes down every token of the history, a positive logit
    by division and a negative one by multiplication; the other two subtract per output token."""
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        seen = logits[history]
        logits[history] = np.where(seen > 0, seen / factor, seen * factor)
    if params.presence_penalty or params.frequency_penalty:
        tokens, counts = np.unique(history[prompt_len:], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[tokens] -= penalty.astype(np.float32)


def _draw(scaled: _Floats32, spec: SampleSpec) -> int:
    """A token with probability softmax(scaled) under the filters. scaled: <= 0, the best is 0.

    Every token, and every block of tokens, has noise of its own, so logits that are off by a
    rounding error (another batch, another chunking) change the choice only where two were about
    to win at once. With one random number and a running sum over the vocabulary, an error
    anywhere would move every boundary after it.
    """
    params = spec.params
    weights = np.exp(scaled)  # relative to the best, so min_p is a bound on them
    if params.min_p > 0.0:
        weights *= weights >= np.float32(params.min_p)
    if 0 < params.top_k < len(scaled):
        weights *= scaled >= _kth_largest(scaled, params.top_k)
    if params.top_p < 1.0:
        weights *= weights >= _nucleus_bound(weights, params.top_p)
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    block = _race(blocks, noise(spec.seed, spec.output_index, BLOCK_NOISE, len(blocks)))
    start = block * BLOCK
    inner = weights[start : start + BLOCK].astype(np.float64)
    return start + _race(inner, noise(spec.seed, spec.output_index, start, len(inner)))


def _kth_largest(values: _Floats32, k: int) -> np.float32:
    """The k-th largest of more than k values."""
    peaks = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if k <= len(peaks):
        # k blocks have a value of at least the k-th largest peak, so nothing below it is needed.
        values = values[values >= np.partition(peaks, -k)[-k]]
    kth: np.float32 = np.partition(values, -k)[-k]
    return kth


def _nucleus_bound(weights: _Floats32, share: float) -> np.float32:
    """The largest bound such that the weights from it upwards have `share` of the mass.

    Looks at the few best tokens first: usually they have the mass, and sorting them is cheap.
    """
    mass = share * float(weights.sum(dtype=np.float64))
    for depth in (4.0, 10.0):
        likely = weights[weights >= math.exp(-depth)]
        if likely.sum(dtype=np.float64) >= mass:
            return _bound_of_mass(likely, mass)
    return _bound_of_mass(weights[weights > 0], mass)


def _bound_of_mass(weights: _Floats32, mass: float) -> np.float32:
    """The weight at which the sum from the largest downwards reaches `mass`. weights > 0.

    A long list is not sorted: a histogram over logarithms finds the narrow range in which the mass
    is reached, and only what lies in that range is.
    """
    if len(weights) > _SORTABLE:
        depths = -np.log(weights)
        scale = np.float32(_BUCKETS - 1) / max(depths.max(), np.float32(1e-6))
        bucket = (depths * scale).astype(np.intp)
        per_bucket = np.bincount(bucket, weights)
        reached = np.cumsum(per_bucket)
        crossing = min(int(np.count_nonzero(reached < mass)), len(reached) - 1)
        mass -= float(reached[crossing] - per_bucket[crossing])
        weights = weights[bucket == crossing]
    ordered = np.sort(weights)[::-1]
    reached = np.cumsum(ordered, dtype=np.float64)
    bound: np.float32 = ordered[min(int(np.count_nonzero(reached < mass)), len(ordered) - 1)]
    return bound


def _race(masses: NDArray[np.float64], times: NDArray[np.float64]) -> int:
    """Exponential race: i wins with probability masses[i] / sum; what has no mass never does."""
    with np.errstate(divide="ignore"):
        return int((times / masses).argmin())


def _logprobs(raw: _Floats32, token: int, k: int) -> TokenLogprobs:
    """log-softmax of the chosen token and of the k best; of equals, the lower ids come first."""
    peak = float(raw.max())
    norm = peak + math.log(np.exp(raw - np.float32(peak)).sum(dtype=np.float64))
    top: tuple[tuple[int, float], ...] = ()
    if k:
        best = np.arange(len(raw))
        if k < len(raw):
            best = np.flatnonzero(raw >= _kth_largest(raw, k))
        best = best[np.argsort(-raw[best], kind="stable")[:k]]
        top = tuple((int(i), float(raw[i]) - norm) for i in best)
    return TokenLogprobs(token, float(raw[token]) - norm, top)


# ---- From logits to the tokens of a step, on the host or where the logits are.


Asked = tuple[str, SampleSpec]
"""Who wants a token, and how it is chosen."""

Draw = Callable[[Tensor, Sequence[SampleSpec]], Tensor]
"""That of device_sampler.py."""


class StepSampler(Protocol):
    """Chooses one token per row. logits: fp32 [rows, vocab], not changed."""

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """In the order of rows. A row with broken logits fails alone: its token has `error`."""
        ...


class HostStepSampler:
    """Row by row on the CPU."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See StepSampler."""
        rows = zip(asked, logits, strict=True)
        return tuple(self._choose(name, spec, row) for (name, spec), row in rows)

    def _choose(self, request_id: str, spec: SampleSpec, logits: Tensor) -> SampledToken:
        try:
            ((token_id, logprobs),) = self._sampler.sample(logits[None], [spec])
        except ValueError as error:
            return SampledToken(request_id, -1, error=str(error))
        return SampledToken(request_id, token_id, logprobs)


class NoStepSampler:
    """For ranks but the first, which have no logits: chooses nothing."""

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See StepSampler."""
        return ()


class DeviceStepSampler:
    """Greedy rows and rows with temperature, top_k, top_p and min_p on the device of the logits.

    Only token ids come to the host then, in one copy. Rows with biases, penalties, forbidden
    tokens or log-probabilities are copied and chosen there, all in one copy as well.
    """

    def __init__(self, sampler: Sampler, draw: Draw | None = None) -> None:
        """draw: None if the host has to choose all tokens but greedy ones."""
        self._on_host = HostStepSampler(sampler)
        self._draw = draw

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See StepSampler."""
        return self.begin(logits, asked).finish()

    def begin(self, logits: Tensor, asked: Sequence[Asked]) -> PendingSamples:
        """Choose what the device can choose; the host does not wait for it."""
        others = [row for row, (_, spec) in enumerate(asked) if not self._is_plain(spec)]
        tokens = found = None
        if len(others) < len(asked):
            peaks, tokens = self._plain(logits, asked)
            found = _sent(torch.stack((tokens, peaks.view(torch.int32))))
        rows = None
        if others:
            every = len(others) == len(asked)
            rows = _sent(logits if every else logits.index_select(0, _rows(others, logits)))
        done = None
        if logits.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return PendingSamples(asked, others, tokens, found, rows, done, self._on_host)

    def _plain(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[Tensor, Tensor]:
        """Peaks (fp32) and tokens (int32) of all rows, also of those whose spec is not plain."""
        peaks, best = logits.max(dim=1)  # of equals the first; NaN anywhere in a row is its peak
        tokens = best.int()
        drawn = [
            row
            for row, (_, spec) in enumerate(asked)
            if not spec.params.greedy and self._is_plain(spec)
        ]
        if drawn and self._draw is not None:
            specs = [asked[row][1] for row in drawn]
            if len(drawn) == len(asked):
                return peaks, self._draw(logits, specs)
            rows = _rows(drawn, logits)
            tokens.index_copy_(0, rows, self._draw(logits.index_select(0, rows), specs))
        return peaks, tokens

    def _is_plain(self, spec: SampleSpec) -> bool:
        """Chosen on the device, from the logits as they are, with nothing else to be told."""
        params = spec.params
        return (params.greedy or self._draw is not None) and not (
            params.logprobs is not None
            or params.logit_bias
            or params.needs_history
            or len(spec.forbidden)
        )


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """The tokens of a step that are chosen or about to be.

    others: rows that the host chooses.
    tokens: int32 [rows] on the device, right for all but them.
    found, rows: the copies on their way to the host, complete once `done` has happened.
    """

    asked: Sequence[Asked]
    others: Sequence[int]
    tokens: Tensor | None
    found: Tensor | None
    rows: Tensor | None
    done: CopyEvent | None
    on_host: HostStepSampler

    def wait(self) -> None:
        """For the device."""
        if self.done is not None:
            self.done.synchronize()

    def finish(self) -> tuple[SampledToken, ...]:
        """Wait for the device, and choose what it could not."""
        self.wait()
        chosen: list[SampledToken] = []
        if self.found is not None:
            ids, peak_bits = self.found
            values = peak_bits.view(torch.float32).tolist()
            found = zip(self.asked, ids.tolist(), values, strict=True)
            chosen = [_sampled(name, token, peak) for (name, _), token, peak in found]
        if self.rows is None:
            return tuple(chosen)
        others = self.on_host(self.rows, [self.asked[row] for row in self.others])
        if not chosen:
            return others
        for row, token in zip(self.others, others, strict=True):
            chosen[row] = token
        return tuple(chosen)


def _sampled(request_id: str, token: int, peak: float) -> SampledToken:
    if not math.isfinite(peak):
        return SampledToken(request_id, -1, error=why_no_token(peak))
    return SampledToken(request_id, token)


def _rows(rows: Sequence[int], logits: Tensor) -> Tensor:
    return to_device(torch.tensor(rows), logits.device)


def _sent(values: Tensor) -> Tensor:
    """A copy on the host, which may still be under way."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host
