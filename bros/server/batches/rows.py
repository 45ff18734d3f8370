"""Runs rows of batches as best-effort requests, on the same path as requests over HTTP."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread

from bros.batch.objects import RowInterruptedError, RowPostponedError, TokenUsage
from bros.batch.rows import RowFacts, RowReply
from bros.core.errors import BrosError, EngineDeadError, OverloadedError, QueueFullError
from bros.core.fair import FairThreads
from bros.core.request import Slo
from bros.server.errors import GenerationFailedError, describe
from bros.server.openai.calls import BEST_EFFORT, CALLS
from bros.server.openai.exchange import Exchange
from bros.server.state import ServerState

logger = logging.getLogger(__name__)

_ENGINE_DOWN_RETRY_S = 1.0


class EngineRowHandler:
    """A RowHandler."""

    def __init__(self, state: ServerState) -> None:
        # Threads of their own for prompts and one for checks, so that HTTP requests never wait for
        # rows: checking a row of some megabytes takes longer than a stream should wait.
        # Rows count as rows of batches, not as open requests of their tenant: a row that is refused
        # would keep its place in the runner until its tenant has fewer requests.
        self._state = replace(
            state, threads=FairThreads(), generator=state.generator.without_limits()
        )
        self._checks = anyio.CapacityLimiter(1)

    def check(self, endpoint: str, body: dict[str, Any]) -> RowFacts:
        call = CALLS[endpoint](self._state, body)
        if call.sampling.grammar is not None and self._state.grammars is not None:
            self._state.grammars.check_blocking(call.sampling.grammar)
        model = call.body.model or self._state.model_name
        return RowFacts(model, call.prompt_text(), call.num_chars())

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, due_in_s: float
    ) -> RowReply:
        state = self._state
        if not state.engine.alive:
            raise RowPostponedError("The engine is not running.", _ENGINE_DOWN_RETRY_S)
        try:
            call = await anyio.to_thread.run_sync(
                CALLS[endpoint], state, body, abandon_on_cancel=True, limiter=self._checks
            )
            exchange = Exchange(
                state,
                call,
                tier=BEST_EFFORT,
                slo=Slo(deadline_s=due_in_s),
                tenant=tenant,
                arrival_s=state.clock.now(),
            )
            return await self._run(exchange)
        except (RowPostponedError, RowInterruptedError):
            raise
        except Exception as error:
            if not isinstance(error, BrosError):  # a BrosError is an error of the client
                logger.exception("a row of a batch failed")
            described = describe(error)
            return RowReply(described.status, described.to_json())

    async def _run(self, exchange: Exchange) -> RowReply:
        """Run the row once. Failures of the engine mean that the row must be tried again."""
        try:
            await exchange.start()
        except (QueueFullError, OverloadedError) as error:
            raise RowPostponedError(str(error), error.retry_after_s) from error
        except EngineDeadError as error:
            raise RowPostponedError(str(error), _ENGINE_DOWN_RETRY_S) from error
        try:
            reply = await exchange.complete()
        except OverloadedError as error:
            raise RowPostponedError(str(error), error.retry_after_s) from error
        except (EngineDeadError, GenerationFailedError) as error:
            raise RowInterruptedError(str(error)) from error
        finally:
            await exchange.aclose()
        usage = exchange.answer.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        return RowReply(
            200, reply, TokenUsage(usage.prompt_tokens, cached, usage.completion_tokens)
        )
