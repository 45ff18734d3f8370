"""Contents as workloads: sessions that come by themselves, and work of which much is waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bros.bench.plan import Planned, Session, Turn
from bros.bench.workloads.contents import Content, Conversation, Draft, cut, endless, texts_of
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.simulator.workload import generator

# ---- When sessions begin.


_DIGITS = 6
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
    """The times of a trace, played `speed` times as fast. times_s: sorted, from 0 on.

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
class Terms:
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


RT_TERMS = Terms(ServiceClass.RT, "rt")
BE_TERMS = Terms(ServiceClass.BE, "be")


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A plan.Workload: the k-th conversation of a content begins at the k-th arrival.

    A content that ends before the arrivals do begins again (content.endless).
    """

    content: Content
    arrivals: Arrivals
    terms: Terms = RT_TERMS

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
    terms: Terms = BE_TERMS

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
