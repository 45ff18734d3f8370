"""BERT: a text encoder, with a score head if the checkpoint has one.

    x = norm(word + position + type embeddings)
    each layer      x = norm(x + attention(x)),   x = norm(x + MLP(x))
    score head      classifier(tanh(dense(x of the first token)))

Every token attends to all tokens of its text, so a text is computed at once and nothing is cached.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bros.core.errors import ModelError
from bros.executor.models.layers import LayerNorm, Linear, Norm, make_linear
from bros.executor.target import Target
from bros.executor.weights import Weights, refuse_unused
from bros.kernels.interface import Products

ENCODERS = ("BertModel", "BertForMaskedLM", "BertForSequenceClassification")
"""Architectures that this module computes."""

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": F.gelu,
        "gelu_new": partial(F.gelu, approximate="tanh"),
        "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
        "relu": F.relu,
    }
)

_COMPUTED = re.compile(r"(bert\.)?(encoder|embeddings)\.(?!position_ids$)")
"""Tensors of what is computed. Others are of heads that are not, and a list of positions."""

_QKV = ("attention.self.query", "attention.self.key", "attention.self.value")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """The shape of an encoder.

    num_types: number of token types: 2 if it takes pairs of texts.
    scores: it has a head with one number.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_types: int
    norm_eps: float
    activation: str
    scores: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> EncoderSpec:
        """Raises ModelError if one of its variants is not supported."""
        architecture = str((config.get("architectures") or ["BertModel"])[0])
        try:
            spec = cls(
                architecture=architecture,
                vocab_size=int(config["vocab_size"]),
                hidden_size=int(config["hidden_size"]),
                intermediate_size=int(config["intermediate_size"]),
                num_layers=int(config["num_hidden_layers"]),
                num_heads=int(config["num_attention_heads"]),
                max_positions=int(config["max_position_embeddings"]),
                num_types=int(config.get("type_vocab_size", 2)),
                norm_eps=float(config.get("layer_norm_eps", 1e-12)),
                activation=str(config.get("hidden_act", "gelu")),
                scores=architecture == "BertForSequenceClassification",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"the model's config.json is not usable: {error!r}") from error
        spec._check(config)
        return spec

    def _check(self, config: Mapping[str, Any]) -> None:
        if self.activation not in _ACTIVATIONS:
            raise ModelError(f"activation {self.activation!r} is not supported for BERT")
        if min(self.num_heads, self.hidden_size, self.num_types) < 1:
            raise ModelError("the model's config.json is not usable: a size is less than 1")
        if self.hidden_size % self.num_heads:
            raise ModelError(
                f"the model's config.json is not usable: {self.hidden_size} numbers cannot be "
                f"divided among {self.num_heads} heads"
            )
        kind = config.get("position_embedding_type", "absolute")
        if kind != "absolute" or config.get("is_decoder"):
            raise ModelError("BERT is supported as an encoder with absolute positions only")
        labels = len(config.get("id2label") or {}) or int(config.get("num_labels", 2))
        if self.scores and labels != 1:
            raise ModelError(f"score heads with one label are supported, this one has {labels}")


# ---- Attention of a step: texts of about the same length are computed together.


_FINE, _COARSE = 8, 32
_FINE_LENGTH = 64


@dataclass(frozen=True, slots=True)
class TextGroup:
    """Texts of a step that are padded to one length.

    rows: int64 [texts, length], the token at each place; any token where it is padding.
    mask: bool [texts, 1, 1, length], False for padding; None if there is none.
    places: int64 [tokens], index into texts x length of each token that is no padding.
    tokens: int64 [tokens], which tokens these are.
    """

    rows: Tensor
    mask: Tensor | None
    places: Tensor
    tokens: Tensor


def text_groups(lengths: Sequence[int], device: torch.device) -> list[TextGroup]:
    """Group the texts of a step, whose tokens follow each other, by padded length."""
    starts: list[int] = []
    members: dict[int, list[int]] = {}
    at = 0
    for index, length in enumerate(lengths):
        starts.append(at)
        at += length
        members.setdefault(_padded(length), []).append(index)
    groups = []
    for texts in members.values():
        sizes = torch.tensor([lengths[text] for text in texts])
        begins = torch.tensor([starts[text] for text in texts])
        within = torch.arange(int(sizes.max()))
        real = within < sizes[:, None]
        rows = begins[:, None] + torch.minimum(within, sizes[:, None] - 1)
        places = real.flatten().nonzero()[:, 0]
        mask = None if bool(real.all()) else real[:, None, None].to(device)
        tokens = rows.flatten()[places].to(device)
        groups.append(TextGroup(rows.to(device), mask, places.to(device), tokens))
    return groups


def _padded(length: int) -> int:
    multiple = _FINE if length <= _FINE_LENGTH else _COARSE
    return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    qkv: Linear
    attention_out: Linear
    attention_norm: Norm
    up: Linear
    activation: Callable[[Tensor], Tensor]
    down: Linear
    mlp_norm: Norm
    num_heads: int

    def __call__(self, x: Tensor, groups: Sequence[TextGroup]) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        x = self.attention_norm.add_(x, self.attention_out(self._attended(self.qkv(x), groups)))
        return self.mlp_norm.add_(x, self.down(self.activation(self.up(x))))

    def _attended(self, qkv: Tensor, groups: Sequence[TextGroup]) -> Tensor:
        hidden = qkv.shape[1] // 3
        out = qkv.new_empty(len(qkv), hidden)
        for group in groups:
            texts, length = group.rows.shape
            heads = qkv[group.rows].view(texts, length, 3, self.num_heads, -1)
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, group.mask)
            flat = attended.transpose(1, 2).reshape(texts * length, hidden)
            out[group.tokens] = flat if group.mask is None else flat[group.places]
        return out


