"""Samples the next token of every row of logits.

    step sampler     all rows of a step: HostStepSampler, or DeviceStepSampler where logits are on a
                     device; it asks the grammars
    row sampler      draws tokens of rows on the host: NativeSampler, by compiled code, or
                     NumpySampler, row by row, which defines the result and needs no compiler

Filters are thresholds: a token is allowed if its logit reaches a bound, so tokens with equal logits
are all allowed or all excluded. An exponential race (the Gumbel-max trick) picks one of the allowed
tokens: first a block of the vocabulary, then a token within that block.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bros.core.plan import SampledToken, SampleSpec
from bros.core.request import SamplingParams, TokenLogprobs
from bros.kernels.staging import CopyEvent, copy_to_host, to_device

_Floats32 = NDArray[np.float32]

Mask = bytes | bytearray | memoryview
"""See TokenConstraint.mask."""

BLOCK = 256
_SORTABLE = 4096  # up to this many numbers, sorting is faster than a histogram
_BUCKETS = 2048
SMALLEST_TEMPERATURE = 1e-20  # below it, dividing by the temperature could overflow
_UINT64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
_SECOND_DRAW = 0x5DEECE66D5DEECE6  # changes the seed where the grammar refused the first draw
BLOCK_NOISE = 2**32  # noise numbers from here on are for blocks, those below for tokens


@dataclass(slots=True)
class RowDraw:
    """One token to be drawn.

    row: of the logits.
    index: of the token in its output.
    mask: the tokens that the grammar of the row allows, as of TokenConstraint.mask, after it has
        refused the token of the first draw; None in a first draw.
    """

    request_id: str
    row: int
    spec: SampleSpec
    index: int
    mask: Mask | None = None

    @property
    def seed(self) -> int:
        """Of the noise: a second draw has its own."""
        return self.spec.seed if self.mask is None else self.spec.seed ^ _SECOND_DRAW


class RowSampler(Protocol):
    """Draws tokens. Stateless: a token depends only on its row and its draw, bit for bit."""

    def sample(self, logits: Tensor, draws: Sequence[RowDraw]) -> list[SampledToken]:
        """One token per draw, with log-probabilities if its spec asks for them.

        logits: fp32 [rows, vocab], not changed; copied if they are not on the CPU.
        Order: logit_bias, forbidden tokens, repetition, presence and frequency penalty, mask,
        temperature, min_p, top_k, top_p. Log-probabilities are those of the model, before any of
        these. The token has an error instead if the largest logit of its row is not finite or the
        row has a NaN (a defect of the model or a kernel), or if every token is forbidden. Does not
        ask the constraint of a spec. Raises IndexError for a token outside the vocabulary.
        """
        ...


class NumpySampler:
    """Implements RowSampler row by row in NumPy, the definition of its results.

    A row of logits fits into the CPU's cache, where NumPy is several times faster than torch over
    the whole batch (measured at 32 x 49152).
    """

    def sample(self, logits: Tensor, draws: Sequence[RowDraw]) -> list[SampledToken]:
        """See RowSampler."""
        assert logits.dtype == torch.float32 and logits.dim() == 2
        rows: _Floats32 = logits.numpy(force=True)
        return [_sample_row(rows[draw.row], draw) for draw in draws]


def noise(seed: int, index: int, first: int, count: int) -> NDArray[np.float64]:
    """Exponential random numbers `first` .. first + count - 1 of the draw (seed, index).

    Number i is the i-th value of a SplitMix64 sequence whose start is SplitMix64 of seed and index,
    so it depends only on (seed, index, i).
    """
    start = noise_start(seed, index)
    state = np.arange(first, first + count, dtype=np.uint64)
    state = _splitmix64_each(state * np.uint64(GOLDEN) + np.uint64(start))
    numbers: NDArray[np.float64] = -np.log(((state >> np.uint64(11)) + 0.5) * 2.0**-53)
    return numbers


def noise_start(seed: int, index: int) -> int:
    """The start of the SplitMix64 sequence of a draw, an unsigned 64-bit number."""
    return _splitmix64(_splitmix64(seed & _UINT64) ^ index)


def noise_starts(specs: Sequence[SampleSpec], indexes: Sequence[int]) -> NDArray[np.uint64]:
    """`noise_start` of the first draw of each spec, for the token at the index beside it."""
    seeds = np.array([spec.seed & _UINT64 for spec in specs], np.uint64)
    mixed = _splitmix64_each(seeds)
    return _splitmix64_each(mixed ^ np.array(indexes, np.uint64))


class NothingAllowedError(ValueError):
    """The grammar of a row allows no token."""

    def __init__(self) -> None:
        super().__init__("the grammar allows no token here")


def no_token_error(peak: float) -> str:
    """The error message for a row whose largest logit `peak` is not finite."""
    return f"no token can be chosen: the best logit is {peak}"


def _splitmix64(state: int) -> int:
    state = (state + GOLDEN) & _UINT64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _UINT64
    return state ^ (state >> 31)


def _splitmix64_each(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """_splitmix64 of each number; sums and products wrap around."""
    state = state + np.uint64(GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _sample_row(raw: _Floats32, draw: RowDraw) -> SampledToken:
    k = draw.spec.params.logprobs
    try:
        token = _choose(raw, draw)
        logprobs = None if k is None else _logprobs(raw, token, k)
    except ValueError as error:
        of_grammar = isinstance(error, NothingAllowedError)
        return SampledToken(draw.request_id, -1, error=str(error), of_grammar=of_grammar)
    return SampledToken(draw.request_id, token, logprobs)


def _choose(raw: _Floats32, draw: RowDraw) -> int:
    params = draw.spec.params
    logits = _adjusted(raw, draw.spec)
    if draw.mask is not None:
        logits = np.where(_allowed(draw.mask, len(logits)), logits, np.float32(-np.inf))
    token = int(logits.argmax())  # the first of equal logits; the first NaN if there is one
    peak = float(logits[token])
    if not math.isfinite(peak):
        raise ValueError(no_token_error(peak))
    if params.greedy:
        return token
    scaled = logits - np.float32(peak)
    with np.errstate(over="ignore"):  # logits far below the peak become -inf, as intended
        scaled /= np.float32(max(params.temperature, SMALLEST_TEMPERATURE))
    return _draw(scaled, params, draw.seed, draw.index)


def _allowed(mask: Mask, vocab: int) -> NDArray[np.bool_]:
    """Which tokens a mask allows. Raises ValueError if that is none."""
    bytes_ = np.frombuffer(mask, np.uint8)
    bits = np.unpackbits(bytes_, count=min(vocab, 8 * len(bytes_)), bitorder="little")
    allowed = np.zeros(vocab, np.bool_)
    allowed[: len(bits)] = bits
    if not allowed.any():
        raise NothingAllowedError
    return allowed


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
    """In place. The repetition penalty divides the positive logits of tokens in the history and
    multiplies the negative ones; presence and frequency penalty subtract, for output tokens."""
    if params.repetition_penalty != 1.0:
        factor = np.float32(params.repetition_penalty)
        seen = logits[history]
        logits[history] = np.where(seen > 0, seen / factor, seen * factor)
    if params.presence_penalty or params.frequency_penalty:
        tokens, counts = np.unique(history[prompt_len:], return_counts=True)
        penalty = params.presence_penalty + params.frequency_penalty * counts
        logits[tokens] -= penalty.astype(np.float32)


def _draw(scaled: _Floats32, params: SamplingParams, seed: int, index: int) -> int:
    """Draw a token with probability softmax(scaled) under the filters.

    scaled: logits / temperature, shifted so that the largest is 0.

    Every token and every block has its own noise, so a rounding error in the logits (from another
    batch or chunking) changes the token only if two tokens nearly tie. With one random number
    and a running sum over the vocabulary, an error would move every boundary after it.
    """
    weights = np.exp(scaled)  # relative to the largest, so that min_p is a bound on them
    if params.min_p > 0.0:
        weights *= weights >= np.float32(params.min_p)
    if 0 < params.top_k < len(scaled):
        weights *= scaled >= _kth_largest(scaled, params.top_k)
    if params.top_p < 1.0:
        weights *= weights >= _nucleus_bound(weights, params.top_p)
    blocks = np.add.reduceat(weights, np.arange(0, len(weights), BLOCK), dtype=np.float64)
    block = _race(blocks, noise(seed, index, BLOCK_NOISE, len(blocks)))
    start = block * BLOCK
    inner = weights[start : start + BLOCK].astype(np.float64)
    return start + _race(inner, noise(seed, index, start, len(inner)))


def _kth_largest(values: _Floats32, k: int) -> np.float32:
    """The k-th largest of more than k values."""
    peaks = np.maximum.reduceat(values, np.arange(0, len(values), BLOCK))
    if k <= len(peaks):
        # k blocks have a value >= the k-th largest peak, so smaller values cannot be the answer.
        values = values[values >= np.partition(peaks, -k)[-k]]
    kth: np.float32 = np.partition(values, -k)[-k]
    return kth


def _nucleus_bound(weights: _Floats32, share: float) -> np.float32:
    """The largest bound such that the weights >= bound have `share` of the total mass (top-p).

    Tries the few largest weights first: usually they have that mass, and sorting them is cheap.
    """
    mass = share * float(weights.sum(dtype=np.float64))
    for depth in (4.0, 10.0):
        likely = weights[weights >= math.exp(-depth)]
        if likely.sum(dtype=np.float64) >= mass:
            return _bound_of_mass(likely, mass)
    return _bound_of_mass(weights[weights > 0], mass)


def _bound_of_mass(weights: _Floats32, mass: float) -> np.float32:
    """The weight at which the sum from the largest downwards reaches `mass`. weights > 0.

    For a long list, a histogram over logarithms finds the narrow range in which the mass is
    reached, and only the weights in that range are sorted.
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
    """Exponential race: returns i with probability masses[i] / sum(masses)."""
    with np.errstate(divide="ignore"):
        return int((times / masses).argmin())


