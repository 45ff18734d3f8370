"""Workloads with shared prefixes: the five of Preble, synthesized from published statistics, and
recorded traces.

    toolbench     system | tool            | question         many questions per tool
    embodied      environment and examples | answer | observation | answer | ...   one turn each
    programming   examples | problem       | unique           several programs per problem
    video         video                    | question         more questions for longer videos
    loogle        document                 | question

Lengths follow the datasets (Preble, Table 1). Rates, numbers of requests and numbers of tools,
documents and so on are those of its experiments with two replicas (Preble 2.5).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np

from bros.core.request import ServiceClass
from bros.simulator.simulation import TOKEN
from bros.workload.arrivals import HashedArrival, generator, poisson_times, read_azure_trace
from bros.workload.lengths import ClippedLogNormal, Lengths

# ---- Requests with shared prefixes. Token ids are only generated when they are needed.
#
# parts     [ system ][ tool 17 ][ question 4711 ]       parts of one name have the same tokens
# tokens    [ 160    ][ 1400    ][ 275           ]


VOCAB = 1 << 16


class Part(NamedTuple):
    """A part of a prompt.

    name: what it contains; None for the output of an earlier request.
    """

    name: str | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """One request, without token ids.

    time_s: arrival, in seconds after the start.
    family: number of its shared prefix, which OraclePartition places it by.
    follows: index of an earlier request; this one arrives after that has ended, if time_s is
        earlier.
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
    """A source of such requests."""

    @property
    def label(self) -> str:
        """Its name in reports, such as `toolbench, 9 req/s`."""
        ...

    def requests(self, seed: int) -> Sequence[PrefixRequest]:
        """All requests, sorted by time; `follows` are indices into this list."""
        ...


def prompt_of(request: PrefixRequest, seed: int) -> array[int]:
    """The token ids of its prompt, all below VOCAB. They depend only on part names and seed."""
    prompt = array("i")
    data = b"".join(_part_bytes(part, seed) for part in request.parts)
    prompt.frombytes(np.frombuffer(data, dtype="<u2").astype(np.int32).tobytes())
    return prompt


def _part_bytes(part: Part, seed: int) -> bytes:
    if part.name is None:
        return TOKEN.to_bytes(2, "little") * part.tokens
    return hashlib.shake_128(f"{seed}/{part.name}".encode()).digest(2 * part.tokens)


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """Recorded times, of which the first is 0, scaled to `rate` requests per second on average. If
    all are 0, they stay 0."""
    own_rate = len(times) / times[-1] if times[-1] else 1.0
    return [time_s / (rate / own_rate) for time_s in times]


def classes(count: int, be_share: float, rng: random.Random) -> list[ServiceClass]:
    """Service classes of `count` requests; each is best-effort with probability be_share."""
    return [ServiceClass.BE if rng.random() < be_share else ServiceClass.RT for _ in range(count)]


EVEN, ZIPF, DATASET = POPULARITY = ("even", "zipf", "dataset")
"""How requests are spread over families: uniformly; by rank, as 1 / rank ** 1.1; or with the family
sizes of the dataset."""

