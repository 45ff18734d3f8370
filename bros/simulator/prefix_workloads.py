"""The five workloads that Preble was measured on, drawn anew to their published statistics.

    toolbench     system | tool            | question         many questions per tool
    embodied      environment and examples | answer | seen | answer | seen ...     one turn each
    programming   examples | problem       | unique           several programs per problem
    video         video                    | question         more questions for longer videos
    loogle        document                 | question

Lengths are those of the datasets (Preble, Table 1). How many requests come how fast, from how many
tools, documents and so on is what its experiments had for two replicas (spec: Preble 2.5).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from bros.core.errors import ConfigError
from bros.core.request import ServiceClass
from bros.simulator.simulation import TOKEN
from bros.workload.arrivals import generator, read_azure_trace
from bros.workload.lengths import ClippedLogNormal, Lengths

# ---- Requests whose prompts have beginnings in common: recipes now, tokens when they are needed.
#
# parts     [ system ][ tool 17 ][ question 4711 ]       parts of one name hold the same tokens
# tokens    [ 160    ][ 1400    ][ 275           ]


VOCAB = 1 << 16


class Part(NamedTuple):
    """A piece of a prompt.

    name: what it holds; None is an answer that has been given before.
    """

    name: str | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """One request, yet without tokens.

    time_s: when it comes, in seconds after the start, or when it would if `follows`, the number of
        a request before it, has not ended by then: it comes after that.
    family: what a partition that knows the workload goes by.
    """

    time_s: float
    parts: tuple[Part, ...]
    output_tokens: int
    family: int
    follows: int | None = None
    service_class: ServiceClass = ServiceClass.RT

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


class PrefixLoad(Protocol):
    """Where such requests come from."""

    @property
    def label(self) -> str:
        """For people, e.g. `toolbench, 9 req/s`."""
        ...

    def requests(self, seed: int) -> Sequence[PrefixRequest]:
        """All of them, sorted by time; `follows` are places in this order."""
        ...


def prompt_of(request: PrefixRequest, seed: int) -> array[int]:
    """Its tokens, below VOCAB; the same in every process."""
    prompt = array("i")
    drawn = b"".join(_drawn(part, seed) for part in request.parts)
    prompt.frombytes(np.frombuffer(drawn, dtype="<u2").astype(np.int32).tobytes())
    return prompt


def _drawn(part: Part, seed: int) -> bytes:
    if part.name is None:
        return TOKEN.to_bytes(2, "little") * part.tokens
    return hashlib.shake_128(f"{seed}/{part.name}".encode()).digest(2 * part.tokens)


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """Recorded times, of which the first is 0, so that on average so many come per second; their
    own rate is taken to be 1 if they came all at once."""
    own_rate = len(times) / times[-1] if times[-1] else 1.0
    return [time_s / (rate / own_rate) for time_s in times]


def classes(count: int, be_share: float, rng: random.Random) -> list[ServiceClass]:
    """Of so many requests, in their order; each is best-effort with that probability."""
    return [ServiceClass.BE if rng.random() < be_share else ServiceClass.RT for _ in range(count)]


def poisson_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """So many arrivals; at another rate their gaps are stretched."""
    times, time_s = [], 0.0
    for _ in range(count):
        time_s += rng.expovariate(1.0) / rate
        times.append(time_s)
    return times


EVEN, ZIPF, DATASET = POPULARITY = ("even", "zipf", "dataset")
"""Which families requests belong to: each is as likely; by rank, as 1 / rank ** 1.1; or as many to
each as in the dataset."""

_ZIPF_EXPONENT = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a workload is like, and how much of it two replicas get.

    per_family: requests of a family in the dataset, mean and deviation.
    lone: share of requests in the dataset with a family of their own.
    longest: what videos and documents were cropped to in the paper's runs; its table has them
        whole.
    make: the requests' families, in their order -> parts and output tokens of each, and which one
        each follows.
    """

    rate: float
    count: int
    families: int
    per_family: tuple[float, float]
    make: Callable[[Sequence[int], random.Random], Iterator[_Made]]
    weights: Callable[[int, random.Random], list[float]] | None = None
    lone: float = 0.0
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class _Made:
    parts: tuple[Part, ...]
    output_tokens: int
    follows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWorkload:
    """Requests of one kind.

    rate: per second, of all replicas together.
    families: tools, say.
    """

    name: str
    rate: float
    count: int
    families: int
    popularity: str = EVEN
    be_share: float = 0.0

    @property
    def label(self) -> str:
        spread = "" if self.popularity == EVEN else f" ({self.popularity})"
        return f"{self.name}{spread}, {self.rate:g} req/s"

    def requests(self, seed: int) -> list[PrefixRequest]:
        kind = KINDS[self.name]
        families = _families(self, kind, generator(seed, "families"))
        times = poisson_times(self.count, self.rate, generator(seed, "prefix gaps"))
        served = classes(self.count, self.be_share, generator(seed, "classes"))
        made = kind.make(families, generator(seed, "prompts"))
        longest = None if self.popularity == DATASET else kind.longest
        return [
            PrefixRequest(
                time_s=time_s,
                parts=_cropped(each.parts, longest) if longest else each.parts,
                output_tokens=each.output_tokens,
                family=family,
                follows=each.follows,
                service_class=service_class,
            )
            for time_s, family, service_class, each in zip(
                times, families, served, made, strict=True
            )
        ]


