"""Builds a Decoder from a ModelSpec and weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.executor.models.adapted import adapted
from bros.executor.models.decoder import (
    Attention,
    Block,
    Blocks,
    Decoder,
    Embedding,
    GatedMlp,
    Layers,
    Mlp,
    PlainMlp,
)
from bros.executor.models.layers import (
    LayerNorm,
    Linear,
    Norm,
    PanelEmbedding,
    PanelLinear,
    PlainLinear,
    RmsNorm,
    TokenEmbedding,
    TokenLookup,
    has_products,
    load_matrix,
    make_linear,
    make_lm_head,
    vocabulary_panels,
)
from bros.executor.models.native import native_layers
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks
from bros.executor.parallel.sharding import (
    ShardedWeights,
    parallel_lm_head,
    row_parallel,
    shards_of,
    vocab_parallel_embedding,
)
from bros.executor.target import Target
from bros.executor.weights import Weights, refuse_unused
from bros.kernels.interface import HeadLayout, Kernels
from bros.kernels.panels import Panels


@dataclass(frozen=True, slots=True)
class _Names:
    """The tensor names of a model family; those of a block are relative to the block's prefix.

    root: prefix of all names except lm_head.
    wide: the MLP's input projections, stacked as one layer.
    """

    root: str
    out: str
    attention_norm: str
    mlp_norm: str
    final_norm: str
    down: str
    wide: tuple[str, ...]


_NAMES = {
    "llama": _Names(
        root="model.",
        out="self_attn.o_proj",
        attention_norm="input_layernorm",
        mlp_norm="post_attention_layernorm",
        final_norm="norm",
        down="mlp.down_proj",
        wide=("mlp.gate_proj", "mlp.up_proj"),
    ),
    "opt": _Names(
        root="model.decoder.",
        out="self_attn.out_proj",
        attention_norm="self_attn_layer_norm",
        mlp_norm="final_layer_norm",
        final_norm="final_layer_norm",
        down="fc2",
        wide=("fc1",),
    ),
}
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_AFFINE = ("weight", "bias")
_IGNORED = re.compile(r"(^lm_head\.weight|rotary_emb\.inv_freq|\.masked_bias)(\.q\w+)?$")
_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


def build_decoder(
    spec: ModelSpec,
    source: Weights,
    kernels: Kernels,
    target: Target,
    max_positions: int,
    ranks: Ranks = SINGLE_RANK,
) -> Decoder:
    """spec, source: of the whole model, of which each rank builds its shard.
    max_positions: the length of the rotary table.

    Raises ModelError if a tensor is missing or has the wrong shape, or if the checkpoint has
    tensors that this model does not use; ConfigError if there are too many ranks.
    """
    decoder = _Builder(spec, source, kernels, target, max_positions, ranks).build()
    unused = [name for name in source.unread if not _IGNORED.search(name)]
    refuse_unused(unused, spec.architecture)
    return decoder


def _names_of(family: str, source: Weights) -> _Names:
    """The names of a checkpoint, which has no prefix `model.` if the model was saved without its
    lm_head."""
    names = _NAMES[family]
    if any(name.startswith(names.root) for name in source.unread):
        return names
    short = names.root.removeprefix("model.")
    found = f"{short}embed_tokens.weight" in source.unread
    return replace(names, root=short) if found else names


class _Builder:
    def __init__(
        self,
        spec: ModelSpec,
        source: Weights,
        kernels: Kernels,
        target: Target,
        max_positions: int,
        ranks: Ranks,
    ) -> None:
        shards = shards_of(spec, ranks.size)
        self._ranks = ranks
        self._vocabs = [shard.vocab for shard in shards]
        source = adapted(spec, source)
        # From here on, the spec and the weights are those of this rank's shard.
        spec = self._spec = shards[ranks.rank].local
        self._source: Weights = ShardedWeights(source, shards[ranks.rank])
        self._kernels = kernels
        own = target.packed and has_products(kernels.name)
        self._products = kernels.products if own else None
        self._target = target
        self._names = _names_of(spec.family, source)
        self._layout = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._cos_sin = None
        if spec.rope is not None:
            self._cos_sin = spec.rope.table(max_positions).to(target.device)

    def build(self) -> Decoder:
        spec, root = self._spec, self._names.root
        tokens, lm_head = self._vocabulary(root + "embed_tokens.weight")
        final_norm = self._norm(root + self._names.final_norm) if spec.final_norm else None
        embedding = Embedding(tokens, self._learned_positions())
        return Decoder(embedding, self._layers(embedding, final_norm, lm_head), final_norm, lm_head)

    def _layers(self, embedding: Embedding, final_norm: Norm | None, lm_head: Linear) -> Layers:
        """In one native call where the kernels have one for layers of this form."""
        blocks = [self._block(index) for index in range(self._spec.num_layers)]
        native = None
        if self._products is not None:
            ends = embedding.tokens, final_norm, lm_head
            has_positions = embedding.positions is not None
            eps = self._spec.norm_eps
            native = native_layers(blocks, self._products, eps, None if has_positions else ends)
        return native or Blocks(blocks)

    def _vocabulary(self, name: str) -> tuple[TokenLookup, Linear]:
        """The embedding and the lm_head. If they are tied, they share one matrix where there are
        products and on a GPU.

        name: of the embedding's tensor.
        """
        spec, target, ranks = self._spec, self._target, self._ranks
        products = self._products
        weight = head_weight = self._embedding(name, spec.vocab_size)
        tied = spec.tied
        if not tied or "lm_head.weight" in self._source.unread:
            head_weight = self._embedding("lm_head.weight", spec.vocab_size)
            # A model that was trained further may say that they are tied, and have two.
            tied = tied and torch.equal(head_weight, weight)
            head_weight = weight if tied else head_weight
        tokens: TokenLookup
        head: Linear
        if products is None:
            tokens = TokenEmbedding(weight)
            head = make_lm_head(head_weight, target) if target.packed else PlainLinear(head_weight)
        else:
            packed = vocabulary_panels(head_weight, target, products)
            # An embedding of its own is not rounded: only a product gains by groups of codes.
            panels = packed if tied else Panels.fp32(weight, products.panel_layout)
            tokens = PanelEmbedding(products, panels)
            head = PanelLinear(products, packed)
        lookup = vocab_parallel_embedding(tokens, self._vocabs[ranks.rank], ranks)
        return lookup, parallel_lm_head(head, [len(vocab) for vocab in self._vocabs], ranks)

    def _embedding(self, name: str, rows: int) -> Tensor:
        """[rows, hidden] in the dtype of activations."""
        columns = self._spec.hidden_size
        if self._target.packed:
            return self._source.dense(name, (rows, columns))
        return load_matrix(self._source, [(name, rows)], columns, self._target)

    def _vector(self, name: str, size: int) -> Tensor:
        """fp32 [size] on the device, as the kernels expect the weights of norms."""
        return self._source.dense(name, (size,)).to(self._target.device)

    def _block(self, index: int) -> Block:
        spec, names = self._spec, self._names
        prefix = f"{names.root}layers.{index}."
        out = self._linear(
            prefix, (names.out,), (spec.hidden_size,), self._layout.q_size, spec.out_bias
        )
        return Block(
            attention=self._attention(prefix, None if index in spec.unrotated else self._cos_sin),
            attention_out=row_parallel(out, self._ranks),
            mlp=self._mlp(prefix),
            attention_norm=self._norm(prefix + names.attention_norm),
            mlp_norm=self._norm(prefix + names.mlp_norm),
            pre_norm=spec.pre_norm,
        )

    def _attention(self, prefix: str, cos_sin: Tensor | None) -> Attention:
        spec, layout = self._spec, self._layout
        rows = (layout.q_size, layout.kv_size, layout.kv_size)
        head_norm: list[Tensor | None] = [None, None]
        if spec.qk_norm:
            head_norm = [
                self._vector(f"{prefix}self_attn.{which}_norm.weight", spec.head_dim)
                for which in "qk"
            ]
        return Attention(
            kernels=self._kernels,
            layout=layout,
            qkv=self._linear(prefix, _QKV, rows, spec.hidden_size, spec.qkv_bias),
            cos_sin=cos_sin,
            q_norm=head_norm[0],
            k_norm=head_norm[1],
            norm_eps=spec.norm_eps,
        )

    def _mlp(self, prefix: str) -> Mlp:
        spec, names = self._spec, self._names
        hidden, inner, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        wide = self._linear(prefix, names.wide, (inner,) * len(names.wide), hidden, bias)
        down = self._linear(prefix, (names.down,), (hidden,), inner, bias)
        down = row_parallel(down, self._ranks)
        if spec.family == "llama":
            return GatedMlp(self._kernels, wide, down)
        return PlainMlp(wide, _ACTIVATIONS[spec.activation], down)

    def _linear(
        self, prefix: str, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool
    ) -> Linear:
        """One layer from the matrices `names`, concatenated along their rows."""
        stacked_bias = None
        if bias:
            stacked_bias = [
                self._vector(f"{prefix}{name}.bias", count).to(self._target.dtype)
                for name, count in zip(names, rows, strict=True)
            ]
        parts = [(f"{prefix}{name}.weight", n) for name, n in zip(names, rows, strict=True)]
        return make_linear(
            self._source,
            parts,
            columns,
            stacked_bias,
            self._target,
            self._products,
            self._kernels.row_products,
        )

    def _norm(self, name: str) -> Norm:
        spec, size = self._spec, self._spec.hidden_size
        if spec.family == "llama":
            return RmsNorm(self._kernels, self._vector(name + ".weight", size), spec.norm_eps)
        if not spec.norm_affine:
            return LayerNorm(size, None, None, spec.norm_eps)
        dtype = self._target.dtype  # on a GPU F.layer_norm needs one dtype for all arguments
        weight, bias = (self._vector(f"{name}.{part}", size).to(dtype) for part in _AFFINE)
        return LayerNorm(size, weight, bias, spec.norm_eps)

    def _learned_positions(self) -> Tensor | None:
        spec = self._spec
        if spec.rope is not None:
            return None
        rows = spec.max_positions + spec.position_offset
        table = self._embedding(self._names.root + "embed_positions.weight", rows)
        return table[spec.position_offset :]
