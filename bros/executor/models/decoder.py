"""One configurable decoder for Llama, SmolLM, Mistral, Qwen2, Qwen3, Phi-3, Granite and OPT.

    x = embed(tokens) [+ learned positions]
    each block      residual, delta -> norm, attention, norm, MLP -> residual, delta
    head            final norm, and lm_head for sampled rows

`residual + delta` is the hidden state. The two are kept apart so that one kernel computes their sum
and the norm after it. The last block drops rows that are neither sampled nor read once their K and
V are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.executor.inputs import StepInputs
from bros.executor.models.layers import Linear, NativeLinear, Norm, TokenLookup
from bros.kernels.interface import HeadLayout, Kernels

LayerCache = tuple[Tensor, Tensor]
"""K and V of all blocks in one layer, with the shape that Kernels says."""

State = tuple[Tensor, Tensor | None]
"""The residual stream before a layer, and what is to be added to it first, [tokens, hidden] each:
the norm of the layer adds it in the same kernel. None: nothing is to be added."""


class Mlp(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix."""

    kernels: Kernels
    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        inner = self.gate_up.gated(x) if isinstance(self.gate_up, NativeLinear) else None
        if inner is None:
            inner = self.kernels.silu_and_mul(self.gate_up(x))
        return self.down(inner)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x)))."""

    up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention without its output projection.

    qkv: all heads of Q, then of K, then of V in one matrix.
    cos_sin: the rotary table, None if positions are learned embeddings.
    q_norm, k_norm: RMSNorm weights per head, None if the model has none.
    """

    kernels: Kernels
    layout: HeadLayout
    qkv: Linear
    cos_sin: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    norm_eps: float

    def __call__(self, x: Tensor, inputs: StepInputs, cache: LayerCache) -> Tensor:
        """[tokens, hidden] -> [tokens, q_size]; writes K and V of the tokens into the cache."""
        k_cache, v_cache = cache
        qkv = self.qkv(x)
        self.kernels.rope_and_cache_(
            qkv,
            self.layout,
            inputs.positions,
            inputs.slots,
            self.cos_sin,
            k_cache,
            v_cache,
            self.q_norm,
            self.k_norm,
            self.norm_eps,
        )
        scale = self.layout.head_dim**-0.5
        return self.kernels.attention(qkv, self.layout, k_cache, v_cache, inputs.attention, scale)