def _logprobs(raw: _Floats32, token: int, k: int) -> TokenLogprobs:
    """log-softmax of the sampled token and of the k best; equal logits in order of token ids.

    Raises ValueError if the largest logit is not finite, as where it is one that may not be chosen.
    """
    peak = float(raw.max())
    if not math.isfinite(peak):
        raise ValueError(no_token_error(peak))
    norm = peak + math.log(np.exp(raw - np.float32(peak)).sum(dtype=np.float64))
    top: tuple[tuple[int, float], ...] = ()
    if k:
        best = np.arange(len(raw))
        if k < len(raw):
            best = np.flatnonzero(raw >= _kth_largest(raw, k))
        best = best[np.argsort(-raw[best], kind="stable")[:k]]
        top = tuple((int(i), float(raw[i]) - norm) for i in best)
    return TokenLogprobs(token, float(raw[token]) - norm, top)


# ---- Sampling the tokens of a step, on the host or on the device of the logits.


SampleRequest = tuple[str, SampleSpec, int]
"""(request id, how to sample, index of the token in its output)."""

Draw = Callable[[Tensor, Sequence[SampleSpec], Sequence[int]], Tensor]
"""The type of device_sampler.draw."""

Best = Callable[[Tensor, Tensor], None]
"""Finds the best tokens of fp32 logits [rows, vocab]. Writes int32 [2, rows], contiguous: the
tokens, the first of equal ones, and the bits of their logits, which are NaN for rows with any NaN.
The host does not wait for the device."""


