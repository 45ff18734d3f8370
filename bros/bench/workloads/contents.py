"""What is asked, without saying when: the seam between contents and loops."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from bros.bench.plan import Piece, Planned, Session, Turn
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.workload.arrivals import BE_SIZES, RT_SIZES, RequestSizes, generator
from bros.workload.lengths import ClippedLogNormal, Lengths


class Draft(NamedTuple):
    """A request before it has a name, a class and objectives.

    think_s: seconds between the end of the answer before it and this request.
    """

    prompt: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0


Conversation = tuple[Draft, ...]
"""Requests that follow each other, at least one."""


class Content(Protocol):
    """Where conversations come from."""

    @property
    def label(self) -> str:
        """For people, e.g. `lmsys`."""
        ...

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """At least one; the k-th is always the same for a seed. May be endless."""
        ...


@runtime_checkable
class WithTexts(Protocol):
    """A content or a loop some pieces of which are texts that people wrote."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Key of a piece -> its text. Pieces with other keys are made up (prompts.py)."""
        ...


def texts_of(*sources: object) -> dict[str, str]:
    """The texts of all those that have any; what Prompts wants to know."""
    found: dict[str, str] = {}
    for source in sources:
        if isinstance(source, WithTexts):
            found.update(source.texts)
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """Conversations read from a file, in its order whatever the seed is."""

    label: str
    recorded: tuple[Conversation, ...] = field(repr=False)
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    def conversations(self, seed: int) -> Iterator[Conversation]:
        return iter(self.recorded)


def endless(content: Content, seed: int, owner: str) -> Iterator[Conversation]:
    """The conversations of a content; when they end, again from the first one.

    Made-up text is another one for every owner and each time, so that a server cannot know it
    from elsewhere; what the conversations of one round share, they share in every round.
    """
    texts = texts_of(content)
    for round_number in itertools.count():
        prefix = f"{owner}{round_number}/" if round_number else f"{owner}/"
        for conversation in content.conversations(seed):
            yield tuple(_owned(draft, prefix, texts) for draft in conversation)


def _owned(draft: Draft, prefix: str, texts: Mapping[str, str]) -> Draft:
    prompt = tuple(
        piece if piece.key in texts else piece._replace(key=prefix + piece.key)
        for piece in draft.prompt
    )
    return draft._replace(prompt=prompt)


def cut(prompt: tuple[Piece, ...], tokens: int) -> tuple[Piece, ...]:
    """The first `tokens` tokens of a prompt: what it shares with others at its start stays."""
    kept: list[Piece] = []
    left = tokens
    for piece in prompt:
        if left <= 0:
            break
        kept.append(piece._replace(tokens=min(piece.tokens, left)))
        left -= piece.tokens
    return tuple(kept)


# ---- Chats of several turns: every prompt is the one before, an answer and what the user says
# next.
#
#     turn 0   | system | user 0 |
#     turn 1   | system | user 0 | answer 0 | user 1 |
#     turn 2   | system | user 0 | answer 0 | user 1 | answer 1 | user 2 |
#
# The answers in the prompts are stand-ins as long as the real ones, because a plan is made before
# anything is answered: a server finds in its cache what it has read before, not what it wrote.


_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations of `turns` turns.

    Raises ConfigError if system_tokens or think_s is negative.

    user, answer: tokens of what the user says in a turn and of the answer.
    system_tokens: of a text at the start that all conversations share.
    think_s: mean of the exponentially distributed time between an answer and the next turn.
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


# ---- Conversations of one request each, whose lengths are drawn and whose prompts share nothing.


@dataclass(frozen=True, slots=True)
class Drawn:
    """Prompt and output lengths from a distribution.

    purpose: names the random numbers; "rt" and "be" draw what the simulator draws for a seed.
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


def chats(name: str) -> Drawn:
    """A row of BROS Table 2: `lmsys` or `sharegpt`. Raises KeyError for others."""
    return Drawn(name, RT_SIZES[name])


def documents() -> Drawn:
    """The best-effort requests of BROS: prompts U[512, 1024], outputs U[32, 128]."""
    return Drawn("synthetic", BE_SIZES, "be")


# ---- Prompts that begin alike: the workloads of Preble (Table 1), made up from its statistics.
#
#     | common to all |  of the group (key portion)  |  of this request  |
#     |<-------------- shared prefix -------------->|
#
# Preble gives the mean and deviation of prompt and output lengths, the share of the prompt that
# other requests share, the share of the key portion (the node of the prefix tree that is longer
# than all before it), and how many requests share one. The key portion's share is read as one of
# the shared prefix: of the prompt it would exceed the shared part in two of the five rows. What
# stands before it is common to all requests, like the instructions of an application.


_TAIL = 8.0
"""Lengths are clipped so many deviations above their mean."""


class Moments(NamedTuple):
    """Mean and standard deviation in tokens."""

    mean: float
    std: float

    def at_least(self, low: int) -> ClippedLogNormal:
        """Lengths with these moments."""
        return ClippedLogNormal(self.mean, self.std, low, round(self.mean + _TAIL * self.std))


class DatasetSizes(NamedTuple):
    """shared: of the prompt, with other requests.
    key: of that, the key portion.
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
    """Requests of `groups` groups; those of one group begin with the same text.

    zipf: group k (from 1) is chosen with a probability that is proportional to k ** -zipf;
    0 makes all equally popular. The lengths of the shared part belong to the group, so a sample
    of few groups may be far from the row's mean. Raises ConfigError if there is no group or
    zipf is negative.
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
        # More than all before it, which is what makes it the key portion.
        lengths = self._prefix.at_least(2 * common + 1)
        return [
            Piece(f"{self.label}/group {k}", lengths.draw(rng) - common) for k in range(self.groups)
        ]

    @property
    def _common_tokens(self) -> int:
        return max(1, round(self.row.prompt.mean * self.row.shared * (1 - self.row.key)))

    @property
    def _rest(self) -> Moments:
        """Of the part of the prompt that no other request shares."""
        alone = 1 - self.row.shared
        return Moments(alone * self.row.prompt.mean, alone * self.row.prompt.std)

    @property
    def _prefix(self) -> Moments:
        """Of the shared part, so that it and the rest together have the prompt's moments."""
        variance = self.row.prompt.std**2 - self._rest.std**2
        return Moments(self.row.shared * self.row.prompt.mean, math.sqrt(variance))


