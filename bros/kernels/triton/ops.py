"""The Triton backend, for CUDA. On a CPU, Triton's interpreter runs the kernels for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from bros.kernels.interface import AttentionBatch, GraphBuffers, GraphLimits, HeadLayout
from bros.kernels.triton import elementwise_kernels as device
from bros.kernels.triton.attention import TritonAttention
from bros.kernels.triton.buffers import GraphWork, TritonBatch
from bros.kernels.triton.products import RowProducts
from bros.kernels.triton.settings import TritonSettings, power_of_two, settings_for
from bros.kernels.xformers_attention import XformersAttention

_COLUMNS = 1024  # of an activation, per program
_ELEMENTS_PER_WARP = 512
_HEAD_ELEMENTS = 1024  # that a program rotates


class TritonKernels:
    """Implements `Kernels` for one device.

    Asserts check shapes. Slots, positions and segments are not checked: the host does not read
    device memory.
    """

    def __init__(
        self,
        device: torch.device,
        settings: TritonSettings | None = None,
        chunk_attention: XformersAttention | None = None,
    ) -> None:
        """device: a CPU only with TRITON_INTERPRET=1.
        chunk_attention: computes the attention within long chunks, None leaves it to Triton.
        """
        settings = settings or settings_for(device)
        self._attention = TritonAttention(settings, device, chunk_attention)
        self._launching = settings.launching
        self._row_products = RowProducts(settings) if settings.products else None
        self._name = "triton" if chunk_attention is None else "triton-xformers"

    @property
    def name(self) -> str:
        return self._name

    @property
    def products(self) -> None:
        """None."""
        return None

    @property
    def row_products(self) -> RowProducts | None:
        """For the shapes that were tuned on this device; None if there are none."""
        return self._row_products

    def graph_buffers(
        self, limits: GraphLimits, layout: HeadLayout, device: torch.device
    ) -> GraphBuffers | None:
        """Buffers for the work list of any step within the limits."""
        return self._attention.graph_work(limits, layout)

    def prepare(
        self,
        batch: AttentionBatch,
        layout: HeadLayout,
        device: torch.device,
        into: GraphBuffers | None = None,
        slot_positions: Tensor | None = None,
    ) -> AttentionBatch:
        """The batch with its work list on the device; the host does not wait for the copy."""
        assert into is None or isinstance(into, GraphWork)
        return self._attention.prepare(batch, layout, into)

    def attention(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        """See Kernels."""
        assert isinstance(batch, TritonBatch), "the batch has not been through prepare"
        return self._attention.run(qkv, layout, k_cache, v_cache, batch, scale)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        return self._norm(x, x, weight, eps, add=False)

    def add_rms_norm_(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        assert residual.shape == x.shape and residual.is_contiguous()
        return self._norm(residual, x, weight, eps, add=True)

    def rope_and_cache_(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        """See Kernels."""
        tokens, head_dim = qkv.shape[0], layout.head_dim
        rotary_dim = 0 if cos_sin is None else cos_sin.shape[1]
        assert qkv.shape[1] == layout.qkv_size and qkv.is_contiguous()
        assert rotary_dim % 2 == 0 and rotary_dim <= head_dim
        assert cos_sin is None or (cos_sin.dtype == torch.float32 and cos_sin.is_contiguous())
        assert positions.shape == slots.shape == (tokens,)
        assert k_cache.is_contiguous() and v_cache.is_contiguous()
        assert k_cache.shape == v_cache.shape
        assert k_cache.shape[1] == layout.num_kv_heads and k_cache.shape[3] == head_dim
        if not tokens:
            return
        all_heads = layout.num_heads + 2 * layout.num_kv_heads
        heads = max(1, _HEAD_ELEMENTS // power_of_two(head_dim))
        rest = head_dim - rotary_dim
        device.rope_and_cache[(tokens, -(-all_heads // heads))](
            qkv,
            positions,
            slots,
            qkv if cos_sin is None else cos_sin,
            k_cache,
            v_cache,
            qkv if q_norm is None else q_norm,
            qkv if k_norm is None else k_norm,
            eps,
            HEADS=layout.num_heads,
            KV_HEADS=layout.num_kv_heads,
            HEAD_DIM=head_dim,
            HALF=rotary_dim // 2,
            BLOCK_HALF=power_of_two(rotary_dim // 2),
            BLOCK_REST=power_of_two(rest),
            BLOCK_HEADS=heads,
            BLOCK_SIZE=k_cache.shape[2],
            NORM_Q=q_norm is not None,
            NORM_K=k_norm is not None,
            num_warps=4,
            **self._launching,
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """See Kernels."""
        tokens, double = gate_up.shape
        assert double % 2 == 0 and gate_up.is_contiguous()
        size = double // 2
        out = gate_up.new_empty(tokens, size)
        block = min(_COLUMNS, power_of_two(size))
        if tokens:
            device.silu_and_mul[(tokens, -(-size // block))](
                out, gate_up, SIZE=size, BLOCK=block, num_warps=4, **self._launching
            )
        return out

    def _norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float, add: bool) -> Tensor:
        rows, size = x.shape
        assert weight.shape == (size,) and x.is_contiguous() and weight.is_contiguous()
        out = torch.empty_like(x)
        block = power_of_two(size)
        if rows:
            device.rms_norm[(rows,)](
                out,
                residual,
                x,
                weight,
                eps,
                SIZE=size,
                BLOCK=block,
                ADD=add,
                num_warps=min(16, power_of_two(block // _ELEMENTS_PER_WARP)),
                **self._launching,
            )
        return out