def best_by_torch(logits: Tensor, out: Tensor) -> None:
    """See Best."""
    peaks, best = logits.max(dim=1)  # the first of equal logits; the peak of a row with NaN is NaN
    out[0], out[1] = best, peaks.view(torch.int32)


class StepSampler(Protocol):
    """Samples one token per row."""

    def __call__(
        self, logits: Tensor, requests: Sequence[SampleRequest]
    ) -> tuple[SampledToken, ...]:
        """logits: fp32 [rows, vocab], not changed. Returns the tokens in the order of rows.

        A row with logits that are not finite gets a token with `error`; other rows are unaffected.
        """
        ...


class HostStepSampler:
    """Samples on the CPU.

    A row with a grammar gets the token that it would get without one if that is allowed, so that
    where the grammar does not bind, the output is the same; else a new one, drawn among the allowed
    tokens with other noise. So a token is drawn with its probability among the allowed ones
    (p + (1 - a) * p / a = p / a, if these have the probability a together).
    """

    def __init__(self, row_sampler: RowSampler) -> None:
        self._row_sampler = row_sampler

    def __call__(
        self, logits: Tensor, requests: Sequence[SampleRequest]
    ) -> tuple[SampledToken, ...]:
        """See StepSampler."""
        assert len(logits) == len(requests)
        draws = [
            RowDraw(name, row, spec, index) for row, (name, spec, index) in enumerate(requests)
        ]
        sampled = self._row_sampler.sample(logits, draws)
        refused = [draw for draw in draws if self._is_refused(draw, sampled)]
        if refused:
            for draw, token in zip(refused, self._row_sampler.sample(logits, refused), strict=True):
                sampled[draw.row] = token
        return tuple(sampled)

    def _is_refused(self, draw: RowDraw, sampled: list[SampledToken]) -> bool:
        """Whether the grammar refuses a token; then the draw gets its mask. If the grammar cannot
        say, the token gets the error."""
        constraint, token = draw.spec.constraint, sampled[draw.row]
        if constraint is None or token.error is not None:
            return False
        try:
            if not constraint.allows(token.token_id):
                draw.mask = constraint.mask()
        except ValueError as error:
            sampled[draw.row] = SampledToken(draw.request_id, -1, error=str(error), of_grammar=True)
        return draw.mask is not None


