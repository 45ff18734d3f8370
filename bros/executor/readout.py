"""Reads hidden states of prompts: log-probabilities of prompt tokens, and sums for embeddings.

    hidden states of a step   [ sampled | scored: slice | slice | ... | pooled ]
                                  |             |                        |
                                logits   logits [rows, vocab]          one vector per chunk
                                         -> a few numbers per row

The logits of a whole prompt would take gigabytes (2,000 tokens x 150,000 of a vocabulary), so only
those of one slice exist at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bros.core.plan import Readout, ReadPositions
from bros.core.request import PooledTokens, PromptLogprobs
from bros.executor.models.layers import Linear
from bros.kernels.staging import copy_to_host, to_device

_SLICE_BYTES = 2**24
_MIN_ROWS = 32
"""With fewer rows, reading the weights of the head takes longer than multiplying."""

_CACHED_BYTES = 2**19
"""Logits that are reduced at once on a CPU: each of the passes over them then finds them in the
cache of a core."""


class ReadRequest(NamedTuple):
    """request_id: whose chunk it is.
    start: position of the chunk's first token.
    """

    request_id: str
    start: int
    readout: Readout


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Log-probabilities of a step, being copied to the host.

    logprobs: fp32 [rows, 1 + top], of the target and of the most likely tokens.
    tokens: int32 [rows, 1 + top], of the same tokens.
    ranks: int32 [rows], of the targets.
    """

    requests: Sequence[ReadRequest]
    logprobs: Tensor
    tokens: Tensor
    ranks: Tensor

    def finish(self) -> tuple[ReadPositions, ...]:
        """The results; the copies must be complete."""
        results, row = [], 0
        for request in self.requests:
            rows = slice(row, row + len(request.readout.targets))
            row = rows.stop
            results.append(self._result(request, rows))
        return tuple(results)

    def _result(self, request: ReadRequest, rows: slice) -> ReadPositions:
        name, start, readout = request
        end, width = start + readout.end, readout.top + 1
        logprobs = self.logprobs[rows, :width].contiguous()
        if not math.isfinite(logprobs.sum().item()):
            return ReadPositions(name, end, error="the logits of the prompt are not finite")
        pieces = logprobs, self.tokens[rows, :width].contiguous(), self.ranks[rows]
        values, tokens, ranks = (piece.numpy().tobytes() for piece in pieces)
        first = start + readout.first + 1
        return ReadPositions(name, end, PromptLogprobs(first, readout.top, tokens, values, ranks))


def score_hidden(
    hidden: Tensor,
    lm_head: Linear,
    requests: Sequence[ReadRequest],
    vocab_size: int,
    should_abort: Callable[[], bool] | None = None,
) -> PendingScores | None:
    """Start computing the log-probabilities that a step's readouts ask for.

    hidden: [rows, hidden].
    requests: their rows follow each other; empty on ranks other than 0, which only take part in
        computing logits.
    should_abort: called before each slice; if it returns True, the result is None.
    """
    size = max(_MIN_ROWS, _SLICE_BYTES // (4 * vocab_size))
    top = max((request.readout.top for request in requests), default=0)
    wanted = [token for request in requests for token in request.readout.targets]
    targets = to_device(torch.tensor(wanted, dtype=torch.int64), hidden.device)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for first in range(0, len(hidden), size):
        if should_abort is not None and should_abort():
            return None
        logits = lm_head(hidden[first : first + size])
        if requests:
            parts += _reduced(logits, targets[first : first + size], min(top, vocab_size))
    if not parts:
        nothing = torch.empty(0)
        return PendingScores((), nothing, nothing, nothing)
    logprobs, tokens, ranks = (copy_to_host(torch.cat(part)) for part in zip(*parts, strict=True))
    return PendingScores(requests, logprobs, tokens, ranks)


def _reduced(logits: Tensor, targets: Tensor, top: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(logprobs, tokens, ranks) as in PendingScores of rows of logits, in one or more parts."""
    rows = len(logits)
    if not logits.is_cuda:
        rows = max(1, _CACHED_BYTES // (4 * logits.shape[1]))
    return [
        _log_softmax(logits[row : row + rows], targets[row : row + rows, None], top)
        for row in range(0, len(logits), rows)
    ]


def _log_softmax(logits: Tensor, targets: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    norm = logits.logsumexp(1, keepdim=True)
    chosen = logits.gather(1, targets)
    ranks = (logits > chosen).sum(1, dtype=torch.int32) + 1
    best, tokens = logits.topk(top, dim=1)
    logprobs = torch.cat((chosen, best), 1) - norm
    return logprobs, torch.cat((targets, tokens), 1).int(), ranks


@dataclass(frozen=True, slots=True)
class PendingPools:
    """Sums of hidden states, or scores, being copied to the host.

    values: fp32 [requests, numbers].
    """

    requests: Sequence[ReadRequest]
    values: Tensor

    def finish(self) -> tuple[ReadPositions, ...]:
        """The results; the copy must be complete."""
        return tuple(map(self._result, self.requests, self.values))

    def _result(self, request: ReadRequest, values: Tensor) -> ReadPositions:
        name, start, readout = request
        end = start + readout.end
        if not math.isfinite(values.sum().item()):
            return ReadPositions(name, end, error="the hidden states of the text are not finite")
        count = readout.end - readout.first
        pooled = PooledTokens(end, count, values.numpy().tobytes())
        return ReadPositions(name, end, pooled=pooled)


def pool_hidden(hidden: Tensor, requests: Sequence[ReadRequest]) -> PendingPools:
    """Sum the hidden states [rows, hidden] of each readout. requests: as in `score_hidden`."""
    if not requests:
        return PendingPools((), torch.empty(0))
    counts = [request.readout.end - request.readout.first for request in requests]
    if max(counts) == 1:
        return PendingPools(requests, copy_to_host(hidden.float()))
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    sums = torch.zeros(len(counts), hidden.shape[1], device=hidden.device)
    sums.index_add_(0, to_device(owners, hidden.device), hidden.float())
    return PendingPools(requests, copy_to_host(sums))
