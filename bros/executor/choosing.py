"""From logits to the tokens of a step, on the host or where the logits are."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bros.core.plan import SampledToken, SampleSpec
from bros.executor.sampler import Sampler, why_no_token
from bros.kernels.staging import CopyEvent, to_device

Asked = tuple[str, SampleSpec]
"""Who wants a token, and how it is chosen."""

Draw = Callable[[Tensor, Sequence[SampleSpec]], Tensor]
"""That of device_sampler.py."""


class Chooser(Protocol):
    """Chooses one token per row. logits: fp32 [rows, vocab], not changed."""

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """In the order of rows. A row with broken logits fails alone: its token has `error`."""
        ...


class HostChooser:
    """Row by row on the CPU."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See Chooser."""
        rows = zip(asked, logits, strict=True)
        return tuple(self._choose(name, spec, row) for (name, spec), row in rows)

    def _choose(self, request_id: str, spec: SampleSpec, logits: Tensor) -> SampledToken:
        try:
            ((token_id, logprobs),) = self._sampler.sample(logits[None], [spec])
        except ValueError as error:
            return SampledToken(request_id, -1, error=str(error))
        return SampledToken(request_id, token_id, logprobs)


class NoChooser:
    """For ranks but the first, which have no logits: chooses nothing."""

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See Chooser."""
        return ()


class DeviceChooser:
    """Greedy rows and rows with temperature, top_k, top_p and min_p on the device of the logits.

    Only token ids come to the host then, in one copy. Rows with biases, penalties, forbidden
    tokens or log-probabilities are copied and chosen there, all in one copy as well.
    """

    def __init__(self, sampler: Sampler, draw: Draw | None = None) -> None:
        """draw: None if the host has to choose all tokens but greedy ones."""
        self._on_host = HostChooser(sampler)
        self._draw = draw

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See Chooser."""
        return self.begin(logits, asked).finish()

    def begin(self, logits: Tensor, asked: Sequence[Asked]) -> Choice:
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
        return Choice(asked, others, tokens, found, rows, done, self._on_host)

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
class Choice:
    """The tokens of a step that are chosen or about to be.

    others: rows that the host chooses; tokens: int32 [rows] on the device, right for all but
    them; found, rows: the copies on their way to the host, complete once `done` has happened.
    """

    asked: Sequence[Asked]
    others: Sequence[int]
    tokens: Tensor | None
    found: Tensor | None
    rows: Tensor | None
    done: CopyEvent | None
    on_host: HostChooser

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
