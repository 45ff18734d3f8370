"""Small real tokenizers: byte-level BPE trained on a few sentences, and SentencePiece style."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from bros.core.clock import ManualClock
from bros.text.tokenizer import ChatTemplates, Tokenizer
from support.tiny_models import save_tiny_llama

SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "Stop here. Then stop there, and do not stop before the end!",
    "Größe, façade, naïve: Zeichen mit Akzent; 今日は、世界。你好，世界。",
    "Emoji 😀 👩‍👩‍👧 🇩🇪 take several tokens each; so does \t tab and \n newline.",
)
SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level_backend() -> tokenizers.Tokenizer:
    """Every byte is a token, special tokens come first, one added token is not special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(SENTENCES, trainer)
    backend.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return backend


def sentencepiece_backend(decoder: decoders.Decoder | None = None) -> tokenizers.Tokenizer:
    """Llama style: spaces written as U+2581, unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,!", "é", "世"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "s"), ("▁s", "t"), ("▁", "▁")]
    pieces += ["".join(pair) for pair in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoder or decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def tiny_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """The byte-level one, in memory."""
    sources = {} if template is None else {"default": template}
    templates = ChatTemplates(sources, SPECIAL, ManualClock())
    return Tokenizer(byte_level_backend(), SPECIAL, templates)


def save_tokenizer(
    folder: Path, backend: tokenizers.Tokenizer | None = None, **config: Any
) -> Path:
    """Write tokenizer.json and tokenizer_config.json (`config` over the usual entries)."""
    (backend or byte_level_backend()).save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", **SPECIAL, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def save_chat_llama(folder: Path) -> Path:
    """Write a tiny Llama with a tokenizer and TEMPLATE, which serves chats. Returns the folder."""
    save_tiny_llama(folder, vocab_size=1000)
    return save_tokenizer(folder, chat_template=TEMPLATE)
