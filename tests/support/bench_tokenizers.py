"""Tokenizers whose words are single tokens, for prompts that are made up."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from bros.core.clock import ManualClock
from bros.text.tokenizer import ChatTemplates, Tokenizer

WORDS = ("river", "stone", "green", "lamp", "south", "quiet", "found", "maybe", "under", "while")
TRIMMING = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}"
    "{% endfor %}"
)


def joining() -> Tokenizer:
    """Byte level without splitting at spaces; `green` and the word after it are one token."""
    backend = tokenizers.Tokenizer(_model("Ġ", [(" green", f" {word}") for word in WORDS]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _tokenizer(backend)


def llama_like() -> Tokenizer:
    """SentencePiece style: a space before every text, and BOS around those that want it."""
    backend = tokenizers.Tokenizer(_model("▁", []))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>"])
    bos = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return _tokenizer(backend)


def _model(space: str, bridges: list[tuple[str, str]]) -> models.BPE:
    """Letters, and merges that lead to each word with and without a space before it."""
    letters = sorted({letter for word in WORDS for letter in word} | set("<|>_"))
    pieces = [space, *letters]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end in range(1, len(word)):
            merges.append((word[:end], word[end]))
        merges.append((space, word))
    merges += [(left.replace(" ", space), right.replace(" ", space)) for left, right in bridges]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    return models.BPE(vocab=vocab, merges=list(dict.fromkeys(merges)))


def _tokenizer(backend: tokenizers.Tokenizer) -> Tokenizer:
    templates = ChatTemplates({"default": TRIMMING}, {}, ManualClock())
    return Tokenizer(backend, {}, templates)
