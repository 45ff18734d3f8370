"""Layers of a decoder that one native call computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bros.executor.inputs import StepInputs
from bros.executor.models.decoder import (
    BeforeLayer,
    Block,
    GatedMlp,
    LayerCache,
    State,
    Stopped,
    rows_needed,
)
from bros.executor.models.layers import PanelLinear, RmsNorm
from bros.kernels.interface import DecoderLayers, LayerWeights, Products


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """Implements Layers, with the same bits as Blocks."""

    call: DecoderLayers
    count: int

    def __call__(
        self,
        layers: range,
        state: State,
        inputs: StepInputs,
        caches: Sequence[LayerCache],
        before_layer: BeforeLayer,
    ) -> State | Stopped:
        """See Layers."""
        layer, residual, delta = self.call(
            layers,
            *state,
            inputs.positions,
            inputs.slots,
            caches,
            inputs.attention,
            rows_needed(inputs) if layers.stop == self.count else None,
            before_layer,
        )
        state = residual, delta
        return state if layer == layers.stop else Stopped(layer, state)


def native_layers(blocks: Sequence[Block], products: Products, eps: float) -> NativeLayers | None:
    """These blocks as one call; None if they have another form, or if there is no such call.

    blocks: with the same shapes.
    eps: of all norms.
    """
    weights = [found for block in blocks if (found := _weights(block)) is not None]
    if not weights or len(weights) < len(blocks):
        return None
    attention = blocks[0].attention
    call = products.layers(weights, attention.layout, attention.cos_sin, eps)
    return None if call is None else NativeLayers(call, len(blocks))


def _weights(block: Block) -> LayerWeights | None:
    """None if the block has another form than LayerWeights describes."""
    attention, out, mlp = block.attention, block.attention_out, block.mlp
    if not (
        block.pre_norm
        and isinstance(block.attention_norm, RmsNorm)
        and isinstance(attention.qkv, PanelLinear)
        and isinstance(out, PanelLinear)
        and isinstance(block.mlp_norm, RmsNorm)
        and isinstance(mlp, GatedMlp)
        and isinstance(mlp.gate_up, PanelLinear)
        and isinstance(mlp.down, PanelLinear)
    ):
        return None
    return LayerWeights(
        attention_norm=block.attention_norm.weight,
        qkv=attention.qkv.product,
        q_norm=attention.q_norm,
        k_norm=attention.k_norm,
        attention_out=out.product,
        mlp_norm=block.mlp_norm.weight,
        gate_up=mlp.gate_up.product,
        down=mlp.down.product,
    )