class NoStepSampler:
    """The step sampler of ranks other than 0, which have no logits."""

    def __call__(
        self, logits: Tensor, requests: Sequence[SampleRequest]
    ) -> tuple[SampledToken, ...]:
        """Returns no tokens."""
        return ()


_HOST, _GREEDY, _DRAWN = "host", "greedy", "drawn"
"""Where a row is sampled: by the host; by the device, its best token; by the device, by chance."""


class DeviceStepSampler:
    """Samples greedy rows, and rows with temperature, top_k, top_p and min_p, on the device.

    The token ids of these rows come to the host in one copy. The host samples rows with biases,
    penalties, forbidden tokens, grammars or log-probabilities; their logits come in one copy too.
    """

    def __init__(
        self, row_sampler: RowSampler, draw: Draw | None = None, best: Best = best_by_torch
    ) -> None:
        """draw: None if the host has to sample all rows that are not greedy."""
        self._host_sampler = HostStepSampler(row_sampler)
        self._draw = draw
        self._best = best
        self._params: list[SamplingParams] = []  # of the rows of the last step
        self._places: list[str] = []  # of these

    def __call__(
        self, logits: Tensor, requests: Sequence[SampleRequest]
    ) -> tuple[SampledToken, ...]:
        """See StepSampler."""
        return self.begin(logits, requests).finish()

    def begin(
        self,
        logits: Tensor,
        requests: Sequence[SampleRequest],
        best: Tensor | None = None,
    ) -> PendingSamples:
        """Launch the sampling on the device and the copies to the host, without waiting.

        best: int32 [2, at least the rows], if the step has found the best tokens already. Drawn
            tokens replace them there.
        """
        host_rows, drawn = self._divide([spec for _, spec, _ in requests])
        tokens = result = None
        if len(host_rows) < len(requests):
            if best is None:
                best = logits.new_empty(2, len(logits), dtype=torch.int32)
                self._best(logits, best)
            tokens = best[0, : len(requests)]
            self._draw_some(tokens, logits, requests, drawn)
            result = copy_to_host(best)[:, : len(requests)]
        host_logits = None
        if host_rows:
            every = len(host_rows) == len(requests)
            host_logits = copy_to_host(
                logits if every else logits.index_select(0, _rows(host_rows, logits))
            )
        done = None
        if logits.is_cuda:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        return PendingSamples(
            requests, host_rows, tokens, result, host_logits, done, self._host_sampler
        )

    def _draw_some(
        self,
        tokens: Tensor,
        logits: Tensor,
        requests: Sequence[SampleRequest],
        drawn: Sequence[int],
    ) -> None:
        """Replace the tokens of the rows that the device draws by chance."""
        if not drawn or self._draw is None:
            return
        specs, indexes = [requests[row][1] for row in drawn], [requests[row][2] for row in drawn]
        if len(drawn) == len(requests):
            tokens.copy_(self._draw(logits, specs, indexes))
        else:
            rows = _rows(drawn, logits)
            tokens.index_copy_(0, rows, self._draw(logits.index_select(0, rows), specs, indexes))

    def _divide(self, specs: Sequence[SampleSpec]) -> tuple[list[int], list[int]]:
        """(rows that the host samples, rows that the device draws by chance); the device samples
        all other rows greedily."""
        params = [spec.params for spec in specs]
        known = self._params
        if len(params) != len(known) or not all(map(operator.is_, params, known)):
            self._params = params  # rarely: most rows go on in the next step
            self._places = [self._place(each) for each in params]
        places = self._places
        limited = [
            row
            for row, spec in enumerate(specs)
            if spec.constraint is not None or len(spec.forbidden)
        ]
        if limited:
            places = places.copy()
            for row in limited:
                places[row] = _HOST
        return _indexes(places, _HOST), _indexes(places, _DRAWN)

    def _place(self, params: SamplingParams) -> str:
        """Where rows with these parameters are sampled, if their spec does not forbid tokens."""
        if params.logprobs is not None or params.logit_bias or params.needs_history:
            return _HOST
        if params.greedy:
            return _GREEDY
        return _HOST if self._draw is None else _DRAWN


