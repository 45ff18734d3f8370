"""Contents (what is requested), arrivals (when), and the loops that combine them into a load."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from bros.bench.plan import Piece, Planned, Session, SessionRequest
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.workload.arrivals import BE_SIZES, RT_SIZES, RequestSizes, generator
from bros.workload.lengths import ClippedLogNormal, Lengths


class Draft(NamedTuple):
    """A request without a name, a class and objectives.

    think_s: seconds between the end of the previous response and this request.
    """

    prompt: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0


Conversation = tuple[Draft, ...]
"""Consecutive requests of one user, at least one."""


class Content(Protocol):
    """A source of conversations."""

    @property
    def label(self) -> str:
        """Human-readable, e.g. `lmsys`."""
        ...

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """At least one, possibly endless. The k-th one depends on the seed alone."""
        ...


@runtime_checkable
class WithTexts(Protocol):
    """A content or a loop with pieces of real text."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Key of a piece -> its text. Pieces with other keys are synthetic (prompts.py)."""
        ...


def texts_of(*sources: object) -> dict[str, str]:
    """The texts of all sources that have any, for prompts.Prompts."""
    found: dict[str, str] = {}
    for source in sources:
        if isinstance(source, WithTexts):
            found.update(source.texts)
    return found


@dataclass(frozen=True, slots=True)
class RecordedContent:
    """Conversations read from a file, in its order for every seed."""

    label: str
    recorded: tuple[Conversation, ...] = field(repr=False)
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    def conversations(self, seed: int) -> Iterator[Conversation]:
        return iter(self.recorded)


def endless(content: Content, seed: int, owner: str) -> Iterator[Conversation]:
    """The conversations of a content, repeated in rounds.

    Synthetic text differs between owners and rounds, so that a server's prefix cache has no hits
    across them. Prefixes that conversations share in one round are shared in every round.
    """
    texts = texts_of(content)
    for round_number in itertools.count():
        prefix = f"{owner}{round_number}/" if round_number else f"{owner}/"
        for conversation in content.conversations(seed):
            yield tuple(_with_key_prefix(draft, prefix, texts) for draft in conversation)


def _with_key_prefix(draft: Draft, prefix: str, texts: Mapping[str, str]) -> Draft:
    prompt = tuple(
        piece if piece.key in texts else piece._replace(key=prefix + piece.key)
        for piece in draft.prompt
    )
    return draft._replace(prompt=prompt)


def cut(prompt: tuple[Piece, ...], tokens: int) -> tuple[Piece, ...]:
    """The first `tokens` tokens of a prompt, so that shared prefixes are kept."""
    kept: list[Piece] = []
    left = tokens
    for piece in prompt:
        if left <= 0:
            break
        kept.append(piece._replace(tokens=min(piece.tokens, left)))
        left -= piece.tokens
    return tuple(kept)


# ---- Chats of several turns. A prompt is the previous one, its response and the next user message.
#
#     turn 0   | system | user 0 |
#     turn 1   | system | user 0 | answer 0 | user 1 |
#     turn 2   | system | user 0 | answer 0 | user 1 | answer 1 | user 2 |
#
# The responses within prompts are synthetic text of the planned length, because the plan is made
# before the run: a server's prefix cache hits on earlier prompts, not on its own output.


_DIGITS = 6


