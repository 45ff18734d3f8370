"""Contents by their names on the command line.

lmsys, sharegpt, synthetic                             BROS Table 2
toolbench, embodied, programming, video, loogle        Preble Table 1
multiturn                                              chats whose prompts grow
azure:FILE, mooncake:FILE, burstgpt:FILE               traces
sharegpt:FILE                                          real text
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bros.bench.plan import Piece
from bros.bench.workloads.contents import (
    CHATS,
    FILES,
    NAMES,
    SHARED_PREFIX,
    ChatContent,
    Content,
    Conversation,
    Draft,
    RecordedArrivals,
    RecordedContent,
    be_content,
    preble_content,
    rt_content,
)
from bros.core.errors import ConfigError
from bros.workload.arrivals import (
    RT_SIZES,
    Size,
    bad_line,
    generator,
    read_azure_trace,
    read_mooncake_trace,
)
from bros.workload.lengths import Uniform

# ---- ShareGPT files: real prompts, with the lengths of the real responses.
#
#     [{"id": ..., "conversations": [{"from": "human", "value": ...}, {"from": "gpt", ...}, ...]}]
#
# The first user message of a conversation is the prompt, and the response to it determines the
# output length. Conversations that are too short or too long are left out and counted, with the
# limits of vLLM's benchmark.


_USER_ROLES = frozenset({"human", "user"})
_NOT_ASSISTANT_ROLES = frozenset({"human", "user", "system"})
_SPACE = re.compile(r"[ \t\r\n]*")


class Encoder(Protocol):
    """The method of bros.text.tokenizer.Tokenizer that counts tokens."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Inclusive limits on the tokens of prompts and responses."""

    shortest_prompt: int = 4
    shortest_answer: int = 4
    longest_prompt: int = 1024
    longest_together: int = 2048


class ShareGpt(NamedTuple):
    """The usable conversations, and how many were left out.

    without_question: without a response to a user message.
    too_short, too_long: beyond the limits.
    """

    content: RecordedContent
    without_question: int
    too_short: int
    too_long: int


def read_sharegpt(
    path: Path,
    tokenizer: Encoder,
    *,
    seed: int,
    take: int | None = None,
    limits: TokenLimits | None = None,
) -> ShareGpt:
    """Conversations, shuffled by the seed.

    take: stop after this many usable conversations; None: read all, about a second per thousand.
    Raises ConfigError, naming file and line, for an invalid file, and if none is usable.
    """
    limits = limits or TokenLimits()
    asked = _read_exchanges(path)
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
            # The key is a hash of the text, so that a plan's digest covers the texts.
            key = f"text/{hashlib.sha256(pair[0].encode()).hexdigest()}"
            texts[key] = pair[0]
            drafts.append(Draft((Piece(key, prompt),), answer))
    if not drafts:
        raise ConfigError(f"{path} has no usable conversation: {counts}")
    content = RecordedContent(path.stem, tuple((draft,) for draft in drafts), texts)
    return ShareGpt(content, **counts)