def _indexes(places: list[str], place: str) -> list[int]:
    return [row for row, each in enumerate(places) if each is place] if place in places else []


@dataclass(frozen=True, slots=True)
class PendingSamples:
    """The tokens of a step whose sampling was launched on the device.

    host_rows: the rows that the host samples.
    tokens: int32 [rows] on the device, valid for all other rows.
    result: int32 [2, rows], tokens and bits of the peaks, being copied to the host.
    host_logits: fp32 [len(host_rows), vocab], being copied to the host.
    done: recorded behind both copies; None on the CPU.
    """

    requests: Sequence[SampleRequest]
    host_rows: Sequence[int]
    tokens: Tensor | None
    result: Tensor | None
    host_logits: Tensor | None
    done: CopyEvent | None
    host_sampler: HostStepSampler

    def wait(self) -> None:
        """Wait for the device."""
        if self.done is not None:
            self.done.synchronize()

    def finish(self) -> tuple[SampledToken, ...]:
        """Wait for the device, then sample the rows of the host."""
        self.wait()
        sampled: list[SampledToken] = []
        if self.result is not None:
            ids, peak_bits = self.result
            rows = zip(self.requests, ids.tolist(), strict=True)
            sampled = [SampledToken(name, token) for (name, _, _), token in rows]
            peaks = peak_bits.view(torch.float32).numpy()
            for row in np.flatnonzero(~np.isfinite(peaks)).tolist():
                error = no_token_error(float(peaks[row]))
                sampled[row] = SampledToken(self.requests[row][0], -1, error=error)
        if self.host_logits is None:
            return tuple(sampled)
        on_host = self.host_sampler(
            self.host_logits, [self.requests[row] for row in self.host_rows]
        )
        if not sampled:
            return on_host
        for row, token in zip(self.host_rows, on_host, strict=True):
            sampled[row] = token
        return tuple(sampled)


def _rows(rows: Sequence[int], logits: Tensor) -> Tensor:
    return to_device(torch.tensor(rows), logits.device)