@dataclass(frozen=True, slots=True)
class Block:
    """One decoder layer.

    pre_norm: normalize the inputs of attention and MLP; else the residual sums after them.
    """

    attention: Attention
    attention_out: Linear
    mlp: Mlp
    attention_norm: Norm
    mlp_norm: Norm
    pre_norm: bool

    def __call__(
        self, state: State, inputs: StepInputs, cache: LayerCache, rows: Tensor | None
    ) -> State:
        """rows: the tokens to keep once K and V are cached; None keeps all."""
        residual, delta = state
        if not self.pre_norm:
            attended = self.attention(residual, inputs, cache)
        elif delta is None:
            attended = self.attention(self.attention_norm(residual), inputs, cache)
        else:
            attended = self.attention(self.attention_norm.add_(residual, delta), inputs, cache)
        if rows is not None:
            attended = attended.index_select(0, rows)
            residual = residual.index_select(0, rows)
        if self.pre_norm:
            return residual, self.mlp(self.mlp_norm.add_(residual, self.attention_out(attended)))
        residual = self.attention_norm.add_(residual, self.attention_out(attended))
        return self.mlp_norm.add_(residual, self.mlp(residual)), None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Token embedding plus learned position embedding.

    positions: [max_positions, hidden], None if the model uses rotary embedding.
    """

    tokens: TokenLookup
    positions: Tensor | None = None

    def __call__(self, inputs: StepInputs) -> Tensor:
        x = self.tokens(inputs.token_ids)
        if self.positions is None:
            return x
        return x.add_(F.embedding(inputs.positions, self.positions))


class Joining(NamedTuple):
    """Rows that join a step at a layer.

    layer: rising from one to the next.
    inputs: of the step from this layer on: its rows so far, then these.
    state: of these rows.
    """

    layer: int
    inputs: StepInputs
    state: State


class Stopped(NamedTuple):
    """A step that was stopped before a layer.

    state: of the rows so far. Those that join at this layer come last.
    """

    layer: int
    state: State


class DecoderOutputs(NamedTuple):
    """What a decoder has computed.

    hidden: after the final norm, of the sampled rows and then of the read rows of the step,
        [samples + read, hidden].
    logits: of the sampled rows, fp32 [samples, vocab] on rank 0 and [0, vocab] on other ranks.
    """

    hidden: Tensor
    logits: Tensor


def _joined(state: State, other: State) -> State:
    """The rows of both."""
    (residual, delta), (more, more_delta) = state, other
    residual = torch.cat((residual, more))
    if delta is None or more_delta is None:
        assert delta is more_delta, "rows before the same layer are alike"
        return residual, None
    return residual, torch.cat((delta, more_delta))


BeforeLayer = Callable[[int], bool] | None


class Layers(Protocol):
    """The layers of a decoder."""

    @property
    def has_ends(self) -> bool:
        """Whether they compute the embedding, the final norm and the lm_head as well."""
        ...

    def __call__(
        self,
        layers: range,
        state: State | None,
        inputs: StepInputs,
        caches: Sequence[LayerCache],
        before_layer: BeforeLayer,
    ) -> State | Stopped | DecoderOutputs:
        """Compute some layers, one after the other; their state is overwritten.

        The last layer of the decoder drops the rows that are neither sampled nor read.
        state: None, if they have ends, for the embeddings of the tokens.
        caches, before_layer: as in Decoder.run.
        Returns DecoderOutputs, if they have ends, behind the last layer of the decoder.
        """
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """Layers of any form, which call one kernel after the other. Implements Layers."""

    blocks: Sequence[Block]

    @property
    def has_ends(self) -> bool:
        """See Layers."""
        return False

    def __call__(
        self,
        layers: range,
        state: State | None,
        inputs: StepInputs,
        caches: Sequence[LayerCache],
        before_layer: BeforeLayer,
    ) -> State | Stopped:
        """See Layers."""
        assert state is not None
        for index in layers:
            if before_layer is not None and before_layer(index):
                return Stopped(index, state)
            rows = rows_needed(inputs) if index == len(self.blocks) - 1 else None
            state = self.blocks[index](state, inputs, caches[index], rows)
        return state


@dataclass(frozen=True, slots=True)
class Decoder:
    """The whole model. Stateless: K and V live in the caches passed to it."""

    embedding: Embedding
    layers: Layers
    final_norm: Norm | None
    lm_head: Linear

    def __call__(
        self,
        inputs: StepInputs,
        caches: Sequence[LayerCache],
        before_layer: BeforeLayer = None,
    ) -> Tensor | None:
        """Run one step without readouts. Returns its logits; None if `before_layer` stops it."""
        found = self.run(inputs, caches, before_layer)
        return None if isinstance(found, Stopped) else found.logits

    def run(
        self,
        inputs: StepInputs | None,
        caches: Sequence[LayerCache],
        before_layer: BeforeLayer = None,
        joining: Sequence[Joining] = (),
    ) -> DecoderOutputs | Stopped:
        """Run one step.

        inputs: of the rows that begin with the first layer; None if there are none.
        caches: of all layers.
        before_layer: called with the index of each layer before it is computed; if it returns True,
            the step is stopped.
        joining: rows that begin later.

            layers    0 ............... 12 ............ 20 ............ 29
            rows      | inputs          | and those of  | and those of
                                          joining[0]      joining[1]
        """
        starts: list[tuple[int, StepInputs, State | None]] = [*joining]
        if inputs is not None:
            begun = None if self.layers.has_ends else (self.embedding(inputs), None)
            starts.insert(0, (0, inputs, begun))
        ends = [layer for layer, *_ in starts[1:]] + [len(caches)]
        state: State | None = None
        for (layer, so_far, new), end in zip(starts, ends, strict=True):
            # Only the first rows may have no state yet.
            state = new if state is None or new is None else _joined(state, new)
            found = self.layers(range(layer, end), state, so_far, caches, before_layer)
            if isinstance(found, Stopped | DecoderOutputs):
                return found
            state = found
        assert state is not None
        hidden = self._normalized(*state)
        return DecoderOutputs(hidden, self.lm_head(hidden[: len(so_far.sample_rows)]))

    def _normalized(self, residual: Tensor, delta: Tensor | None) -> Tensor:
        if self.final_norm is None:
            return residual if delta is None else residual + delta
        if delta is None:
            return self.final_norm(residual)
        return self.final_norm.add_(residual, delta)


def rows_needed(inputs: StepInputs) -> Tensor | None:
    """The rows that are sampled, then those that are read; None for all, in their order."""
    if len(inputs.read_rows):
        return torch.cat((inputs.sample_rows, inputs.read_rows))
    if inputs.sample_rows.shape == inputs.token_ids.shape:
        return None  # every token is sampled, as in a step of decode rows
    return inputs.sample_rows