def published(
    name: str,
    replicas: int,
    *,
    rate: float | None = None,
    count: int | None = None,
    families: int | None = None,
    popularity: str = EVEN,
    be_share: float = 0.0,
) -> PrefixWorkload:
    """As much of a workload as so many replicas got in the paper, but for what is given."""
    kind = KINDS[name]
    count = count or max(1, kind.count * replicas // 2)
    per_family = kind.count / kind.families
    return PrefixWorkload(
        name=name,
        rate=rate or kind.rate * replicas / 2,
        count=count,
        families=families or max(1, round(count / per_family)),
        popularity=popularity,
        be_share=be_share,
    )


def _families(load: PrefixWorkload, kind: Kind, rng: random.Random) -> list[int]:
    """Of each request, in their order."""
    if load.popularity == DATASET:
        return _as_in_dataset(load, kind, rng)
    weights = [1.0] * load.families
    if load.popularity == ZIPF:
        weights = [rank**-_ZIPF_EXPONENT for rank in range(1, load.families + 1)]
    elif kind.weights is not None:
        weights = kind.weights(load.families, rng)
    return rng.choices(range(load.families), weights, k=load.count)


def _cropped(parts: tuple[Part, ...], longest: int) -> tuple[Part, ...]:
    """All but the question, which is the last one, are `longest` tokens at most."""
    *others, cut, last = parts
    excess = sum(part.tokens for part in (*others, cut)) - longest
    return (*others, Part(cut.name, cut.tokens - excess), last) if excess > 0 else parts


def _as_in_dataset(load: PrefixWorkload, kind: Kind, rng: random.Random) -> list[int]:
    mean, std = kind.per_family
    sizes = ClippedLogNormal(mean, std, 1, round(mean + 40 * std))
    found: list[int] = []
    for family in itertools.count():
        if len(found) >= load.count:
            break
        # A lone one for every so many requests of the others.
        alone = rng.random() < kind.lone * mean / (kind.lone * mean + 1 - kind.lone)
        found += [family] * (1 if alone else max(2, sizes.draw(rng)))
    del found[load.count :]
    rng.shuffle(found)
    return found


def _questions(
    *,
    shared: Callable[[int, random.Random], tuple[Part, ...]],
    unique: Lengths,
    answer: Lengths,
) -> Callable[[Sequence[int], random.Random], Iterator[_Made]]:
    """Requests of a family begin alike and end with something that no other one has."""

    def make(families: Sequence[int], rng: random.Random) -> Iterator[_Made]:
        known: dict[int, tuple[Part, ...]] = {}
        # Families have the same lengths whichever of them comes first.
        for family in sorted(set(families)):
            known[family] = shared(family, rng)
        for number, family in enumerate(families):
            last = Part(f"question {number}", unique.draw(rng))
            yield _Made((*known[family], last), answer.draw(rng))

    return make


_SYSTEM_TOKENS = 160
_TOOL = ClippedLogNormal(1410.0, 690.0, 200, 6000)


def _tool(family: int, rng: random.Random) -> tuple[Part, ...]:
    return Part("system", _SYSTEM_TOKENS), Part(f"tool {family}", _TOOL.draw(rng))


_EXAMPLES_TOKENS = 2400
_SHORT_SHARE = 0.6
_SHORT = ClippedLogNormal(300.0, 250.0, 30, _EXAMPLES_TOKENS)
_LONG = ClippedLogNormal(3250.0, 1100.0, _EXAMPLES_TOKENS + 1, 12_000)


def _problem(family: int, rng: random.Random) -> tuple[Part, ...]:
    """The examples are the key portion of short problems, and not of long ones."""
    lengths = _SHORT if rng.random() < _SHORT_SHARE else _LONG
    return Part("examples", _EXAMPLES_TOKENS), Part(f"problem {family}", lengths.draw(rng))


_VIDEO = ClippedLogNormal(9800.0, 5976.0, 1000, 40_000)


def _video(family: int, rng: random.Random) -> tuple[Part, ...]:
    return (Part(f"video {family}", _video_tokens(family)),)


def _video_tokens(family: int) -> int:
    """A property of the video, so that it can be told before any question is."""
    return _VIDEO.draw(random.Random(f"video {family}"))


def _video_weights(families: int, rng: random.Random) -> list[float]:
    return [float(_video_tokens(family)) for family in range(families)]


_DOCUMENT = ClippedLogNormal(23_200.0, 6105.0, 4000, 45_000)


def _document(family: int, rng: random.Random) -> tuple[Part, ...]:
    return Part("system", 13), Part(f"document {family}", _DOCUMENT.draw(rng))


_ENVIRONMENT = ClippedLogNormal(1740.0, 340.0, 600, 4000)
_SEEN = ClippedLogNormal(7.0, 5.0, 1, 60)
_ACTION = ClippedLogNormal(16.0, 13.0, 1, 150)


def _embodied(families: Sequence[int], rng: random.Random) -> Iterator[_Made]:
    """Each turn begins with the one before, its answer, and what is seen then."""
    latest: dict[int, tuple[int, _Made]] = {}
    for number, family in enumerate(families):
        before = latest.get(family)
        if before is None:
            parts: tuple[Part, ...] = (Part(f"environment {family}", _ENVIRONMENT.draw(rng)),)
        else:
            answer = Part(None, before[1].output_tokens)
            parts = (*before[1].parts, answer, Part(f"seen {number}", _SEEN.draw(rng)))
        made = _Made(parts, _ACTION.draw(rng), before[0] if before else None)
        latest[family] = number, made
        yield made


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "toolbench": Kind(
            rate=9.0,
            count=2700,
            families=200,
            per_family=(39.0, 64.0),
            make=_questions(
                shared=_tool,
                unique=ClippedLogNormal(265.0, 150.0, 20, 2000),
                answer=ClippedLogNormal(43.0, 16.0, 1, 200),
            ),
        ),
        "embodied": Kind(
            rate=15.0, count=3600, families=200, per_family=(48.0, 8.0), make=_embodied
        ),
        "programming": Kind(
            rate=4.5,
            count=2812,
            families=160,
            per_family=(50.0, 20.0),
            make=_questions(
                shared=_problem,
                unique=ClippedLogNormal(75.0, 20.0, 20, 200),
                answer=ClippedLogNormal(190.0, 343.0, 1, 4000),
            ),
        ),
        "video": Kind(
            rate=3.0,
            count=900,
            families=125,
            per_family=(8.6, 2.0),
            make=_questions(
                shared=_video,
                unique=ClippedLogNormal(65.0, 10.0, 30, 120),
                answer=ClippedLogNormal(4.0, 1.5, 1, 12),
            ),
            weights=_video_weights,
            lone=0.12,
            longest=8192,
        ),
        "loogle": Kind(
            rate=0.6,
            count=336,
            families=24,
            per_family=(18.0, 8.6),
            make=_questions(
                shared=_document,
                unique=ClippedLogNormal(260.0, 100.0, 30, 1000),
                answer=ClippedLogNormal(16.0, 9.9, 1, 45),
            ),
            lone=0.08,
            longest=32_768 - 45,
        ),
    }
)


