"""What is known of one replica besides its cache: what it was given, and what that costs there."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

from bros.core.request import EngineRequest, ServiceClass
from bros.router.forest import Node
from bros.router.settings import ReplicaFacts

_FIRST_GUESS = 64.0
"""Tokens of an answer, before the first one has ended."""

_ALPHA = 0.05
"""Of the moving average over answers."""

_PARTS = 32
"""Of a window, of which waits are summed up."""

RT, BE = ServiceClass.RT, ServiceClass.BE


@dataclass(slots=True, eq=False)
class Work:
    """One request where it went: open until it has ended, and of the window for a while.

    request: None once it has ended. matched: tokens that were cached there when it came.
    leaf: where its prompt ends. key: the part of it that others ask for as well (e2.py), if there
    is one. prefill_s: of what was not cached there. decode_s: of the answer, as far as is known.
    begun: its first token is there. in_window: it counts as load.
    """

    request: EngineRequest | None
    service_class: ServiceClass
    replica: int
    leaf: Node
    key: Node | None
    time_s: float
    matched: int
    prefill_s: float
    decode_s: float
    begun: bool = False
    in_window: bool = True

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class Sums:
    """Seconds of work by class and kind."""

    __slots__ = ("decode_s", "num", "prefill_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num = 0
        self.prefill_s = {RT: 0.0, BE: 0.0}
        self.decode_s = {RT: 0.0, BE: 0.0}

    def add(self, service_class: ServiceClass, prefill_s: float, decode_s: float) -> None:
        self.num += 1
        self.prefill_s[service_class] += prefill_s
        self.decode_s[service_class] += decode_s

    def remove(self, service_class: ServiceClass, prefill_s: float, decode_s: float) -> None:
        """Take back an `add` with the same arguments."""
        self.num -= 1
        self.prefill_s[service_class] -= prefill_s
        self.decode_s[service_class] -= decode_s
        if not self.num:
            self.clear()  # rounding leaves something

    def of(self, service_class: ServiceClass, be_weight: float) -> float:
        """What counts for a request of a class. be_weight: best-effort work for real-time ones."""
        weight = 1.0 if service_class is BE else be_weight
        return (
            self.prompts(service_class, be_weight) + self.decode_s[RT] + weight * self.decode_s[BE]
        )

    def prompts(self, service_class: ServiceClass, be_weight: float) -> float:
        """The same of prompts alone."""
        weight = 1.0 if service_class is BE else be_weight
        return self.prefill_s[RT] + weight * self.prefill_s[BE]

    @property
    def decode_share(self) -> float:
        """Of all the time; 0 if there is none."""
        decode = self.decode_s[RT] + self.decode_s[BE]
        total = decode + self.prefill_s[RT] + self.prefill_s[BE]
        return decode / total if total > 0.0 else 0.0


class Waits:
    """What requests waited for their first token, within the window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._parts: deque[list[float]] = deque()  # [when it began, requests, seconds]

    def add(self, now: float, wait_s: float) -> None:
        part_s = self._window_s / _PARTS
        if not self._parts or now >= self._parts[-1][0] + part_s:
            self._parts.append([now // part_s * part_s, 0.0, 0.0])
            while self._parts[0][0] <= now - self._window_s:
                self._parts.popleft()
        self._parts[-1][1] += 1
        self._parts[-1][2] += wait_s

    def halves(self, now: float) -> tuple[float, float, float, float]:
        """(requests, seconds) of the earlier half of the window, and of the later one."""
        halves = [0.0, 0.0, 0.0, 0.0]
        for began_s, count, seconds in self._parts:
            if began_s > now - self._window_s:
                first = 2 * (began_s >= now - self._window_s / 2)
                halves[first] += count
                halves[first + 1] += seconds
        return halves[0], halves[1], halves[2], halves[3]


@dataclass(slots=True)
class Origin:
    """A request that was the first to compute something that is cached. leaf: what of its path may
    be. version: of the last notice about it."""

    leaf: Node
    version: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """window: what came within the window. open: what has not ended; of what has its first token,
    the answer alone. works: the same by request id. keys: of how many requests of the window which
    prefixes are the key.
    slowdown: steps take so many times what the prices say.
    """

    number: int
    facts: ReplicaFacts
    waits: Waits
    draining: bool = False
    mean_output: float = _FIRST_GUESS
    running: int = 0
    slowdown: float = 1.0
    version: int = 0
    digest_version: int = 0
    window: Sums = field(default_factory=Sums)
    open: Sums = field(default_factory=Sums)
    works: dict[str, Work] = field(default_factory=dict)
    keys: dict[Node, int] = field(default_factory=dict)
    origins: OrderedDict[str, Origin] = field(default_factory=OrderedDict)

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.slowdown * self.facts.prices.prefill_s(tokens, context)

    def decode_s(self, tokens: float, context: int) -> float:
        rows = max(self.running, self.open.num, 1)
        return self.slowdown * self.facts.prices.decode_s(tokens, context, rows)

    def expected_output(self, request: EngineRequest) -> float:
        """Tokens of its answer, as far as one can tell."""
        if request.fill:
            return 0.0
        expected = request.hints.expected_tokens or self.mean_output
        most = request.sampling.max_tokens
        return expected if most is None else min(expected, most - request.resumed)

    def learn_output(self, tokens: int) -> None:
        self.mean_output += _ALPHA * (tokens - self.mean_output)
