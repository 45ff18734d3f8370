"""Replicas of a simulated device that can be killed and started, and echo their prompts."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import BrosError, EngineDeadError
from bros.core.interfaces import EngineInfo, EngineReport, EngineStats, RequestTrace
from bros.core.plan import Chunk
from bros.core.request import EngineRequest, RequestOutput, Slo
from bros.engine.client import OutputStream
from bros.engine.engine import Engine
from bros.scheduler.build import build_scheduler
from bros.scheduler.scheduler import Scheduler
from bros.simulator.simulation import Device, SimExecutor, engine_info, with_step_bounds
from bros.simulator.virtual_loop import VirtualEngineClient
from support.program_engine import EOS, TOKENIZER, byte_ids, echo, text_of

ERROR_S = 0.02
"""After which a request that gets one of `errors` ends."""


class _Client(VirtualEngineClient):
    """The client of one life of a replica."""

    def kill(self) -> None:
        """End as a process does that is killed: nothing more comes of it."""
        self._task.cancel()
        self.on_death("The engine died.")

    @property
    def open_ids(self) -> set[str]:
        return set(self._streams)


class KillableReplica:
    """A ReportingClient: the scheduler and KV memory of the server on a simulated device.

    Tests set `refusals`, raised one by one on submission, and `errors`: last outputs, given one by
    one instead of an answer. lives: how often it was started. submitted: what was accepted in each
    life, by id. lost: ids of what was open when it died, one list for each death. erred: ids of
    what ended with one of `errors`. died_s: when it died last. changed: called when it has died or
    started.
    """

    def __init__(
        self, config: EngineConfig, device: Device, answer: Callable[[str], str] = echo
    ) -> None:
        self._config = config
        self._device = device
        self._answer = answer
        self._listener: Callable[[EngineReport], None] | None = None
        self.hung = False
        self.refusals: list[BrosError] = []
        self.errors: list[RequestOutput] = []
        self.lives = 0
        self.submitted: list[dict[str, EngineRequest]] = []
        self.lost: list[set[str]] = []
        self.erred: list[str] = []
        self.died_s = 0.0
        self.changed: Callable[[], None] = lambda: None
        self._scripts: dict[str, tuple[int, list[int]]] = {}
        self.start()

    def start(self) -> None:
        """Start another life, with nothing cached."""
        config, device = self._config, self._device
        info = dataclasses.replace(
            engine_info(config, device), vocab_size=TOKENIZER.vocab_size, eos_token_ids=(EOS,)
        )
        clock = ManualClock(asyncio.get_running_loop().time())
        executor = SimExecutor(device.steps, clock, choose=self._choose)
        self.scheduler: Scheduler = build_scheduler(with_step_bounds(config), info, device.steps)
        self._client = _Client(Engine(self.scheduler, executor, clock, info), clock)
        self.lives += 1
        self.submitted.append({})
        self._scripts.clear()
        if self._listener is not None:
            self._client.subscribe(self._listener)
        self.changed()

    def die(self) -> None:
        """All that is open is lost."""
        if self.alive:
            self.lost.append(self.open_ids)
            self._client.kill()
            self.died_s = asyncio.get_running_loop().time()
            self.changed()

    async def restart(self) -> None:
        """What an operator does with a replica."""
        self.die()
        await asyncio.sleep(1.0)
        if not self.alive:
            self.start()

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def alive(self) -> bool:
        return self._client.alive

    @property
    def open_ids(self) -> set[str]:
        """Of what it has accepted or is about to, and has not ended."""
        return self._client.open_ids

    def subscribe(self, listener: Callable[[EngineReport], None]) -> None:
        self._listener = listener
        self._client.subscribe(listener)

    async def submit(self, request: EngineRequest) -> OutputStream:
        if not self.alive:
            raise EngineDeadError("The engine died.")
        if self.refusals:
            raise self.refusals.pop(0)
        if self.errors and not request.prefill_only:
            return self._end_with_error(request, self.errors.pop(0))
        self.submitted[-1][request.request_id] = request
        prompt_len = len(request.prompt_token_ids) - request.resumed
        prompt = text_of(request.prompt_token_ids[:prompt_len])
        self._scripts[request.request_id] = (prompt_len, [*byte_ids(self._answer(prompt)), EOS])
        return await self._client.submit(request)

    async def abort(self, request_id: str) -> None:
        await self._client.abort(request_id)

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        await self._client.promote(request_id, slo, awaited)

    async def release(self, request_id: str) -> None:
        await self._client.release(request_id)

    async def stats(self) -> EngineStats:
        return await self._client.stats()

    async def trace(self, request_id: str) -> RequestTrace | None:
        return await self._client.trace(request_id)

    async def close(self) -> None:
        await self._client.close()

    def _choose(self, chunk: Chunk) -> int:
        prompt_len, script = self._scripts[chunk.request_id]
        return script[chunk.start + len(chunk.token_ids) - prompt_len]

    def _end_with_error(self, request: EngineRequest, output: RequestOutput) -> OutputStream:
        stream = OutputStream(request.service_class)
        output = dataclasses.replace(output, request_id=request.request_id)
        self.erred.append(request.request_id)
        asyncio.get_running_loop().call_later(ERROR_S, lambda: stream.put(output))
        return stream