@dataclass(frozen=True, slots=True)
class ChatContent:
    """Conversations of several turns.

    turns: number of turns.
    user, answer: tokens of a user message and of a response.
    system_tokens: of a system prompt that all conversations share.
    think_s: mean of the exponentially distributed time between a response and the next turn.
    Raises ConfigError if system_tokens or think_s is negative.
    """

    label: str
    turns: Lengths
    user: Lengths
    answer: Lengths
    system_tokens: int = 0
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.system_tokens < 0 or self.think_s < 0:
            raise ConfigError(f"{self.label}: system_tokens and think_s must not be negative")

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Endless."""
        rng = generator(seed, f"{self.label} chats")
        for number in itertools.count():
            yield tuple(self._drafts(f"{self.label}/{number}", rng))

    def _drafts(self, key: str, rng: random.Random) -> Iterator[Draft]:
        prompt: tuple[Piece, ...] = ()
        if self.system_tokens:
            prompt = (Piece(f"{self.label}/system", self.system_tokens),)
        for turn in range(max(1, self.turns.draw(rng))):
            prompt = (*prompt, Piece(f"{key}/user {turn}", self.user.draw(rng)))
            answer_tokens = self.answer.draw(rng)
            yield Draft(prompt, answer_tokens, self._pause(rng) if turn else 0.0)
            prompt = (*prompt, Piece(f"{key}/answer {turn}", answer_tokens))

    def _pause(self, rng: random.Random) -> float:
        return round(rng.expovariate(1.0) * self.think_s, _DIGITS)


# ---- Conversations of one request each with random lengths and no shared prefixes.


@dataclass(frozen=True, slots=True)
class SampledContent:
    """Prompt and output lengths from a distribution.

    purpose: name of the random stream; with "rt" and "be" the lengths equal the simulator's.
    """

    label: str
    sizes: RequestSizes
    purpose: str = "rt"

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Endless."""
        sizes = self.sizes.stream(generator(seed, f"{self.purpose} sizes"))
        for number in itertools.count():
            prompt_tokens, output_tokens = next(sizes)
            key = f"{self.label}/{number}"
            yield (Draft((Piece(key, prompt_tokens),), output_tokens),)


def rt_content(name: str) -> SampledContent:
    """A row of BROS Table 2: `lmsys` or `sharegpt`. Raises KeyError for others."""
    return SampledContent(name, RT_SIZES[name])


def be_content() -> SampledContent:
    """The best-effort requests of BROS: prompts U[512, 1024], outputs U[32, 128]."""
    return SampledContent("synthetic", BE_SIZES, "be")


# ---- Prompts with shared prefixes: synthetic workloads with the statistics of Preble's Table 1.
#
#     | common to all |  of the group (key portion)  |  of this request  |
#     |<-------------- shared prefix -------------->|
#
# Preble gives the mean and deviation of prompt and output lengths, the fraction of the prompt that
# is shared with other requests, the fraction of the key portion (the node of the prefix tree that
# is longer than all nodes before it), and the number of requests that share one. We read the key
# portion's fraction as relative to the shared prefix: relative to the prompt it would exceed the
# shared part in two of the five rows. The rest of the shared prefix is common to all requests, like
# the instructions of an application.


_TAIL = 8.0
"""Lengths are clipped this many standard deviations above their mean."""


class Moments(NamedTuple):
    """Mean and standard deviation in tokens."""

    mean: float
    std: float

    def at_least(self, low: int) -> ClippedLogNormal:
        """A distribution with these moments and the minimum `low`."""
        return ClippedLogNormal(self.mean, self.std, low, round(self.mean + _TAIL * self.std))


class DatasetSizes(NamedTuple):
    """A row of Preble's Table 1.

    shared: fraction of the prompt that is shared with other requests.
    key: fraction of the shared prefix that is the key portion.
    """

    prompt: Moments
    output: Moments
    shared: float
    key: float
    requests_per_key: float


TABLE_1 = {
    "toolbench": DatasetSizes(Moments(1835, 742), Moments(43, 16), 0.85, 0.76, 39),
    "embodied": DatasetSizes(Moments(2285, 471), Moments(16, 13), 0.97, 0.76, 48),
    "programming": DatasetSizes(Moments(3871, 1656), Moments(190, 343), 0.97, 0.78, 126),
    "video": DatasetSizes(Moments(9865, 5976), Moments(4, 1.5), 0.88, 0.99, 8.6),
    "loogle": DatasetSizes(Moments(23474, 6105), Moments(16, 9.9), 0.91, 0.94, 18),
}


