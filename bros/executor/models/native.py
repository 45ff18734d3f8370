"""A decoder that one native call computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bros.executor.inputs import StepInputs
from bros.executor.models.decoder import (
    BeforeLayer,
    Block,
    DecoderOutputs,
    GatedMlp,
    LayerCache,
    State,
    Stopped,
    rows_needed,
)
from bros.executor.models.layers import (
    Linear,
    Norm,
    PanelEmbedding,
    PanelLinear,
    RmsNorm,
    TokenLookup,
)
from bros.kernels.interface import DecoderEnds, DecoderLayers, LayerWeights, Products


@dataclass(frozen=True, slots=True)
class NativeLayers:
    """Implements Layers, with the same bits as Blocks.

    count: of the layers.
    has_ends: see Layers.
    """

    call: DecoderLayers
    count: int
    has_ends: bool

    def __call__(
        self,
        layers: range,
        state: State | None,
        inputs: StepInputs,
        caches: Sequence[LayerCache],
        before_layer: BeforeLayer,
    ) -> State | Stopped | DecoderOutputs:
        """See Layers."""
        residual, delta = (None, None) if state is None else state
        last = layers.stop == self.count
        layer, first, second = self.call(
            layers,
            inputs.token_ids if state is None else None,
            residual,
            delta,
            inputs.positions,
            inputs.slots,
            caches,
            inputs.attention,
            rows_needed(inputs) if last else None,
            len(inputs.sample_rows) if last and self.has_ends else None,
            before_layer,
        )
        if layer < layers.stop:
            return Stopped(layer, (first, second))
        if last and self.has_ends:
            assert second is not None
            return DecoderOutputs(first, second)
        return first, second


def native_layers(
    blocks: Sequence[Block],
    products: Products,
    eps: float,
    ends: tuple[TokenLookup, Norm | None, Linear] | None = None,
) -> NativeLayers | None:
    """These blocks as one call; None if they have another form, or if there is no such call.

    blocks: with the same shapes.
    eps: of all norms.
    ends: the embedding, the final norm and the lm_head, which become part of the call if they have
        the form of DecoderEnds.
    """
    weights = [found for block in blocks if (found := _weights(block)) is not None]
    if not weights or len(weights) < len(blocks):
        return None
    attention = blocks[0].attention
    packed = None if ends is None else _ends(*ends)
    tables = (block.attention.cos_sin for block in blocks)
    cos_sin = next((table for table in tables if table is not None), None)
    call = products.layers(weights, attention.layout, cos_sin, eps, packed)
    return None if call is None else NativeLayers(call, len(blocks), packed is not None)


def _ends(tokens: TokenLookup, final_norm: Norm | None, lm_head: Linear) -> DecoderEnds | None:
    """None if they have another form."""
    if not (
        isinstance(tokens, PanelEmbedding)
        and isinstance(final_norm, RmsNorm)
        and isinstance(lm_head, PanelLinear)
    ):
        return None
    return DecoderEnds(tokens.weight, final_norm.weight, lm_head.product)


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
        rotates=attention.cos_sin is not None,
        attention_out=out.product,
        mlp_norm=block.mlp_norm.weight,
        gate_up=mlp.gate_up.product,
        down=mlp.down.product,
    )
