"""The causal part of prompt chunks by xformers, in place of the Triton kernels. Optional.

Only rows of many tokens are worth it; their cached context stays with the Triton kernels, and the
merge of parts takes the result from here as one more part.

    step     [ row 0: 1 | row 1: 300 | row 2: 1 | row 3: 90 ]
    here                [ first .............. end )           rows 1 and 3 are taken
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bros.core.errors import ConfigError
from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.parts import lengths_of
from bros.kernels.triton.plan import OwnDone

LEAST_TOKENS = 64
"""Rows with fewer are left to Triton, and so are steps without a longer one."""

_FLAG = "--self-attention xformers"
_DTYPES = (torch.bfloat16, torch.float16)
"""What its flash kernels take. In fp32 it has only one with a stream per KV head, which is slow."""


@dataclass(frozen=True, slots=True)
class SelfWork:
    """What one step has for xformers: tokens [done.first, end), in the rows that bias tells."""

    done: OwnDone
    end: int
    bias: Any


class XformersSelf:
    """Implemented for xformers 0.0.28 and later, where log-sum-exps are not padded per row."""

    def __init__(self, fmha: Any, device: torch.device) -> None:
        """fmha: the module xformers.ops.fmha."""
        self._fmha = fmha
        self._device = device

    def plan(self, batch: AttentionBatch) -> SelfWork | None:
        """Once per step; None if no row is long enough. The host does not wait for the device."""
        start = batch.query_start.numpy()
        lengths = lengths_of(start)
        rows = lengths >= LEAST_TOKENS
        taken = np.flatnonzero(rows)
        if not len(taken):
            return None
        # Short rows between long ones are computed in vain: cheaper than moving the long ones.
        between = lengths[taken[0] : taken[-1] + 1]
        bias = self._fmha.attn_bias.BlockDiagonalCausalMask.from_seqlens(
            between[between > 0].tolist(), device=self._device
        )
        return SelfWork(OwnDone(rows, int(start[taken[0]])), int(start[taken[-1] + 1]), bias)

    def run(
        self, qkv: Tensor, layout: HeadLayout, work: SelfWork, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Of tokens [work.done.first, work.end): [tokens, layout.q_size] in the type of qkv, in
        memory of its own, and fp32 [num_heads, tokens or more] natural log-sum-exps."""
        tokens = qkv[work.done.first : work.end]
        q, kv = tokens[:, : layout.q_size], tokens[:, layout.q_size :]
        k, v = kv[:, : layout.kv_size], kv[:, layout.kv_size :]
        # Batch of 1, tokens, KV heads, query heads of each, head_dim. K and V are repeated without
        # being copied, which the flash kernels see by the stride of 0.
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


def open_xformers(device: torch.device, layout: HeadLayout, dtype: torch.dtype) -> XformersSelf:
    """Import xformers and try it once with such heads and activations.

    Raises ConfigError if it is not there, or does not work with this device, torch or model.
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"{_FLAG}: for bf16 and fp16 only; choose one of them by --weights")
    try:
        # Late, because it is optional and takes seconds to import.
        from xformers.ops import fmha
    except ModuleNotFoundError as error:
        raise ConfigError(f"{_FLAG}: install bros[xformers] ({error})") from error
    except Exception as error:  # it looks into torch as it is imported, and may stumble anywhere
        raise ConfigError(f"{_FLAG}: not usable with this torch: {_one_line(error)}") from error
    found = XformersSelf(fmha, device)
    try:
        works = _works(found, layout, dtype, device)
    except Exception as error:  # no kernel for this device or these heads, or another interface
        raise ConfigError(f"{_FLAG}: not usable here: {_one_line(error)}") from error
    if not works:
        raise ConfigError(f"{_FLAG}: this version returns something else than is expected of it")
    return found


def _works(own: XformersSelf, layout: HeadLayout, dtype: torch.dtype, device: torch.device) -> bool:
    """With K of 0 and V of 1, the i-th query has the log-sum-exp log(i + 1) and the output 1."""
    lengths = (LEAST_TOKENS, LEAST_TOKENS + 1)
    start = torch.tensor([0, LEAST_TOKENS, sum(lengths)], dtype=torch.int32)
    nothing = torch.zeros(3, dtype=torch.int32)
    work = own.plan(AttentionBatch(start, nothing, nothing[:0].reshape(0, 3)))
    assert work is not None
    qkv = torch.zeros(sum(lengths), layout.qkv_size, dtype=dtype, device=device)
    qkv[:, -layout.kv_size :] = 1.0
    out, lse = own.run(qkv, layout, work, 1.0)
    counts = torch.cat([torch.arange(1, n + 1, device=device) for n in lengths])
    return torch.allclose(out, torch.ones_like(out), atol=0.01) and torch.allclose(
        lse[:, : len(counts)], counts.log().expand(layout.num_heads, -1), atol=0.01
    )


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: " + "; ".join(
        line.strip() for line in str(error).splitlines() if line.strip()
    )
