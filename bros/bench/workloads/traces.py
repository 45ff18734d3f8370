"""Trace files: when requests came and how long they were, for three formats.

    Azure 2023   TIMESTAMP,ContextTokens,GeneratedTokens
    Mooncake     {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}
    BurstGPT     Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type

Times count from the first request. All readers raise ConfigError that names the file and the
line that is wrong.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bros.bench.plan import Piece
from bros.bench.workloads.arrivals import RecordedArrivals
from bros.bench.workloads.content import Conversation, Draft, Recorded
from bros.core.errors import ConfigError
from bros.simulator.traces import read_azure_trace
from bros.simulator.workload import Size

BLOCK_TOKENS = 512
"""Tokens of a prompt that one hash id of a Mooncake trace stands for."""

_BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")


@dataclass(frozen=True, slots=True)
class RecordedSizes:
    """Conversations of one request each with the lengths of a file; prompts share nothing.

    They are made as they are asked for: traces may have millions of rows.
    """

    label: str
    sizes: tuple[Size, ...] = field(repr=False)

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """In the order of the file whatever the seed is."""
        for number, (prompt_tokens, output_tokens) in enumerate(self.sizes):
            yield (Draft((Piece(f"{self.label}/{number}", prompt_tokens),), output_tokens),)


class Trace(NamedTuple):
    """A file's requests and when they came. skipped: rows that are no requests to play."""

    content: Recorded | RecordedSizes
    arrivals: RecordedArrivals
    skipped: int = 0


def read_azure(path: Path) -> Trace:
    """An Azure LLM inference trace of 2023. Prompts share nothing."""
    try:
        arrivals = read_azure_trace(path)
    except ConfigError as error:  # names a flag of the simulator
        raise ConfigError(str(error).removeprefix("--trace: ")) from None
    return _sized(path, [(time_s, *size) for time_s, size in arrivals], 0)


def read_burstgpt(path: Path, model: str | None = None) -> Trace:
    """A BurstGPT trace; other columns may stand between those it has always had.

    model: only rows of this model (`ChatGPT`, `GPT-4`). Rows without response tokens (the
    request failed) or without request tokens are skipped and counted. Prompts share nothing.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_burstgpt_rows(path, csv.reader(file), model))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    played = sorted(row for row in rows if row[1] and row[2])
    return _sized(path, played, len(rows) - len(played))


def read_mooncake(path: Path) -> Trace:
    """A Mooncake trace: every block of a prompt is a piece known by its hash id.

    Equal ids are equal text, so requests share exactly the prefixes that the file says.
    """
    found: list[tuple[float, Draft]] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found.append(_mooncake_row(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    found.sort(key=lambda row: row[0])
    arrivals = _arrivals(path, [time_s for time_s, _ in found])
    return Trace(Recorded(path.stem, tuple((draft,) for _, draft in found)), arrivals)


def _burstgpt_rows(
    path: Path, lines: Iterator[list[str]], model: str | None
) -> Iterator[tuple[float, int, int]]:
    header = [name.strip() for name in next(lines, [])]
    missing = [name for name in _BURSTGPT_COLUMNS if name not in header]
    if missing:
        _wrong(path, 1, f"there is no column {missing[0]!r} in the first line")
    time_at, model_at, prompt_at, output_at = (header.index(name) for name in _BURSTGPT_COLUMNS)
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            time_s, name = float(line[time_at]), line[model_at]
            prompt_tokens, output_tokens = int(line[prompt_at]), int(line[output_at])
        except (ValueError, IndexError):
            _wrong(path, number, f"{','.join(line)!r} has no time or no token counts")
        if not math.isfinite(time_s) or prompt_tokens < 0 or output_tokens < 0:
            _wrong(path, number, "the time must be a number, token counts must not be negative")
        if model is None or name == model:
            yield time_s, prompt_tokens, output_tokens


def _mooncake_row(path: Path, number: int, line: str) -> tuple[float, Draft]:
    try:
        row = json.loads(line)
    except ValueError as error:
        _wrong(path, number, f"not JSON: {error}")
    if not isinstance(row, dict):
        _wrong(path, number, "not a JSON object")
    time_ms: Any = row.get("timestamp")
    if type(time_ms) not in (int, float) or not math.isfinite(time_ms):
        _wrong(path, number, "timestamp must be a number of milliseconds")
    counts: list[Any] = [row.get("input_length"), row.get("output_length")]
    if any(type(count) is not int or count < 1 for count in counts):
        _wrong(path, number, "input_length and output_length must be token counts of at least 1")
    ids: Any = row.get("hash_ids")
    if not isinstance(ids, list) or any(type(hash_id) is not int for hash_id in ids):
        _wrong(path, number, "hash_ids must be a list of whole numbers")
    prompt_tokens, output_tokens = counts
    if len(ids) != -(-prompt_tokens // BLOCK_TOKENS):
        _wrong(
            path,
            number,
            f"{len(ids)} hash_ids for {prompt_tokens} tokens: each stands for {BLOCK_TOKENS}, "
            "the last one for the rest",
        )
    prompt = tuple(
        Piece(f"{path.stem}/{hash_id}", min(BLOCK_TOKENS, prompt_tokens - k * BLOCK_TOKENS))
        for k, hash_id in enumerate(ids)
    )
    return time_ms / 1000, Draft(prompt, output_tokens)


def _sized(path: Path, rows: list[tuple[float, int, int]], skipped: int) -> Trace:
    """rows: time, prompt tokens and output tokens, sorted."""
    arrivals = _arrivals(path, [time_s for time_s, _, _ in rows])
    sizes = tuple(Size(prompt_tokens, output_tokens) for _, prompt_tokens, output_tokens in rows)
    return Trace(RecordedSizes(path.stem, sizes), arrivals, skipped)


def _arrivals(path: Path, times_s: list[float]) -> RecordedArrivals:
    if not times_s:
        raise ConfigError(f"{path} has no requests")
    return RecordedArrivals(tuple(time_s - times_s[0] for time_s in times_s))


def _wrong(path: Path, line: int, why: str) -> NoReturn:
    raise ConfigError(f"{path}:{line}: {why}")
