"""xformers.ops.fmha in plain torch: shapes, layouts and refusals of the part of it that is used.

After version 0.0.35, whose functions are named where they are stood in for; only what is refused
because of the device (not being a GPU) is allowed here.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class SeqLenInfo:
    """attn_bias._SeqLenInfo"""

    seqstart: Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]


@dataclass
class BlockDiagonalCausalMask:
    """attn_bias.BlockDiagonalCausalMask"""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    @classmethod
    def from_seqlens(
        cls, q_seqlen: list[int], kv_seqlen: list[int] | None = None, *, device: Any = None
    ) -> BlockDiagonalCausalMask:
        # _SeqLenInfo._get_seqstart
        assert kv_seqlen is None and not isinstance(q_seqlen, Tensor)
        starts = [0]
        for length in q_seqlen:
            starts.append(starts[-1] + length)
        seqstart = torch.tensor(starts, dtype=torch.int32).to(device)
        info = SeqLenInfo(seqstart, max(q_seqlen), min(q_seqlen), starts)
        return cls(info, info)


class FakeFmha:
    """The module xformers.ops.fmha. Counts the calls of its function.

    dtypes: flash.FwOp.SUPPORTED_DTYPES; fp32, which flash has not, is for comparing more closely.
    padding: more log-sum-exps per head than tokens, which _detect_lse_packed_or_raise allows.
    """

    def __init__(self, dtypes: tuple[torch.dtype, ...] = HALVES, padding: int = 0) -> None:
        self.attn_bias = SimpleNamespace(BlockDiagonalCausalMask=BlockDiagonalCausalMask)
        self.calls: list[list[int]] = []
        """Lengths of the rows of each."""
        self._dtypes = dtypes
        self._padding = padding

    def memory_efficient_attention_partial(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: BlockDiagonalCausalMask,
        p: float = 0.0,
        scale: float | None = None,
        *,
        op: Any = None,
        output_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert p == 0.0 and op is None and output_dtype is None
        _validate(query, key, value, attn_bias)
        reasons = list(_refusals(query, key, value, self._dtypes))
        if reasons:  # dispatch._run_priority_list
            raise NotImplementedError("No operator found for `x`\n    " + "\n    ".join(reasons))
        self.calls.append([b - a for a, b in pairwise(attn_bias.q_seqinfo.seqstart_py)])
        _, tokens, groups, heads, head_dim = query.shape
        # flash._convert_input_format
        q = query.reshape(tokens, -1, head_dim)
        k, v = (_fold(x).reshape(tokens, -1, head_dim) for x in (key, value))
        scale = head_dim**-0.5 if scale is None else scale
        out, lse = _flash(q, k, v, attn_bias.q_seqinfo.seqstart.tolist(), scale)
        lse = torch.nn.functional.pad(lse, (0, self._padding), value=float("nan"))
        # FwOp.apply; _post_process_lse: (1, G, H, total_q)
        return out.reshape(query.shape), lse.unflatten(0, (groups, heads)).unsqueeze(0)


def _validate(q: Tensor, k: Tensor, v: Tensor, bias: BlockDiagonalCausalMask) -> None:
    """common.Inputs.validate_inputs"""
    assert q.ndim == k.ndim == v.ndim == 5
    assert q.device == k.device == v.device == bias.q_seqinfo.seqstart.device
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[0] == k.shape[0] == v.shape[0] == 1
    assert q.shape[2:] == k.shape[2:] == v.shape[2:] and k.shape == v.shape


def _refusals(q: Tensor, k: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...]) -> Any:
    """flash.FwOp.not_supported_reasons"""
    if q.dtype not in dtypes:
        yield f"dtype={q.dtype} (supported: {dtypes})"
    if q.shape[-1] > 256:
        yield "max(query.shape[-1], value.shape[-1]) > 256"
    # check_lastdim_alignment_stride1
    if q.shape[-1] % 8 or q.stride(-2) % 8:
        yield "query.shape[-1] % 8 != 0"
    if q.stride(-1) > 1:
        yield "query.stride(-1) > 1"
    for x in (q, k, v):  # _check_strides_for_bmghk
        spread = x.shape[2] > 1 and x.shape[3] > 1 and x.stride(3) != 0
        if spread and x.stride(2) != x.stride(3) * x.shape[3]:
            yield "GQA is only supported when the G/H dimensions are contiguous"


def _fold(x: Tensor) -> Tensor:
    """fold of flash._convert_input_format: heads that are one in memory are taken once."""
    return x[:, :, :, 0] if x.stride(3) == 0 else x.reshape(*x.shape[:2], -1, x.shape[4])


def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """aten::_flash_attention_forward with cumulative lengths, causal: the output like q, and
    fp32 [heads, tokens] log-sum-exps to base e. Packed, unlike those of cutlass."""
    assert starts[0] == 0 and starts[-1] == len(q) == len(k) and q.shape[1] % k.shape[1] == 0
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q), dtype=torch.float32)
    for start, end in pairwise(starts):
        rows = slice(start, end)
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), k[rows]) * scale
        scores.masked_fill_(torch.ones(end - start, end - start).triu(1).bool(), float("-inf"))
        lse[:, rows] = scores.logsumexp(2)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(2), v[rows]).to(q.dtype)
    return out, lse


def install(monkeypatch: pytest.MonkeyPatch, fmha: Any) -> None:
    """From now on, xformers can be imported and has this fmha."""
    ops = ModuleType("xformers.ops")
    ops.fmha = fmha  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "xformers", ModuleType("xformers"))
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
