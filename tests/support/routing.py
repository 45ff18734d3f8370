"""Requests and replicas for tests of the router."""

from __future__ import annotations

from collections.abc import Sequence

from bros.core.interfaces import EngineReport, Prices
from bros.core.request import NO_HINTS, EngineRequest, Hints, SamplingParams, ServiceClass, Slo
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import ReplicaFacts, RouterSettings

BLOCK = 4
NO_SLO = Slo()
PRICES = Prices(constant_s=0.004, token_s=1e-3, pair_s=1e-6, row_s=1e-4, context_s=1e-7)


def ask(
    request_id: str,
    tokens: Sequence[int],
    *,
    best_effort: bool = False,
    salt: str = "",
    slo: Slo = NO_SLO,
    hints: Hints = NO_HINTS,
    max_tokens: int = 8,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(tokens),
        sampling=SamplingParams(max_tokens=max_tokens),
        service_class=ServiceClass.BE if best_effort else ServiceClass.RT,
        cache_salt=salt,
        slo=slo,
        hints=hints,
    )


def fleet_of(
    count: int,
    policy: str = "e2",
    *,
    capacity: int = 10_000,
    yields: bool = True,
    **settings: object,
) -> Fleet:
    """With so many replicas, numbered from 0."""
    fleet = make_fleet(policy, RouterSettings(**settings), BLOCK)  # type: ignore[arg-type]
    for _ in range(count):
        fleet.add(ReplicaFacts(capacity_tokens=capacity, prices=PRICES, yields=yields), 0.0)
    return fleet


def send(fleet: Fleet, request: EngineRequest, now: float = 0.0) -> int:
    """Where it went."""
    (decision,) = fleet.route([request], now)
    return decision.replica


def serve(
    fleet: Fleet, request: EngineRequest, now: float = 0.0, output: Sequence[int] = (1,)
) -> int:
    """Where it went, and has been answered."""
    replica = send(fleet, request, now)
    fleet.on_first_token(request.request_id, now)
    fleet.on_finished(request.request_id, output, now)
    return replica


def cached(fleet: Fleet, request: EngineRequest) -> dict[int, int]:
    """replica -> tokens of a prompt that are there, as far as the router knows."""
    forest = fleet.forest
    path = forest.walk(request.kv_salt, forest.pieces(request))
    return {n: tokens for n, tokens in fleet.state.matched(path).items() if tokens}


def told(version: int, *kept: tuple[str, int], full: bool = False) -> EngineReport:
    return EngineReport(version=version, full=full, cached_prefixes=kept)
