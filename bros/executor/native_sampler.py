"""Samples rows of logits with the compiled kernels: one call for all rows of a step.

Rows are spread over the kernels' threads, without the interpreter's lock. A token is that of
NumpySampler, except where two tokens, or a bound and a token, tie to within rounding (1e-6): the
exponential and the order of sums differ.

Microseconds per row, of 49,152 logits of SmolLM2 in the middle of answers, at 32 rows on one thread
of a Zen 3 (AVX2; benchmarks/sampler_speed.py measures whole steps):

                                        NumPy    native
    greedy                                  8         7
    temperature 0.7                       217        11
    ... with top_p 0.95                   339        58
    ... with top_k 50                     289        17
    ... with min_p 0.05                   230         8
    ... with all three                    376        16
    ... with penalties                    286        31
    ... with 5 log-probabilities          435        38
    top_p 0.95, all tokens about alike    740       276
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bros.core.plan import SampledToken
from bros.core.request import TokenLogprobs
from bros.executor.sampler import NothingAllowedError, RowDraw, no_token_error
from bros.kernels.cpu_ops import DRAW, NOTHING_ALLOWED, CpuKernels, DrawBuffers

_UINT64 = 2**64 - 1


class NativeSampler:
    """Implements RowSampler."""

    def __init__(self, kernels: CpuKernels) -> None:
        self._kernels = kernels

    def sample(self, logits: Tensor, draws: Sequence[RowDraw]) -> list[SampledToken]:
        """See RowSampler."""
        buffers = _Packer()
        for draw in draws:
            buffers.add(draw)
        most = max((draw.spec.params.logprobs or 0 for draw in draws), default=0)
        sampled, tops = self._kernels.sample(logits.cpu().contiguous(), buffers.packed(), most)
        vocab = logits.shape[1]
        found = []
        for draw, (token_id, peak, logprob), top in zip(draws, sampled, tops, strict=True):
            name, k = draw.request_id, draw.spec.params.logprobs
            if token_id < 0:
                nothing = token_id == NOTHING_ALLOWED
                error = str(NothingAllowedError()) if nothing else no_token_error(peak)
                found.append(SampledToken(name, -1, error=error, of_grammar=nothing))
            elif k is None:
                found.append(SampledToken(name, token_id))
            else:
                best = tuple(top[: min(k, vocab)])
                found.append(SampledToken(name, token_id, TokenLogprobs(token_id, logprob, best)))
        return found


class _Packer:
    """Collects draws, and what a few of them need: biases, forbidden tokens, histories, masks."""

    def __init__(self) -> None:
        self._draws: list[bytes] = []
        self._edit_tokens: list[int] = []
        self._edit_values: list[float] = []
        self._histories: list[NDArray[np.int32]] = []
        self._history_end = 0
        self._masks: list[bytes | bytearray | memoryview] = []
        self._masks_end = 0

    def add(self, draw: RowDraw) -> None:
        spec = draw.spec
        params = spec.params
        edit_begin, history_begin = len(self._edit_tokens), self._history_end
        mask_begin = mask_end = -1
        if params.logit_bias:
            self._edit_tokens.extend(params.logit_bias.keys())
            self._edit_values.extend(params.logit_bias.values())
        if len(spec.forbidden):
            self._edit_tokens.extend(spec.forbidden)
            self._edit_values.extend([-math.inf] * len(spec.forbidden))
        if params.needs_history:
            self._histories.append(np.asarray(spec.token_ids, np.int32))
            self._history_end += len(spec.token_ids)
        if draw.mask is not None:
            mask_begin = self._masks_end
            mask_end = self._masks_end = mask_begin + len(draw.mask)
            self._masks.append(draw.mask)
        self._draws.append(
            DRAW.pack(
                draw.seed & _UINT64,
                draw.index,
                draw.row,
                edit_begin,
                len(self._edit_tokens),
                history_begin,
                self._history_end,
                mask_begin,
                mask_end,
                params.top_p,
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
                params.temperature,
                params.min_p,
                params.top_k,
                -1 if params.logprobs is None else params.logprobs,
                spec.prompt_len,
            )
        )

    def packed(self) -> DrawBuffers:
        return DrawBuffers(
            b"".join(self._draws),
            np.array(self._edit_tokens, np.int32),
            np.array(self._edit_values, np.float32),
            np.concatenate(self._histories) if self._histories else np.empty(0, np.int32),
            b"".join(self._masks),
        )