def _read_exchanges(path: Path) -> list[tuple[str, str] | None]:
    """(prompt, response) of each conversation; None for a conversation without."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found: list[tuple[str, str] | None] = []
    try:
        for at, entry in _entries(text):
            try:
                found.append(_first_exchange(entry))
            except (KeyError, TypeError, AttributeError):
                line = text.count("\n", 0, at) + 1
                raise ConfigError(
                    f"{path}:{line}: not a conversation: an object whose `conversations` is a "
                    "list of objects with `from` and `value`, both text"
                ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not a JSON list: {error.msg}") from None
    except ConfigError:  # it is a ValueError, too
        raise
    except (ValueError, RecursionError) as error:  # a number too long, brackets too deep
        raise ConfigError(f"{path}: not a JSON list that can be read: {error}") from None
    return found


def _entries(text: str) -> Iterator[tuple[int, Any]]:
    """The elements of a JSON list one by one, each with its offset in the text.

    Raises JSONDecodeError.
    """
    decoder = json.JSONDecoder()
    at = _skip_space(text, 0)
    if text[at : at + 1] != "[":
        raise json.JSONDecodeError("it does not begin with [", text, at)
    at = _skip_space(text, at + 1)
    if text[at : at + 1] == "]":
        return
    while True:
        entry, end = decoder.raw_decode(text, at)
        yield at, entry
        at = _skip_space(text, end)
        if text[at : at + 1] == "]":
            return
        if text[at : at + 1] != ",":
            raise json.JSONDecodeError("neither , nor ] follows an element", text, at)
        at = _skip_space(text, at + 1)


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _first_exchange(entry: Any) -> tuple[str, str] | None:
    """Raises KeyError, TypeError or AttributeError for an invalid conversation."""
    turns: Sequence[Any] = entry["conversations"]
    if not isinstance(turns, list):
        raise TypeError
    # Scraped texts may have halves of characters, which are no text to a tokenizer.
    said = [
        (turn["from"].lower(), turn["value"].strip().encode("utf-8", "replace").decode("utf-8"))
        for turn in turns
    ]
    for (role, prompt), (other, answer) in zip(said, said[1:], strict=False):
        if role in _USER_ROLES:
            # Only the first: later messages depend on the earlier ones.
            return None if other in _NOT_ASSISTANT_ROLES else (prompt, answer)
    return None


# ---- Trace files: arrival times and lengths in three formats.
#
#     Azure 2023   TIMESTAMP,ContextTokens,GeneratedTokens
#     Mooncake     see workload/arrivals.py
#     BurstGPT     Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
#
# Times are relative to the first request. All readers raise ConfigError, naming file and line.


_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class RecordedSizes:
    """Conversations of one request each with the lengths of a file and no shared prefixes.

    They are created lazily, because traces may have millions of rows.
    """

    label: str
    sizes: tuple[Size, ...] = field(repr=False)

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """In the order of the file for every seed."""
        for number, (prompt_tokens, output_tokens) in enumerate(self.sizes):
            yield (Draft((Piece(f"{self.label}/{number}", prompt_tokens),), output_tokens),)


class Trace(NamedTuple):
    """The requests of a file and their arrival times.

    skipped: rows that were left out.
    """

    content: RecordedContent | RecordedSizes
    arrivals: RecordedArrivals
    skipped: int = 0


def read_azure(path: Path) -> Trace:
    """An Azure LLM inference trace of 2023. Prompts share no prefixes."""
    rows = [(time_s, *size) for time_s, size in read_azure_trace(path)]
    return _trace_of_sizes(path, rows, 0)


def read_burstgpt(path: Path, model: str | None = None) -> Trace:
    """A BurstGPT trace; it may have additional columns.

    model: read only rows of this model (`ChatGPT`, `GPT-4`). Rows without response tokens (the
    request failed) or without request tokens are skipped and counted. Prompts share no prefixes.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_burstgpt_rows(path, csv.reader(file), model))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    played = sorted(row for row in rows if row[1] and row[2])
    return _trace_of_sizes(path, played, len(rows) - len(played))


def read_mooncake(path: Path) -> Trace:
    """A Mooncake trace. Every block of a prompt is a piece with its hash id as the key.

    Equal ids become equal text, so requests share the prefixes that they share in the trace.
    """
    recorded = read_mooncake_trace(path)
    drafts = [
        Draft(
            tuple(Piece(f"{path.stem}/{block}", tokens) for block, tokens in arrival.blocks),
            arrival.size.output_tokens,
        )
        for arrival in recorded
    ]
    arrivals = _arrivals(path, [arrival.time_s for arrival in recorded])
    return Trace(RecordedContent(path.stem, tuple((draft,) for draft in drafts)), arrivals)