@dataclass(frozen=True, slots=True)
class SharedPrefixContent:
    """Requests of `groups` groups; the requests of a group share a prefix.

    zipf: group k (from 1) is chosen with a probability proportional to k ** -zipf; 0: uniformly.
    A group has one length of the shared prefix, so the mean over few groups may be far from the
    row's. Raises ConfigError if there is no group or zipf is negative.
    """

    label: str
    row: DatasetSizes
    groups: int
    zipf: float = 0.0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"{self.label} needs at least 1 group, not {self.groups}")
        if not 0 <= self.zipf < float("inf"):
            raise ConfigError(f"the exponent of a Zipf distribution cannot be {self.zipf}")

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Endless."""
        common = Piece(f"{self.label}/common", self._common_tokens)
        keys = self._key_portions(seed)
        weights = [(k + 1) ** -self.zipf for k in range(self.groups)]
        picks = list(itertools.accumulate(weights))
        rng = generator(seed, f"{self.label} requests")
        rests = self._rest.at_least(1)
        outputs = self.row.output.at_least(1)
        for number in itertools.count():
            [key] = rng.choices(keys, cum_weights=picks)
            rest = Piece(f"{self.label}/{number}", rests.draw(rng))
            yield (Draft((common, key, rest), outputs.draw(rng)),)

    def _key_portions(self, seed: int) -> list[Piece]:
        rng = generator(seed, f"{self.label} groups")
        common = self._common_tokens
        # Longer than everything before it, as Preble defines the key portion.
        lengths = self._prefix.at_least(2 * common + 1)
        return [
            Piece(f"{self.label}/group {k}", lengths.draw(rng) - common) for k in range(self.groups)
        ]

    @property
    def _common_tokens(self) -> int:
        return max(1, round(self.row.prompt.mean * self.row.shared * (1 - self.row.key)))

    @property
    def _rest(self) -> Moments:
        """Of the part of the prompt that is not shared."""
        alone = 1 - self.row.shared
        return Moments(alone * self.row.prompt.mean, alone * self.row.prompt.std)

    @property
    def _prefix(self) -> Moments:
        """Of the shared prefix, such that prefix and rest add up to the prompt's moments."""
        variance = self.row.prompt.std**2 - self._rest.std**2
        return Moments(self.row.shared * self.row.prompt.mean, math.sqrt(variance))


def preble_content(name: str, requests: float, zipf: float = 0.0) -> SharedPrefixContent:
    """A row of TABLE_1. The number of groups follows from `requests` and its requests_per_key.

    Raises KeyError for other names.
    """
    row = TABLE_1[name]
    return SharedPrefixContent(name, row, max(1, round(requests / row.requests_per_key)), zipf)


# ---- Names of workloads.


CHATS = ("lmsys", "sharegpt")
SHARED_PREFIX = ("toolbench", "embodied", "programming", "video", "loogle")
TRACES = ("azure", "mooncake", "burstgpt")
"""File formats with arrival times and lengths."""

FILES = (*TRACES, "sharegpt")
NAMES = (*CHATS, "synthetic", *SHARED_PREFIX, "multiturn", *(f"{kind}:FILE" for kind in FILES))


# ---- Arrivals: when sessions begin. Times are rounded to microseconds, because the last bits of a
# logarithm differ between machines.


class Arrivals(Protocol):
    """An arrival process."""

    @property
    def label(self) -> str:
        """Human-readable, e.g. `4 req/s`."""
        ...

    def times(self, duration_s: float, seed: int) -> list[float]:
        """Seconds after the start, sorted, all in [0, duration_s)."""
        ...


