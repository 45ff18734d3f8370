"""Causal attention within prompt chunks by xformers instead of the Triton kernels. Optional.

This is only used for rows of many tokens. Triton computes their attention to the cached context and
merges it with the result of xformers.

    step     [ row 0: 1 | row 1: 300 | row 2: 1 | row 3: 90 ]
    here                [ first .............. end )           for rows 1 and 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bros.core.errors import ConfigError
from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.offsets import lengths_of
from bros.kernels.triton.plan import PrecomputedChunks

MIN_TOKENS = 64
"""Triton computes rows with fewer tokens."""

_FLAG = "--self-attention xformers"
_DTYPES = (torch.bfloat16, torch.float16)
"""The dtypes of its flash kernels. Its only fp32 kernel is slow: it uses a stream per KV head."""


@dataclass(frozen=True, slots=True)
class XformersWork:
    """The part of a step that xformers computes: tokens [done.first, end).

    bias: the lengths of the rows among these tokens.
    """

    done: PrecomputedChunks
    end: int
    bias: Any


class XformersAttention:
    """Needs xformers 0.0.28 or later, whose log-sum-exps are not padded per row."""

    def __init__(self, fmha: Any, device: torch.device) -> None:
        """fmha: the module xformers.ops.fmha."""
        self._fmha = fmha
        self._device = device

    def plan(self, batch: AttentionBatch) -> XformersWork | None:
        """Call once per step; None if no row is long enough. The host does not wait."""
        start = batch.query_start.numpy()
        lengths = lengths_of(start)
        rows = lengths >= MIN_TOKENS
        long = np.flatnonzero(rows)
        if not len(long):
            return None
        # Includes short rows between long ones: wasted work, but cheaper than moving the long ones.
        between = lengths[long[0] : long[-1] + 1]
        bias = self._fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(
            between[between > 0].tolist(), device=self._device
        )
        done = PrecomputedChunks(rows, int(start[long[0]]))
        return XformersWork(done, int(start[long[-1] + 1]), bias)

    def run(
        self, qkv: Tensor, layout: HeadLayout, work: XformersWork, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The attention of tokens [work.done.first, work.end), and its log-sum-exps to base e.

        Returns [tokens, layout.q_size] in the dtype of qkv, in new memory, and fp32
        [num_heads, tokens or more].
        """
        tokens = qkv[work.done.first : work.end]
        q, kv = tokens[:, : layout.q_size], tokens[:, layout.q_size :]
        k, v = kv[:, : layout.kv_size], kv[:, layout.kv_size :]
        # [1, tokens, KV heads, query heads of each, head_dim]. expand repeats K and V with a stride
        # of 0 instead of copying them, which the flash kernels recognize.
        heads = (layout.num_kv_heads, layout.num_heads // layout.num_kv_heads, layout.head_dim)
        once = (layout.num_kv_heads, 1, layout.head_dim)
        out, lse = self._fmha.memory_efficient_attention_partial(
            q.view(1, -1, *heads),
            k.view(1, -1, *once).expand(1, -1, *heads),
            v.view(1, -1, *once).expand(1, -1, *heads),
            attn_bias=work.bias,
            scale=scale,
        )
        own: Tensor = out.reshape(len(tokens), layout.q_size).to(qkv.dtype)
        own_lse: Tensor = lse.reshape(layout.num_heads, -1)
        assert own_lse.dtype == torch.float32 and own_lse.shape[1] >= len(tokens)
        return own, own_lse


def load_xformers(
    device: torch.device, layout: HeadLayout, dtype: torch.dtype
) -> XformersAttention:
    """Import xformers and test it with these heads and activations.

    Raises ConfigError if it is not installed, or does not support this device, torch or model.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"{_FLAG}: for bf16 and fp16 only; choose one of them by --weights")
    try:
        # Imported late: xformers is optional and takes seconds to import.
        from xformers.ops import fmha
    except ModuleNotFoundError as error:
        raise ConfigError(f"{_FLAG}: install bros[xformers] ({error})") from error
    except Exception as error:  # its import depends on torch's internals and can fail anywhere
        raise ConfigError(f"{_FLAG}: not usable with this torch: {_one_line(error)}") from error
    found = XformersAttention(fmha, device)
    try:
        works = _works(found, layout, dtype, device)
    except Exception as error:  # no kernel for this device or these heads, or a changed interface
        raise ConfigError(f"{_FLAG}: not usable here: {_one_line(error)}") from error
    if not works:
        raise ConfigError(f"{_FLAG}: this version of xformers returns wrong results")
    return found


def _works(
    attention: XformersAttention, layout: HeadLayout, dtype: torch.dtype, device: torch.device
) -> bool:
    """Tests with K = 0 and V = 1: query i must have the log-sum-exp log(i + 1) and the output 1."""
    lengths = (MIN_TOKENS, MIN_TOKENS + 1)
    start = torch.tensor([0, MIN_TOKENS, sum(lengths)], dtype=torch.int32)
    nothing = torch.zeros(3, dtype=torch.int32)
    work = attention.plan(AttentionBatch(start, nothing, nothing[:0].reshape(0, 3)))
    assert work is not None
    qkv = torch.zeros(sum(lengths), layout.qkv_size, dtype=dtype, device=device)
    qkv[:, -layout.kv_size :] = 1.0
    out, lse = attention.run(qkv, layout, work, 1.0)
    counts = torch.cat([torch.arange(1, n + 1, device=device) for n in lengths])
    return torch.allclose(out, torch.ones_like(out), atol=0.01) and torch.allclose(
        lse[:, : len(counts)], counts.log().expand(layout.num_heads, -1), atol=0.01
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: " + "; ".join(
        line.strip() for line in str(error).splitlines() if line.strip()
    )