def preble(name: str, requests: float, zipf: float = 0.0) -> SharedPrefixContent:
    """A row of TABLE_1 with as many groups as `requests` requests have at its requests per key.

    Raises KeyError for other names.
    """
    row = TABLE_1[name]
    return SharedPrefixContent(name, row, max(1, round(requests / row.requests_per_key)), zipf)


# ---- Names of workloads. Imports nothing, so that --help is quick.


CHATS = ("lmsys", "sharegpt")
SHARED_PREFIX = ("toolbench", "embodied", "programming", "video", "loogle")
TRACES = ("azure", "mooncake", "burstgpt")
"""Files with times and lengths."""

FILES = (*TRACES, "sharegpt")
NAMES = (*CHATS, "synthetic", *SHARED_PREFIX, "multiturn", *(f"{kind}:FILE" for kind in FILES))


# ---- Contents as workloads: sessions that come by themselves, and work of which much is waiting.


# ---- When sessions begin.


"""Times are whole microseconds: the last bit of a logarithm is not the same on all machines."""


class Arrivals(Protocol):
    """A process that sends sessions off."""

    @property
    def label(self) -> str:
        """For people, e.g. `4 req/s`."""
        ...

    def times(self, duration_s: float, seed: int) -> list[float]:
        """Seconds after the start, sorted, all in [0, duration_s)."""
        ...


@dataclass(frozen=True, slots=True)
class RandomArrivals:
    """`rate` sessions per second on average; 0 is none.

    Gaps are independent and follow a gamma distribution of shape `burstiness` and mean 1 / rate:
    at 1 a Poisson process, below it bursts with long pauses, above it ever more regular. The
    gaps of a seed at another rate are the same ones, stretched. Raises ConfigError if rate is
    negative or burstiness is not positive.
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

    times_s: sorted, from 0 on.

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
class SendingTerms:
    """How all requests of a loop are sent.

    forced: answers have exactly the planned tokens, else at most so many.
    max_prompt_tokens: prompts are cut to so many at their end; None leaves them whole.
    name: what the names of requests begin with, and the keys of made-up text: the loops of a run
    need different ones, and what they make up is never the same.
    Raises ConfigError if prompts would be cut to nothing.
    """

    service_class: ServiceClass
    name: str
    slo: Slo = Slo()
    forced: bool = True
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ConfigError(f"prompts cannot be cut to {self.max_prompt_tokens} tokens")

    def turns(self, number: int, conversation: Conversation) -> tuple[Turn, ...]:
        """The requests of conversation `number`, counted from 0."""
        name = f"{self.name}-{number}"
        if len(conversation) == 1:
            return (self._turn(name, conversation[0]),)
        return tuple(self._turn(f"{name}.{k}", draft) for k, draft in enumerate(conversation))

    def _turn(self, name: str, draft: Draft) -> Turn:
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
        return Turn(planned, draft.think_s)


RT_TERMS = SendingTerms(ServiceClass.RT, "rt")
BE_TERMS = SendingTerms(ServiceClass.BE, "be")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A plan.Workload: the k-th conversation of a content begins at the k-th arrival.

    A content that ends before the arrivals do begins again (content.endless).
    """

    content: Content
    arrivals: Arrivals
    terms: SendingTerms = RT_TERMS

    @property
    def label(self) -> str:
        return f"{self.content.label}, {self.arrivals.label}"

    @property
    def texts(self) -> Mapping[str, str]:
        return texts_of(self.content)

    def sessions(self, duration_s: float, seed: int) -> list[Session]:
        conversations = endless(self.content, seed, self.terms.name)
        return [
            Session(at_s, self.terms.turns(number, next(conversations)))
            for number, at_s in enumerate(self.arrivals.times(duration_s, seed))
        ]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A plan.Backlog: so many requests of a content are in flight; 0 is none.

    The turns of a conversation are requests of their own here, one after the other: the next
    one does not wait for the answer before it. Raises ConfigError if in_flight is negative.
    """

    content: Content
    in_flight: int
    terms: SendingTerms = BE_TERMS

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
        for number, conversation in enumerate(endless(self.content, seed, self.terms.name)):
            yield from (turn.request for turn in self.terms.turns(number, conversation))
