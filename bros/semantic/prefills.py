"""What is known of a prompt is computed while the rest of it is still being made.

producer   | prefill | decode ............................. |
consumer             | fill: its beginning |                | prefill: the value | decode ...
                                            kept ───────────┘ given back at its first token
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from bros.core.clock import Clock
from bros.core.errors import BrosError
from bros.core.interfaces import EngineClient
from bros.core.request import EngineRequest, FinishReason, Hints, SamplingParams, ServiceClass
from bros.semantic.generating import TurnFailedError
from bros.semantic.labels import Level
from bros.semantic.live import LiveSession
from bros.semantic.nodes import Turn
from bros.semantic.prompting import Prompter
from bros.semantic.settings import SessionSettings

logger = logging.getLogger(__name__)

_LEAST_BLOCKS = 2
"""Fewer new ones are not worth a request of their own."""


class Prefiller:
    """Fills on behalf of turns that wait. Nothing depends on them: what fails is left out."""

    def __init__(
        self, prompter: Prompter, engine: EngineClient, clock: Clock, settings: SessionSettings
    ) -> None:
        self._prompter = prompter
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self.count = 0

    def begin(self, session: LiveSession, turn: Turn) -> asyncio.Task[None]:
        """Compute what is known of the turn's prompt, after what was known of it before."""
        record = session.record(turn.call.id)
        record.fill = asyncio.create_task(self._fill(session, turn, record.fill))
        return record.fill

    async def end(self, session: LiveSession, turn: Turn) -> None:
        """The turn runs now, or never will: what is unfinished is stopped."""
        fill = session.record(turn.call.id).fill
        if fill is not None:
            fill.cancel()
            await asyncio.gather(fill, return_exceptions=True)

    async def _fill(
        self, session: LiveSession, turn: Turn, before: asyncio.Task[None] | None
    ) -> None:
        record = session.record(turn.call.id)
        try:
            if before is not None:
                await before
            prompt = await self._prompter.grow(session, turn)
            token_ids, private_from = prompt.token_ids(), prompt.private_from
            block_size = self._engine.info.block_size
            whole = len(token_ids) // block_size * block_size  # only full blocks can be shared
            if whole - session.begun.num_tokens(token_ids) < _LEAST_BLOCKS * block_size:
                return
            session.begun.add(token_ids)
            self.count += 1
            request = EngineRequest(
                request_id=f"{turn.call.id}.{turn.index}-fill{len(token_ids)}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                service_class=ServiceClass.BE,
                arrival_s=self._clock.now(),
                tenant=session.tenant,
                cache_salt=session.sharing.cache_salt,
                fill=True,
                hints=Hints(
                    program=session.uid,
                    depth=turn.depth,
                    grouped=turn.label.level > Level.THROUGHPUT,
                    private_from=private_from,
                    private_salt=session.sharing.private_salt,
                    keep_s=self._settings.park_s,
                    early=True,
                ),
            )
            record.kept.add(request.request_id)
            if await self._run(request):
                record.turn(turn.index).prefilled_tokens = whole
        except (BrosError, TurnFailedError) as error:
            logger.debug("no prefill of %s: %s", turn.call.id, error)
        except Exception:
            logger.exception("the prefill of %s failed", turn.call.id)

    async def _run(self, request: EngineRequest) -> bool:
        """Whether the engine did it."""
        outputs = aiter(await self._engine.submit(request))
        reason = None
        try:
            while reason is None:
                reason = (await anext(outputs)).finish_reason
        finally:
            if reason is None:
                await self._engine.abort(request.request_id)
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
        return reason is FinishReason.LENGTH
