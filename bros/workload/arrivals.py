"""Arrival times and token counts of requests: seeded, and the same for every policy.

Real-time requests arrive in an open loop (a Poisson process or a recorded trace), best-effort
requests in a closed loop: a fixed number is in flight, and the next one arrives when one (or the
whole batch) has finished. Each kind draws from its own generators, seeded by name, so the k-th
request is always the same; another rate only stretches the gaps between the same requests.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from bros.core.errors import ConfigError
from bros.workload.lengths import ClippedLogNormal, Lengths, Uniform


class Size(NamedTuple):
    """Token counts of one request; it generates exactly output_tokens."""

    prompt_tokens: int
    output_tokens: int


class Arrival(NamedTuple):
    """A request that arrives time_s seconds after the start."""

    time_s: float
    size: Size


@dataclass(frozen=True, slots=True)
class RequestSizes:
    """Prompt and output lengths, drawn independently of each other."""

    prompt: Lengths
    output: Lengths

    @property
    def longest(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self.prompt.high + self.output.high

    def stream(self, rng: random.Random) -> Iterator[Size]:
        while True:
            yield Size(self.prompt.draw(rng), self.output.draw(rng))


RT_SIZES = {
    "lmsys": RequestSizes(
        ClippedLogNormal(90.50, 148.52, 4, 1024), ClippedLogNormal(237.04, 228.21, 1, 1024)
    ),
    "sharegpt": RequestSizes(
        ClippedLogNormal(222.76, 256.36, 4, 1024), ClippedLogNormal(234.51, 268.50, 1, 1024)
    ),
}
"""Chats with the means and standard deviations of the BROS paper (Table 2), clipped to prompts of 4
to 1024 and outputs of 1 to 1024 tokens, so that a request fits a context of 2048."""

BE_SIZES = RequestSizes(Uniform(512, 1024), Uniform(32, 128))
"""Best-effort requests of the same table."""


class RtLoad(Protocol):
    """A source of real-time requests."""

    @property
    def label(self) -> str:
        """For reports, e.g. `4 req/s`."""
        ...

    def arrivals(self, duration_s: float, seed: int) -> Sequence[Arrival]:
        """Everything that arrives before `duration_s`, sorted by time."""
        ...


@dataclass(frozen=True, slots=True)
class PoissonLoad:
    """`rate` requests per second on average, with independent gaps.

    sizes: key of RT_SIZES.
    """

    rate: float
    sizes: str

    @property
    def label(self) -> str:
        return f"{self.rate:g} req/s"

    def arrivals(self, duration_s: float, seed: int) -> list[Arrival]:
        found: list[Arrival] = []
        if self.rate <= 0:
            return found
        gaps = generator(seed, "rt gaps")
        sizes = RT_SIZES[self.sizes].stream(generator(seed, "rt sizes"))
        for time_s in poisson_times(self.rate, gaps):
            if time_s >= duration_s:
                break
            found.append(Arrival(time_s, next(sizes)))
        return found


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Recorded arrivals, replayed `speed` times as fast.

    source: the file's name.
    """

    source: str
    recorded: tuple[Arrival, ...] = field(repr=False)
    speed: float = 1.0

    @property
    def label(self) -> str:
        return self.source if self.speed == 1.0 else f"{self.source} x{self.speed:g}"

    def arrivals(self, duration_s: float, seed: int) -> list[Arrival]:
        played = (Arrival(a.time_s / self.speed, a.size) for a in self.recorded)
        return [arrival for arrival in played if arrival.time_s < duration_s]


@dataclass(frozen=True, slots=True)
class BeLoad:
    """A closed loop of `in_flight` best-effort requests; 0 is none.

    batches: the next `in_flight` requests arrive together when all of the last ones have finished,
        instead of one whenever one finishes.
    """

    in_flight: int
    batches: bool = False
    sizes: RequestSizes = BE_SIZES


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """The load of one tenant beside others."""

    tenant: str
    rt: RtLoad
    be: BeLoad


def tenant_seed(tenant: str, seed: int) -> int:
    """Seed of a tenant's generators in a run with this seed; that of the run without tenants."""
    return generator(seed, f"tenant {tenant}").getrandbits(32) if tenant else seed


def generator(seed: int, purpose: str) -> random.Random:
    """A separate generator per purpose, the same on every machine and in every run."""
    return random.Random(f"bros/{seed}/{purpose}")


def poisson_times(rate: float, gaps: random.Random) -> Iterator[float]:
    """Arrival times in seconds, without end, `rate` per second on average. The first one is after a
    gap, too. Another rate only stretches the gaps."""
    time_s = 0.0
    while True:
        time_s += gaps.expovariate(1.0) / rate
        yield time_s


