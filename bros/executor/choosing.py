"""From logits to the tokens of a step, on the host or where the logits are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from bros.core.plan import SampledToken, SampleSpec
from bros.executor.device_sampler import draw
from bros.executor.sampler import Sampler, why_no_token

Asked = tuple[str, SampleSpec]
"""Who wants a token, and how it is chosen."""


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


class DeviceChooser:
    """Greedy rows and rows with temperature, top_k, top_p and min_p on the device of the logits.

    Only token ids come to the host then, in one copy. Rows with biases, penalties, forbidden
    tokens or log-probabilities are copied and chosen there, all in one copy as well.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._on_host = HostChooser(sampler)

    def __call__(self, logits: Tensor, asked: Sequence[Asked]) -> tuple[SampledToken, ...]:
        """See Chooser."""
        if not asked:
            return ()
        others = [row for row, (_, spec) in enumerate(asked) if not _is_plain(spec)]
        drawn = [
            row for row, (_, spec) in enumerate(asked) if not spec.params.greedy and _is_plain(spec)
        ]
        tokens = list(self._plain(logits, asked, drawn)) if len(others) < len(asked) else []
        if not others:
            return tuple(tokens)
        rows = logits if not tokens else logits.index_select(0, _rows(others, logits))
        chosen = self._on_host(_to_host(rows), [asked[row] for row in others])
        if not tokens:
            return chosen
        for row, token in zip(others, chosen, strict=True):
            tokens[row] = token
        return tuple(tokens)

    def _plain(
        self, logits: Tensor, asked: Sequence[Asked], drawn: Sequence[int]
    ) -> Sequence[SampledToken]:
        """Of all rows, but only those with a plain spec get the token they ask for."""
        peaks, best = logits.max(dim=1)  # of equals the first; NaN anywhere in a row is its peak
        tokens = best.int()
        if drawn:
            rows = _rows(drawn, logits)
            specs = [asked[row][1] for row in drawn]
            scores = logits if len(drawn) == len(asked) else logits.index_select(0, rows)
            tokens.index_copy_(0, rows, draw(scores, peaks.index_select(0, rows), specs).int())
        ids, peak_bits = _to_host(torch.stack((tokens, peaks.view(torch.int32))))
        values = peak_bits.view(torch.float32)
        found = zip(asked, ids.tolist(), values.tolist(), strict=True)
        return [_sampled(name, token, peak) for (name, _), token, peak in found]


def _sampled(request_id: str, token: int, peak: float) -> SampledToken:
    if not math.isfinite(peak):
        return SampledToken(request_id, -1, error=why_no_token(peak))
    return SampledToken(request_id, token)


def _is_plain(spec: SampleSpec) -> bool:
    """Chosen from the logits as they are, with nothing else to be told."""
    params = spec.params
    return not (
        params.logprobs is not None
        or params.logit_bias
        or params.needs_history
        or len(spec.forbidden)
    )


def _rows(rows: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(rows, device=logits.device)


def _to_host(values: Tensor) -> Tensor:
    if not values.is_cuda:
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return host