def _burstgpt_rows(
    path: Path, lines: Iterator[list[str]], model: str | None
) -> Iterator[tuple[float, int, int]]:
    header = [name.strip() for name in next(lines, [])]
    missing = [name for name in _BURSTGPT_COLUMNS if name not in header]
    if missing:
        bad_line(path, 1, f"there is no column {missing[0]!r} in the first line")
    time_at, model_at, prompt_at, output_at = (header.index(name) for name in _BURSTGPT_COLUMNS)
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            time_s, name = float(line[time_at]), line[model_at]
            prompt_tokens, output_tokens = int(line[prompt_at]), int(line[output_at])
        except (ValueError, IndexError):
            bad_line(path, number, f"{','.join(line)!r} has no time or no token counts")
        if not math.isfinite(time_s) or prompt_tokens < 0 or output_tokens < 0:
            bad_line(path, number, "the time must be a number, token counts must not be negative")
        if model is None or name == model:
            yield time_s, prompt_tokens, output_tokens


def _trace_of_sizes(path: Path, rows: list[tuple[float, int, int]], skipped: int) -> Trace:
    """rows: (time in s, prompt tokens, output tokens), sorted."""
    arrivals = _arrivals(path, [time_s for time_s, _, _ in rows])
    sizes = tuple(Size(prompt_tokens, output_tokens) for _, prompt_tokens, output_tokens in rows)
    return Trace(RecordedSizes(path.stem, sizes), arrivals, skipped)


def _arrivals(path: Path, times_s: list[float]) -> RecordedArrivals:
    if not times_s:
        raise ConfigError(f"{path} has no requests")
    return RecordedArrivals(tuple(time_s - times_s[0] for time_s in times_s))


class FoundContent(NamedTuple):
    """arrivals: the recorded ones of a trace, else None.
    notes: human-readable remarks on what was left out of a file.
    """

    content: Content
    arrivals: RecordedArrivals | None = None
    notes: tuple[str, ...] = ()


def find_content(
    name: str, *, seed: int, requests: int, tokenizer: Encoder | None = None, zipf: float = 0.0
) -> FoundContent:
    """The content called `name`, one of NAMES with a path for FILE.

    requests: expected number; determines the number of groups that share prefixes, and how much
        of a file of real text is read.
    tokenizer: required for real text.
    zipf: skew of the popularity of groups.
    Raises ConfigError for other names and unusable files.
    """
    kind, colon, path = name.partition(":")
    if colon and kind in FILES:
        return _from_file(kind, Path(path), seed, requests, tokenizer)
    if name in CHATS:
        return FoundContent(rt_content(name))
    if name == "synthetic":
        return FoundContent(be_content())
    if name in SHARED_PREFIX:
        return FoundContent(preble_content(name, requests, zipf))
    if name == "multiturn":
        return FoundContent(multiturn())
    raise ConfigError(f"there is no workload {name!r}; there are {', '.join(NAMES)}")


def multiturn() -> ChatContent:
    """2 to 6 turns with the lengths of LMSYS chats, 10 s apart, with a shared system prompt."""
    sizes = RT_SIZES["lmsys"]
    return ChatContent(
        "multiturn", Uniform(2, 6), sizes.prompt, sizes.output, system_tokens=100, think_s=10.0
    )


def _from_file(
    kind: str, path: Path, seed: int, requests: int, tokenizer: Encoder | None
) -> FoundContent:
    if kind == "sharegpt":
        if tokenizer is None:
            raise ConfigError(f"sharegpt:{path} needs the model's tokenizer")
        read = read_sharegpt(path, tokenizer, seed=seed, take=max(1, requests))
        left_out = f"{path.name}: left out {read.too_short} too short, {read.too_long} too long"
        if read.without_question:
            left_out += f", {read.without_question} without an answered question"
        return FoundContent(read.content, notes=(left_out,))
    readers = {"azure": read_azure, "mooncake": read_mooncake, "burstgpt": read_burstgpt}
    trace = readers[kind](path)
    notes = (f"{path.name}: left out {trace.skipped} failed requests",) if trace.skipped else ()
    return FoundContent(trace.content, trace.arrivals, notes)