_ZIPF_EXPONENT = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The statistics of one workload.

    rate, count, families: requests per second, requests and families for two replicas.
    per_family: requests per family in the dataset, mean and standard deviation.
    make: (families of the requests, rng) -> the requests, in the same order.
    weights: (number of families, rng) -> popularity of each family; None: uniform.
    lone: share of the dataset's requests that share no prefix with others.
    longest: most prompt tokens without the question, as the paper's runs cropped videos and
        documents; its table has them uncropped.
    """

    rate: float
    count: int
    families: int
    per_family: tuple[float, float]
    make: Callable[[Sequence[int], random.Random], Iterator[_Draft]]
    weights: Callable[[int, random.Random], list[float]] | None = None
    lone: float = 0.0
    longest: int | None = None


@dataclass(frozen=True, slots=True)
class _Draft:
    parts: tuple[Part, ...]
    output_tokens: int
    follows: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixWorkload:
    """A load of one kind.

    rate: requests per second, of all replicas together.
    families: number of different shared prefixes, such as tools.
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
        times = islice(poisson_times(self.rate, generator(seed, "prefix gaps")), self.count)
        service_classes = classes(self.count, self.be_share, generator(seed, "classes"))
        drafts = kind.make(families, generator(seed, "prompts"))
        longest = None if self.popularity == DATASET else kind.longest
        return [
            PrefixRequest(
                time_s=time_s,
                parts=_crop(draft.parts, longest) if longest else draft.parts,
                output_tokens=draft.output_tokens,
                family=family,
                follows=draft.follows,
                service_class=service_class,
            )
            for time_s, family, service_class, draft in zip(
                times, families, service_classes, drafts, strict=True
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
    """A workload as in the paper, scaled to a number of replicas; arguments override its values."""
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
    """The family of each request."""
    if load.popularity == DATASET:
        return _dataset_families(load, kind, rng)
    weights = [1.0] * load.families
    if load.popularity == ZIPF:
        weights = [rank**-_ZIPF_EXPONENT for rank in range(1, load.families + 1)]
    elif kind.weights is not None:
        weights = kind.weights(load.families, rng)
    return rng.choices(range(load.families), weights, k=load.count)


def _crop(parts: tuple[Part, ...], longest: int) -> tuple[Part, ...]:
    """Shorten the part before the question, so that all but the question has at most `longest`
    tokens."""
    *others, cut, last = parts
    excess = sum(part.tokens for part in (*others, cut)) - longest
    return (*others, Part(cut.name, cut.tokens - excess), last) if excess > 0 else parts


def _dataset_families(load: PrefixWorkload, kind: Kind, rng: random.Random) -> list[int]:
    mean, std = kind.per_family
    sizes = ClippedLogNormal(mean, std, 1, round(mean + 40 * std))
    found: list[int] = []
    for family in itertools.count():
        if len(found) >= load.count:
            break
        # A lone request is a family of its own, so per family it is more likely by `mean`.
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
) -> Callable[[Sequence[int], random.Random], Iterator[_Draft]]:
    """Requests that consist of their family's shared prefix and a unique question."""

    def make(families: Sequence[int], rng: random.Random) -> Iterator[_Draft]:
        known: dict[int, tuple[Part, ...]] = {}
        # Sorted, so that lengths do not depend on the order in which families first appear.
        for family in sorted(set(families)):
            known[family] = shared(family, rng)
        for number, family in enumerate(families):
            last = Part(f"question {number}", unique.draw(rng))
            yield _Draft((*known[family], last), answer.draw(rng))

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
    """A problem that is shorter than the examples has these as its key portion (Preble 3.2)."""
    lengths = _SHORT if rng.random() < _SHORT_SHARE else _LONG
    return Part("examples", _EXAMPLES_TOKENS), Part(f"problem {family}", lengths.draw(rng))


_VIDEO = ClippedLogNormal(9800.0, 5976.0, 1000, 40_000)


def _video(family: int, rng: random.Random) -> tuple[Part, ...]:
    return (Part(f"video {family}", _video_tokens(family)),)


def _video_tokens(family: int) -> int:
    """Length of a video, drawn from its number alone, because it also determines the weights."""
    return _VIDEO.draw(random.Random(f"video {family}"))


def _video_weights(families: int, rng: random.Random) -> list[float]:
    return [float(_video_tokens(family)) for family in range(families)]


_DOCUMENT = ClippedLogNormal(23_200.0, 6105.0, 4000, 45_000)


def _document(family: int, rng: random.Random) -> tuple[Part, ...]:
    return Part("system", 13), Part(f"document {family}", _DOCUMENT.draw(rng))


_ENVIRONMENT = ClippedLogNormal(1740.0, 340.0, 600, 4000)
_OBSERVATION = ClippedLogNormal(7.0, 5.0, 1, 60)
_ACTION = ClippedLogNormal(16.0, 13.0, 1, 150)


def _embodied(families: Sequence[int], rng: random.Random) -> Iterator[_Draft]:
    """Turns: each prompt is the previous prompt, its answer, and a new observation."""
    latest: dict[int, tuple[int, _Draft]] = {}
    for number, family in enumerate(families):
        before = latest.get(family)
        if before is None:
            parts: tuple[Part, ...] = (Part(f"environment {family}", _ENVIRONMENT.draw(rng)),)
        else:
            answer = Part(None, before[1].output_tokens)
            parts = (*before[1].parts, answer, Part(f"seen {number}", _OBSERVATION.draw(rng)))
        draft = _Draft(parts, _ACTION.draw(rng), before[0] if before else None)
        latest[family] = number, draft
        yield draft


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


# ---- Toolbench and video requests at recorded times (Preble's mixed workload, figure 8).
#
#     code             |  |    | ||      toolbench      arrival times of the Azure traces of 2023,
#     conversations     | |||  |   |     video          scaled to the rate
#
# The traces have no prompts, so prompts are drawn as for these two workloads.


CODE, CONVERSATIONS = "toolbench", "video"

AzureTimes = tuple[tuple[float, str], ...]
"""(seconds after the start of the trace file, workload), sorted."""


def read_azure_times(code: Path, conversations: Path) -> AzureTimes:
    """Read both trace files. Raises ConfigError naming the file and the line that is wrong."""
    times = [(row.time_s, CODE) for row in read_azure_trace(code)]
    times += [(row.time_s, CONVERSATIONS) for row in read_azure_trace(conversations)]
    return tuple(sorted(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureLoad:
    """The first `count` recorded times, scaled to `rate` requests per second on average."""

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
        service_classes = classes(len(recorded), self.be_share, generator(seed, "classes"))
        drafts = {
            name: iter(published(name, 1, count=count).requests(seed))
            for name, count in Counter(name for _, name in recorded).items()
        }
        return [
            dataclasses.replace(
                request := next(drafts[name]),
                time_s=time_s,
                family=2 * request.family + (name == CODE),
                service_class=service_class,
            )
            for time_s, (_, name), service_class in zip(
                times, recorded, service_classes, strict=True
            )
        ]


# ---- Recorded requests with their prefixes.


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeLoad:
    """The first `count` recorded requests, scaled to `rate` per second on average.

    source: name of the trace file.
    """

    source: str
    recorded: tuple[HashedArrival, ...] = field(repr=False)
    rate: float
    count: int
    be_share: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.source}, {self.rate:g} req/s"

    def requests(self, seed: int) -> list[PrefixRequest]:
        # Of one time the smallest first, as published figures have them.
        recorded = sorted(self.recorded)[: self.count]
        times = at_rate([arrival.time_s for arrival in recorded], self.rate)
        service_classes = classes(len(recorded), self.be_share, generator(seed, "classes"))
        return [
            PrefixRequest(
                time_s=time_s,
                parts=tuple(Part(f"block {block}", tokens) for block, tokens in arrival.blocks),
                output_tokens=arrival.size.output_tokens,
                family=_family(arrival),
                service_class=service_class,
            )
            for time_s, arrival, service_class in zip(times, recorded, service_classes, strict=True)
        ]


def _family(recorded: HashedArrival) -> int:
    """Its second block, as all requests share the first one."""
    return recorded.blocks[min(1, len(recorded.blocks) - 1)][0]