@dataclass(frozen=True, slots=True)
class RandomArrivals:
    """`rate` sessions per second on average; 0: none.

    Gaps are independent and follow a gamma distribution of shape `burstiness` and mean 1 / rate: 1
    is a Poisson process, less is bursty, more is increasingly regular. Another rate stretches the
    gaps of a seed. Raises ConfigError if rate is negative or burstiness is not positive.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"the rate must be 0 or more requests per second, not {self.rate}")
        if not 0 < self.burstiness < float("inf"):
            raise ConfigError(f"burstiness must be more than 0, not {self.burstiness}")

    @property
    def label(self) -> str:
        rate = f"{self.rate:g} req/s"
        return rate if self.burstiness == 1.0 else f"{rate}, burstiness {self.burstiness:g}"

    def times(self, duration_s: float, seed: int) -> list[float]:
        found: list[float] = []
        if self.rate == 0:
            return found
        rng = generator(seed, "rt gaps")
        time_s = 0.0
        while True:
            if self.burstiness == 1.0:
                gap = rng.expovariate(1.0)  # as the simulator draws them
            else:
                gap = rng.gammavariate(self.burstiness, 1.0 / self.burstiness)
            time_s += gap / self.rate
            if round(time_s, _DIGITS) >= duration_s:
                return found
            found.append(round(time_s, _DIGITS))


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """The times of a trace, played `speed` times as fast.

    times_s: sorted, beginning with 0.
    Raises ConfigError if speed is not positive.
    """

    times_s: tuple[float, ...] = field(repr=False)
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"a trace cannot be played {self.speed} times as fast")

    @property
    def label(self) -> str:
        return "as recorded" if self.speed == 1.0 else f"x{self.speed:g}"

    def times(self, duration_s: float, seed: int) -> list[float]:
        played = (round(time_s / self.speed, _DIGITS) for time_s in self.times_s)
        return [time_s for time_s in played if time_s < duration_s]


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """What all requests of a loop have in common.

    name: prefix of the requests' names and of the keys of synthetic text; unique per loop of a
        run, so that loops share no text.
    slo: see Planned.
    forced: responses have exactly the planned length, else at most.
    max_prompt_tokens: longer prompts are cut at their end; None: no limit.
    Raises ConfigError if max_prompt_tokens is below 1.
    """

    service_class: ServiceClass
    name: str
    slo: Slo = Slo()
    forced: bool = True
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"prompts cannot be cut to {self.max_prompt_tokens} tokens")

    def turns(self, number: int, conversation: Conversation) -> tuple[SessionRequest, ...]:
        """The requests of conversation `number`, counted from 0."""
        name = f"{self.name}-{number}"
        if len(conversation) == 1:
            return (self._turn(name, conversation[0]),)
        return tuple(self._turn(f"{name}.{k}", draft) for k, draft in enumerate(conversation))

    def _turn(self, name: str, draft: Draft) -> SessionRequest:
        prompt = draft.prompt
        if self.max_prompt_tokens is not None:
            prompt = cut(prompt, self.max_prompt_tokens)
        planned = Planned(
            name=name,
            service_class=self.service_class,
            prompt=prompt,
            output_tokens=draft.output_tokens,
            forced=self.forced,
            slo=self.slo,
        )
        return SessionRequest(planned, draft.think_s)


RT_TEMPLATE = RequestTemplate(ServiceClass.RT, "rt")
BE_TEMPLATE = RequestTemplate(ServiceClass.BE, "be")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Open-loop load: the k-th conversation of a content begins at the k-th arrival.

    A finite content repeats, see `endless`.
    """

    content: Content
    arrivals: Arrivals
    template: RequestTemplate = RT_TEMPLATE

    @property
    def label(self) -> str:
        return f"{self.content.label}, {self.arrivals.label}"

    @property
    def texts(self) -> Mapping[str, str]:
        return texts_of(self.content)

    def sessions(self, duration_s: float, seed: int) -> list[Session]:
        conversations = endless(self.content, seed, self.template.name)
        return [
            Session(at_s, self.template.turns(number, next(conversations)))
            for number, at_s in enumerate(self.arrivals.times(duration_s, seed))
        ]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A plan.Backlog: `in_flight` requests of a content at a time; 0: none.

    The turns of a conversation are separate requests here: a turn does not wait for the response to
    the previous one. Raises ConfigError if in_flight is negative.
    """

    content: Content
    in_flight: int
    template: RequestTemplate = BE_TEMPLATE

    def __post_init__(self) -> None:
        if self.in_flight < 0:
            raise ConfigError(f"there cannot be {self.in_flight} requests in flight")

    @property
    def label(self) -> str:
        return f"{self.content.label}, {self.in_flight} in flight"

    @property
    def texts(self) -> Mapping[str, str]:
        return texts_of(self.content)

    def requests(self, seed: int) -> Iterator[Planned]:
        for number, conversation in enumerate(endless(self.content, seed, self.template.name)):
            yield from (turn.request for turn in self.template.turns(number, conversation))
