"""How a model's hidden states become embeddings, as sentence-transformers describes it.

modules.json                  the steps: Transformer, Pooling, Normalize
1_Pooling/config.json         which hidden states
sentence_bert_config.json     the longest text
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bros.core.errors import ModelError
from bros.core.files import read_model_json, read_model_json_object
from bros.core.interfaces import EmbeddingInfo
from bros.core.request import Pooling

_KINDS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}
_MODES: Mapping[str, Pooling] = {
    "cls": Pooling.FIRST,
    "mean": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
}
"""The value of `pooling_mode`, which newer versions write."""


def embedding_info(
    option: str,
    folder: Path,
    settings: Mapping[str, Any],
    size: int,
    default: Pooling,
    *,
    scores: bool = False,
) -> EmbeddingInfo:
    """What the folder of a model says about its embeddings.

    option: --pooling.
    settings: its config.json.
    size: numbers of a hidden state.
    default: the pooling if the folder has no modules.json.
    scores: the model has a score head.
    Raises ModelError if the folder asks for steps that are not supported.
    """
    modules = read_model_json(folder / "modules.json") or []
    if not (isinstance(modules, list) and all(isinstance(each, dict) for each in modules)):
        raise ModelError(f"{folder / 'modules.json'} is not a list of steps")
    pooling, normalized = default, not modules
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config = read_model_json_object(folder / str(module.get("path", "")) / "config.json")
            if option == "auto":
                pooling = _pooling(config)
        elif kind == "Normalize":
            normalized = True
        elif kind != "Transformer":
            raise ModelError(f"the step {kind!r} of {folder / 'modules.json'} is not supported")
    if option != "auto":
        pooling = Pooling(option)
    sizes = settings.get("matryoshka_dimensions")
    dimensions: tuple[int, ...] | None = None
    if isinstance(sizes, list):
        dimensions = tuple(sorted(int(each) for each in sizes if 0 < int(each) <= size))
    elif settings.get("is_matryoshka"):
        dimensions = ()
    return EmbeddingInfo(
        pooling=pooling, normalized=normalized, size=size, dimensions=dimensions, scores=scores
    )


def longest_text(folder: Path) -> int | None:
    """The longest text in tokens that sentence-transformers passes to the model, if it says so."""
    settings = read_model_json_object(folder / "sentence_bert_config.json")
    length = settings.get("max_seq_length")
    return length if isinstance(length, int) and length > 0 else None


def _pooling(config: Mapping[str, Any]) -> Pooling:
    mode = config.get("pooling_mode")
    if isinstance(mode, str) and mode in _MODES:
        return _MODES[mode]
    chosen = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    if len(chosen) == 1 and chosen[0] in _KINDS:
        return _KINDS[chosen[0]]
    asked = mode or ", ".join(chosen) or "none"
    raise ModelError(
        f"the pooling of this model's embeddings, {asked}, is not supported; choose one that is "
        "with --pooling"
    )
