"""What policies decide on: the replicas, the forest, and what is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bros.core.request import EngineRequest, ServiceClass
from bros.router.forest import Forest, Node, Path, Pieces
from bros.router.replica import BE, Replica
from bros.router.settings import RouterSettings


@dataclass(slots=True)
class Ask:
    """A request that has to go somewhere.

    length: tokens of its prompt. matched: replica -> tokens of it that are cached there, of those
    that have any. candidates: where it may go. parked: the replica that keeps the KV of the turn
    before.
    """

    request: EngineRequest
    pieces: Pieces
    path: Path
    length: int
    matched: dict[int, int]
    candidates: Sequence[Replica]
    parked: int | None = None

    @property
    def service_class(self) -> ServiceClass:
        return self.request.service_class

    def prefill_s(self, replica: Replica) -> float:
        """What of its prompt is not cached there."""
        matched = self.matched.get(replica.number, 0)
        return replica.prefill_s(self.length - matched, matched)

    def key(self, tokens: int) -> Node | None:
        """Of the nodes that begin within its first so many tokens the last one that is longer than
        all before it together: what it should be placed by (Preble 3.2: the key portion)."""
        for node in reversed(self.path.nodes):
            if node.start < tokens and node.num_tokens > node.start:
                return node
        return None


@dataclass(slots=True)
class State:
    """Everything, at one moment. num_routed: requests so far. since_s: when the first one came.
    asked_tokens: of the prompts of the window, of which matched_tokens were cached where they went.
    """

    settings: RouterSettings
    forest: Forest
    replicas: dict[int, Replica] = field(default_factory=dict)
    num_routed: int = 0
    since_s: float = 0.0
    asked_tokens: int = 0
    matched_tokens: int = 0

    @property
    def hits(self) -> float:
        """The share of what was asked for that caches had."""
        return self.matched_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def matched(self, path: Path) -> dict[int, int]:
        """replica -> how many of the first tokens of a prompt are cached there, if any are."""
        found: dict[int, int] = {}
        whole: set[int] | None = None
        for node in path.nodes:
            asked, size = min(node.end, path.end) - node.start, node.end - node.start
            goes_on = set()
            for replica, kept in node.cached.items():
                if whole is None or replica in whole:
                    found[replica] = node.start + min(kept, asked)
                    if kept == size:
                        goes_on.add(replica)
            if not goes_on:
                break
            whole = goes_on
        return found

    def weight(self, replica: Replica) -> float:
        """What a second of best-effort work there counts for a real-time request."""
        return self.settings.be_weight if replica.facts.yields else 1.0

    def open_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """Work that it has, which a new request of a class would have beside or before it."""
        return replica.open.of(service_class, self.weight(replica))

    def queue_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """Of that, prompts alone: the next one comes after them, but beside the answers."""
        return replica.open.prompts(service_class, self.weight(replica))

    def load_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """What it still has to do; of two that are as busy, the one that got less lately."""
        window = replica.window.of(service_class, self.weight(replica))
        return self.settings.history * window + self.open_s(replica, service_class)

    def given_s(self, replica: Replica) -> float:
        """What it was given within the window, and has not done of what came before. It says where
        too many prefixes are; what is open at the moment, by itself, would move them to and fro."""
        return replica.window.of(BE, 1.0) + replica.open.of(BE, 1.0)


class RoutingPolicy(Protocol):
    """Chooses among candidates; changes nothing but what is its own."""

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        """Where a request goes, and why: the `reason` of a Decision. There is a candidate."""
        ...