# ---- Recorded arrivals: CSV files with the columns of the Azure LLM inference traces of 2023.
#
#     TIMESTAMP,ContextTokens,GeneratedTokens
#     2023-11-16 18:15:46.6805900,374,44
#
# Times count from the first row. Fractions of a second may have any number of digits.


COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure_trace(path: Path) -> tuple[Arrival, ...]:
    """All rows, sorted by time. Raises ConfigError naming the file and the line that is wrong."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(_rows(path, csv.reader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not rows:
        raise ConfigError(f"{path} has no requests")
    first = min(time_s for time_s, _ in rows)
    return tuple(sorted(Arrival(time_s - first, size) for time_s, size in rows))


def _rows(path: Path, lines: Iterator[list[str]]) -> Iterator[tuple[float, Size]]:
    header = next(lines, [])
    if tuple(header) != COLUMNS:
        bad_line(path, 1, f"the first line must be {','.join(COLUMNS)}")
    origin: datetime | None = None
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        try:
            stamp, prompt, output = line
            moment, fraction = _parse_time(stamp)
            size = Size(int(prompt), int(output))
        except ValueError:
            bad_line(path, number, f"{','.join(line)!r} is not a time and two token counts")
        if size.prompt_tokens < 1 or size.output_tokens < 1:
            bad_line(path, number, "token counts must be at least 1")
        origin = origin or moment
        yield (moment - origin).total_seconds() + fraction, size


def _parse_time(stamp: str) -> tuple[datetime, float]:
    """The whole second, and the fraction, which may have more digits than datetime supports."""
    whole, _, digits = stamp.partition(".")
    if digits and not digits.isdecimal():
        raise ValueError(stamp)
    return datetime.strptime(whole, "%Y-%m-%d %H:%M:%S"), float(f"0.{digits or 0}")


# ---- Mooncake traces: JSON lines of requests with the hashes of their blocks.
#
#     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, ...]}
#
# timestamp is in milliseconds after the start, lengths are in tokens. There is one hash id per
# block of BLOCK_TOKENS prompt tokens; equal ids mean equal blocks after equal prefixes. The last
# block may be shorter.


BLOCK_TOKENS = 512
"""Prompt tokens per hash id of a Mooncake trace."""

_MAX_MS = 1e15  # no trace is that long


class HashedArrival(NamedTuple):
    """A request of a Mooncake trace, time_s seconds after the first one.

    blocks: (hash id, tokens) of each block of the prompt.
    """

    time_s: float
    size: Size
    blocks: tuple[tuple[int, int], ...]


def read_mooncake_trace(path: Path) -> tuple[HashedArrival, ...]:
    """All lines, sorted by time; those of one time in the order of the file. Raises ConfigError
    naming the file and the line that is wrong."""
    found: list[HashedArrival] = []
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    found.append(_hashed_arrival(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not found:
        raise ConfigError(f"{path} has no requests")
    found.sort(key=lambda arrival: arrival.time_s)
    first_s = found[0].time_s
    return tuple(arrival._replace(time_s=arrival.time_s - first_s) for arrival in found)


def _hashed_arrival(path: Path, number: int, line: str) -> HashedArrival:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        bad_line(path, number, f"not JSON: {error}")
    if not isinstance(row, dict):
        bad_line(path, number, "not a JSON object")
    time_ms: Any = row.get("timestamp")
    if type(time_ms) not in (int, float) or not 0 <= time_ms < _MAX_MS:
        bad_line(path, number, "timestamp must be a number of milliseconds, not negative")
    counts: list[Any] = [row.get("input_length"), row.get("output_length")]
    if any(type(count) is not int or count < 1 for count in counts):
        bad_line(path, number, "input_length and output_length must be token counts of at least 1")
    ids: Any = row.get("hash_ids")
    if not isinstance(ids, list) or any(type(hash_id) is not int for hash_id in ids):
        bad_line(path, number, "hash_ids must be a list of whole numbers")
    size = Size(*counts)
    if len(ids) != -(-size.prompt_tokens // BLOCK_TOKENS):
        bad_line(
            path,
            number,
            f"{len(ids)} hash_ids for {size.prompt_tokens} tokens: each stands for "
            f"{BLOCK_TOKENS}, the last one for the rest",
        )
    blocks = tuple(
        (hash_id, min(BLOCK_TOKENS, size.prompt_tokens - k * BLOCK_TOKENS))
        for k, hash_id in enumerate(ids)
    )
    return HashedArrival(time_ms / 1000, size, blocks)


def bad_line(path: Path, number: int, what: str) -> NoReturn:
    """Raises ConfigError for a line of a file."""
    raise ConfigError(f"{path}:{number}: {what}") from None