@dataclass(frozen=True, slots=True)
class Encoder:
    """words: [vocab, hidden].
    positions: [max_positions, hidden].
    types: [types, hidden].
    head: from the hidden states of first tokens [texts, hidden] to scores [texts, 1]; None if the
        model has no score head.
    """

    words: Tensor
    positions: Tensor
    types: Tensor
    norm: Norm
    layers: Sequence[EncoderLayer]
    head: Callable[[Tensor], Tensor] | None

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        before_layer: Callable[[], bool] | None = None,
    ) -> Tensor | None:
        """The hidden states [tokens, hidden] of texts.

        token_ids, positions, types: int64 [tokens]; the tokens of the texts follow each other.
        lengths: of the texts.
        before_layer: called before each layer; if it returns True, the result is None.
        """
        x = F.embedding(token_ids, self.words) + F.embedding(types, self.types)
        x = self.norm.add_(x, F.embedding(positions, self.positions))
        groups = text_groups(lengths, x.device)
        for layer in self.layers:
            if before_layer is not None and before_layer():
                return None
            x = layer(x, groups)
        return x


# ---- Building it from a checkpoint.


def build_encoder(
    spec: EncoderSpec, source: Weights, target: Target, products: Products | None = None
) -> Encoder:
    """products: of the linear layers; None if torch multiplies.

    Raises ModelError if a tensor is missing or has the wrong shape, or if the checkpoint has
    layers or embeddings that this model does not use.
    """
    encoder = _Builder(spec, source, target, products).build()
    unused = [name for name in source.unread if _COMPUTED.match(name)]
    refuse_unused(unused, spec.architecture)
    return encoder


class _Builder:
    def __init__(
        self, spec: EncoderSpec, source: Weights, target: Target, products: Products | None
    ) -> None:
        self._spec = spec
        self._source = source
        self._target = target
        self._products = products
        has_root = any(name.startswith("bert.") for name in source.unread)
        self._root = "bert." if has_root else ""

    def build(self) -> Encoder:
        spec, root = self._spec, self._root + "embeddings."
        return Encoder(
            words=self._matrix(root + "word_embeddings.weight", spec.vocab_size),
            positions=self._matrix(root + "position_embeddings.weight", spec.max_positions),
            types=self._matrix(root + "token_type_embeddings.weight", spec.num_types),
            norm=self._norm(root + "LayerNorm"),
            layers=[self._layer(index) for index in range(spec.num_layers)],
            head=self._head() if spec.scores else None,
        )

    def _layer(self, index: int) -> EncoderLayer:
        spec, prefix = self._spec, f"{self._root}encoder.layer.{index}."
        hidden, inner = spec.hidden_size, spec.intermediate_size
        return EncoderLayer(
            qkv=self._linear([prefix + name for name in _QKV], hidden, hidden),
            attention_out=self._linear([prefix + "attention.output.dense"], hidden, hidden),
            attention_norm=self._norm(prefix + "attention.output.LayerNorm"),
            up=self._linear([prefix + "intermediate.dense"], inner, hidden),
            activation=_ACTIVATIONS[spec.activation],
            down=self._linear([prefix + "output.dense"], hidden, inner),
            mlp_norm=self._norm(prefix + "output.LayerNorm"),
            num_heads=spec.num_heads,
        )

    def _head(self) -> Callable[[Tensor], Tensor]:
        hidden = self._spec.hidden_size
        dense = self._linear([self._root + "pooler.dense"], hidden, hidden)
        weight, bias = self._matrix("classifier.weight", 1), self._vector("classifier.bias", 1)

        def head(first: Tensor) -> Tensor:
            return F.linear(torch.tanh(dense(first)), weight, bias)

        return head

    def _linear(self, names: Sequence[str], rows: int, columns: int) -> Linear:
        """One layer from matrices of `rows` rows each, concatenated."""
        bias = [self._vector(f"{name}.bias", rows) for name in names]
        parts = [(f"{name}.weight", rows) for name in names]
        return make_linear(self._source, parts, columns, bias, self._target, self._products)

    def _norm(self, name: str) -> Norm:
        size = self._spec.hidden_size
        parts = ("weight", "bias")
        if f"{name}.gamma" in self._source.unread:  # in checkpoints that came from TensorFlow
            parts = ("gamma", "beta")
        weight, bias = (self._vector(f"{name}.{part}", size) for part in parts)
        return LayerNorm(size, weight, bias, self._spec.norm_eps)

    def _matrix(self, name: str, rows: int) -> Tensor:
        values = self._source.dense(name, (rows, self._spec.hidden_size))
        return values.to(self._target.device, self._target.dtype)

    def _vector(self, name: str, size: int) -> Tensor:
        values = self._source.dense(name, (size,))
        return values.to(self._target.device, self._target.dtype)