# ---- Tools and videos at recorded times (Preble's mixed workload, figure 8).
#
#     code             |  |    | ||      toolbench      at the times of the Azure traces of 2023,
#     all
#     conversations     | |||  |   |     video          nearer together or further apart
#
# What people asked has not been published, so prompts are drawn as for these two workloads.


CODE, CONVERSATIONS = "toolbench", "video"

AzureTimes = tuple[tuple[float, str], ...]
"""(seconds after the start of its file, workload), sorted."""


def read_azure_times(code: Path, conversations: Path) -> AzureTimes:
    """Of both files. Raises ConfigError naming the file and the line that is wrong."""
    times = [(row.time_s, CODE) for row in read_azure_trace(code)]
    times += [(row.time_s, CONVERSATIONS) for row in read_azure_trace(conversations)]
    return tuple(sorted(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureLoad:
    """The first `count` recorded times, at `rate` per second on average instead of their own."""

    recorded: AzureTimes = field(repr=False)
    rate: float
    count: int
    be_share: float = 0.0

    @property
    def label(self) -> str:
        return f"azure, {self.rate:g} req/s"

    def requests(self, seed: int) -> list[PrefixRequest]:
        recorded = self.recorded[: self.count]
        times = at_rate([time_s for time_s, _ in recorded], self.rate)
        served = classes(len(recorded), self.be_share, generator(seed, "classes"))
        made = {
            name: iter(published(name, 1, count=count).requests(seed))
            for name, count in Counter(name for _, name in recorded).items()
        }
        return [
            dataclasses.replace(
                request := next(made[name]),
                time_s=time_s,
                family=2 * request.family + (name == CODE),
                service_class=service_class,
            )
            for time_s, (_, name), service_class in zip(times, recorded, served, strict=True)
        ]


# ---- Recorded requests with their prefixes: JSON lines as in the Mooncake traces.
#
#     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 46, 47, ...]}
#
# Milliseconds after the start, tokens, and one id per block of 512 tokens of the prompt, of which
# equal ones hold the same tokens after the same tokens. The last block may be shorter.


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
