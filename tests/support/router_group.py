"""A router's client over engines that can be killed, in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from bros.core.request import EngineRequest, RequestOutput, SamplingParams
from bros.router.client import RouterClient
from bros.router.fleet import Fleet
from bros.simulator.virtual_loop import LoopClock, run_virtual
from support.killable_engine import KillableEngine
from support.turn_fleet import TurnFleet

HANGS_S = 60.0
"""Of virtual time, which a router that looks at its replicas never runs out of."""


@dataclass
class Group:
    """A router's client over engines that are up. made: a fleet, other than by turns."""

    size: int = 2
    made: Fleet | None = None
    deaths: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fleet = TurnFleet()
        self.engines = [KillableEngine() for _ in range(self.size)]
        self.client = RouterClient(
            self.made or self.fleet,
            LoopClock(),
            random.Random(0),
            on_final_death=self.deaths.append,
        )
        for engine in self.engines:
            engine.start()
            self.client.add(engine, restart=restart_of(engine))

    def where(self, request_id: str) -> int:
        (found,) = [n for n, engine in enumerate(self.engines) if request_id in engine.open_ids]
        return found

    async def close(self) -> None:
        await self.client.close()
        assert self.fleet.open == {} and self.client.num_open == 0
        assert all(status.open == 0 for status in self.client.replicas())
        assert all(engine.closed for engine in self.engines)


def restart_of(engine: KillableEngine) -> Callable[[], Awaitable[None]]:
    async def restart() -> None:
        engine.die()
        await asyncio.sleep(1)
        engine.start()

    return restart


def in_group(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test in virtual time; its first argument is a group, of which nothing is left at the end.

    The other arguments are fixtures.
    """

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def main() -> None:
            async with asyncio.timeout(HANGS_S):
                group = Group()
                await test(group, **fixtures)
                await group.close()

        run_virtual(main)

    _, *others = inspect.signature(test).parameters.values()
    run.__signature__ = inspect.Signature(others)  # type: ignore[attr-defined]
    return run


def ask(request_id: str = "r", max_tokens: int = 20, **changes: object) -> EngineRequest:
    sampling = SamplingParams(
        temperature=0, max_tokens=max_tokens, min_tokens=max_tokens, logprobs=0
    )
    made = EngineRequest(request_id=request_id, prompt_token_ids=[5, 6, 7], sampling=sampling)
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


async def collect(client: RouterClient, request: EngineRequest) -> list[RequestOutput]:
    return [output async for output in await client.submit(request)]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]
