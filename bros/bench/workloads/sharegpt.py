"""ShareGPT files: prompts that people wrote, with the lengths of the answers they got.

    [{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}]

Of each conversation the first thing a human said is the prompt, and the answer to it says how
many tokens to generate. Conversations that are too short or too long are left out, with the
limits that vLLM's benchmark has; how many is told.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bros.bench.plan import Piece
from bros.bench.workloads.content import Draft, Recorded
from bros.core.errors import ConfigError
from bros.simulator.workload import generator

_HUMANS = frozenset({"human", "user"})
_NO_ANSWERS = frozenset({"human", "user", "system"})
_SPACE = re.compile(r"[ \t\r\n]*")


class Encoder(Protocol):
    """What of bros.engine.tokenizer.Tokenizer is needed to count tokens."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens that prompts and answers may have; both ends are allowed."""

    shortest_prompt: int = 4
    shortest_answer: int = 4
    longest_prompt: int = 1024
    longest_together: int = 2048


class ShareGpt(NamedTuple):
    """The conversations that can be used, and how many of those looked at cannot.

    without_question: no human was answered. too_short, too_long: beyond the limits.
    """

    content: Recorded
    without_question: int
    too_short: int
    too_long: int


def read_sharegpt(
    path: Path,
    tokenizer: Encoder,
    *,
    seed: int,
    take: int | None = None,
    limits: Limits | None = None,
) -> ShareGpt:
    """Conversations in an order that depends on the seed.

    take: stop looking when so many can be used; None looks at all, which takes about a second
    per thousand. Raises ConfigError naming file and line if the file is not what it should be,
    and if no conversation can be used.
    """
    limits = limits or Limits()
    asked = _read(path)
    generator(seed, "sharegpt order").shuffle(asked)
    texts: dict[str, str] = {}
    drafts: list[Draft] = []
    counts = {"without_question": 0, "too_short": 0, "too_long": 0}
    for pair in asked:
        if take is not None and len(drafts) >= take:
            break
        if pair is None:
            counts["without_question"] += 1
            continue
        prompt, answer = (len(tokenizer.encode(text, add_special_tokens=False)) for text in pair)
        if prompt < max(1, limits.shortest_prompt) or answer < max(1, limits.shortest_answer):
            counts["too_short"] += 1
        elif prompt > limits.longest_prompt or prompt + answer > limits.longest_together:
            counts["too_long"] += 1
        else:
            # Known by its hash, so that a plan's digest is one of the texts as well.
            key = f"text/{hashlib.sha256(pair[0].encode()).hexdigest()}"
            texts[key] = pair[0]
            drafts.append(Draft((Piece(key, prompt),), answer))
    if not drafts:
        raise ConfigError(f"{path} has no conversation that can be used: {counts}")
    content = Recorded(path.stem, tuple((draft,) for draft in drafts), texts)
    return ShareGpt(content, **counts)


def _read(path: Path) -> list[tuple[str, str] | None]:
    """The prompt and the answer of each conversation; None where there are none."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found: list[tuple[str, str] | None] = []
    try:
        for at, entry in _entries(text):
            try:
                found.append(_question(entry))
            except (KeyError, TypeError, AttributeError):
                line = text.count("\n", 0, at) + 1
                raise ConfigError(
                    f"{path}:{line}: not a conversation: an object whose `conversations` is a "
                    "list of objects with `from` and `value`, both text"
                ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not a JSON list: {error.msg}") from None
    return found


def _entries(text: str) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list one by one, each with where it begins in the text.

    Raises JSONDecodeError.
    """
    decoder = json.JSONDecoder()
    at = _skip(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("it does not begin with [", text, at)
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        entry, end = decoder.raw_decode(text, at)
        yield at, entry
        at = _skip(text, end)
        if text[at : at + 1] == "]":
            return
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("neither , nor ] follows an element", text, at)
        at = _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _question(entry: Any) -> tuple[str, str] | None:
    """Raises KeyError, TypeError or AttributeError if this is no conversation."""
    turns: Sequence[Any] = entry["conversations"]
    if not isinstance(turns, list):
        raise TypeError
    said = [(turn["from"].lower(), turn["value"].strip()) for turn in turns]
    for (who, prompt), (other, answer) in zip(said, said[1:], strict=False):
        if who in _HUMANS:
            # Only the first: later questions mean little without what was said before.
            return None if other in _NO_ANSWERS else (prompt, answer)
    return None
