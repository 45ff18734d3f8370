"""Recorded requests with their prefixes: JSON lines as in the Mooncake traces.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, ...]}

Milliseconds after the start, tokens, and one id per block of 512 tokens of the prompt, of which
equal ones hold the same tokens after the same tokens. The last block may be shorter.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bros.core.errors import ConfigError
from bros.simulator.prefix_requests import Part, PrefixRequest, at_rate, classes
from bros.simulator.workload import generator

BLOCK_TOKENS = 512


class TraceLine(NamedTuple):
    """A request as recorded."""

    time_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeLoad:
    """The first `count` recorded requests, at `rate` per second on average instead of their own.

    source: the file's name.
    """

    source: str
    recorded: tuple[TraceLine, ...] = field(repr=False)
    rate: float
    count: int
    be_share: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.source}, {self.rate:g} req/s"

    def requests(self, seed: int) -> list[PrefixRequest]:
        lines = self.recorded[: self.count]
        times = at_rate([line.time_s for line in lines], self.rate)
        served = classes(len(lines), self.be_share, generator(seed, "classes"))
        return [
            PrefixRequest(
                time_s=time_s,
                parts=_parts(line),
                output_tokens=line.output_tokens,
                family=_family(line),
                service_class=service_class,
            )
            for time_s, line, service_class in zip(times, lines, served, strict=True)
        ]


def read_mooncake_trace(path: Path) -> tuple[TraceLine, ...]:
    """All lines, sorted by time. Raises ConfigError naming the file and the line that is wrong."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = sorted(_lines(path, file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace: {path} cannot be read: {error}") from None
    if not lines:
        raise ConfigError(f"--trace: {path} has no requests")
    first_s = lines[0].time_s
    return tuple(line._replace(time_s=line.time_s - first_s) for line in lines)


def _lines(path: Path, texts: Iterator[str]) -> Iterator[TraceLine]:
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        try:
            yield _line(json.loads(text))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--trace: {path}, line {number}: {error!r}") from None


def _line(content: dict[str, Any]) -> TraceLine:
    blocks = tuple(int(block) for block in content["hash_ids"])
    prompt_tokens, output_tokens = int(content["input_length"]), int(content["output_length"])
    if prompt_tokens < 1 or output_tokens < 1 or content["timestamp"] < 0:
        raise ValueError("lengths must be positive, and times not negative")
    if len(blocks) != -(-prompt_tokens // BLOCK_TOKENS):
        raise ValueError(f"{len(blocks)} hash_ids are not {prompt_tokens} tokens")
    return TraceLine(content["timestamp"] / 1e3, prompt_tokens, output_tokens, blocks)


def _parts(line: TraceLine) -> tuple[Part, ...]:
    full = [Part(f"block {block}", BLOCK_TOKENS) for block in line.blocks[:-1]]
    rest = line.prompt_tokens - BLOCK_TOKENS * len(full)
    return (*full, Part(f"block {line.blocks[-1]}", rest))


def _family(line: TraceLine) -> int:
    """What follows the beginning that all have in common."""
    return line.blocks[min(1, len(line.blocks) - 1)]
