"""What can be set, and what a decision says."""

from __future__ import annotations

from dataclasses import dataclass

from bros.core.interfaces import Prices

ROUTERS = ("e2", "rr", "least", "oracle")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Of all policies; the defaults are Preble's (3.2 and its code).

    window_s: what was asked for so long ago counts as load, and for who shares what. balance: how
    many times the lightest replica's load the heaviest one's may be before prefixes move.
    replicate: a prefix gets one more replica when requests wait so many times as long as before.
    decode_share: a replica that spends more than this on answers is given prompts first.
    warm_up: requests per replica before anything moves. history: where a request goes, what a
    second of the window counts beside one that is still to be done. patience: a request waits for
    its prefix at most so many times as long as computing it again would take. late_weight: of a
    second by which a first token would be late.
    be_weight: what a second of best-effort work counts for a real-time request, on an engine that
    lets that make way. max_tokens: most tokens that the forest of prefixes may hold.
    plan: where hot prefixes go: "off", "on", or "shadow": only say what it would gain.
    rebalancing, replication, decode_aware: for ablations.
    """

    window_s: float = 180.0
    balance: float = 1.5
    replicate: float = 2.0
    decode_share: float = 0.7
    warm_up: int = 50
    history: float = 0.05
    patience: float = 8.0
    late_weight: float = 10.0
    be_weight: float = 0.1
    max_tokens: int = 64_000_000
    plan: str = "off"
    rebalancing: bool = True
    replication: bool = True
    decode_aware: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What a router has to know of an engine.

    capacity_tokens: of its KV cache. yields: best-effort work there makes way for real-time work
    (policy bros). ttft_s: objective of real-time requests that bring none; None: there is none.
    """

    capacity_tokens: int
    prices: Prices
    yields: bool = True
    ttft_s: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and why.

    replica: its number. matched: tokens of the prompt that are cached there, as far as is known.
    reason: "exploit", "again", "explore", "decode", "moved", "parked", "group", "planned", "turn"
    (rr), "least", "oracle", "only".
    """

    request_id: str
    replica: int
    matched: int
    reason: str
