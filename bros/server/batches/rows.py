"""Runs rows of batches as best-effort requests, on the same path as requests over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from bros.batch.objects import RowInterruptedError, RowPostponedError, TokenUsage
from bros.batch.rows import RowFacts, RowReply
from bros.core.errors import (
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from bros.core.fair import FairThreads
from bros.core.request import Slo
from bros.server.embeddings.calls import (
    POOLING_CALLS,
    AnyPoolingCall,
    PoolingCall,
    PoolingExchange,
)
from bros.server.errors import GenerationFailedError, describe, renaming_fields
from bros.server.messages.call import MessageCall
from bros.server.openai.calls import BEST_EFFORT, CALLS, Call
from bros.server.openai.exchange import Exchange
from bros.server.responses.call import ResponseCall
from bros.server.state import ServerState

logger = logging.getLogger(__name__)

_ENGINE_DOWN_RETRY_S = 1.0


T = TypeVar("T")


class RowRunner:
    """Runs what waits in the store, rows of batches and background responses, on the engine.

    state: that of the server, but with threads of its own for prompts, so that HTTP requests never
        wait for rows, and without limits of tenants: rows have limits of their own, and one that is
        refused would keep its place in the runner until its tenant has fewer requests.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = replace(
            state,
            threads=FairThreads(),
            for_rows=True,
            accounts=state.accounts.of_batches(),
            generator=state.generator.without_limits(),
        )
        self._checks = anyio.CapacityLimiter(1)

    async def check(self, work: Callable[[], T]) -> T:
        """Do `work`, which reads a row, on the one thread for that: a row of some megabytes takes
        longer than a stream should wait. Raises RowPostponedError if no engine runs."""
        if not self.state.engine.alive:
            raise RowPostponedError("The engine is not running.", _ENGINE_DOWN_RETRY_S)
        return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=self._checks)

    async def run(self, exchange: Exchange) -> str:
        """Run a row once; returns the response as JSON.

        Raises RowPostponedError or RowInterruptedError for failures of the engine, after which the
        row must be tried again, and what else Exchange raises.
        """
        try:
            await exchange.start()
        except (QueueFullError, OverloadedError) as error:
            raise RowPostponedError(str(error), error.retry_after_s) from error
        except EngineDeadError as error:
            raise RowPostponedError(str(error), _ENGINE_DOWN_RETRY_S) from error
        try:
            return await exchange.complete()
        except OverloadedError as error:
            raise RowPostponedError(str(error), error.retry_after_s) from error
        except (EngineDeadError, GenerationFailedError) as error:
            raise RowInterruptedError(str(error)) from error
        finally:
            await exchange.aclose()


class EngineRowHandler:
    """A RowHandler."""

    def __init__(self, runner: RowRunner) -> None:
        self._runner = runner

    def check(self, tenant: str, endpoint: str, body: dict[str, Any]) -> RowFacts:
        state = self._runner.state
        call = ROW_CALLS[endpoint](state, body)
        if not isinstance(call, PoolingCall):
            grammar = call.sampling.grammar
            if grammar is not None and state.grammars is not None:
                with renaming_fields(call.field_names):
                    state.grammars.check_blocking(tenant, grammar)
        model = call.body.model or state.model_name
        return RowFacts(model, call.prompt_text(), call.num_chars())

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        runner, state = self._runner, self._runner.state
        try:
            call = await runner.check(lambda: ROW_CALLS[endpoint](state, body))
            if isinstance(call, PoolingCall):
                return await self._pool(call, tenant, slo)
            exchange = Exchange(
                state,
                call,
                tier=BEST_EFFORT,
                slo=slo,
                tenant=tenant,
                arrival_s=state.clock.now(),
            )
            reply = await runner.run(exchange)
        except (RowPostponedError, RowInterruptedError):
            raise
        except Exception as error:
            if not isinstance(error, BrosError):  # a BrosError is an error of the client
                logger.exception("a row of a batch failed")
            described = describe(error)
            return RowReply(described.status, described.to_json(endpoint))
        usage = exchange.answer.usage()
        details = usage.completion_tokens_details
        tokens = TokenUsage(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            output_tokens=usage.completion_tokens,
            reasoning_tokens=0 if details is None else details.reasoning_tokens,
        )
        return RowReply(200, reply, tokens)

    async def _pool(self, call: AnyPoolingCall, tenant: str, slo: Slo) -> RowReply:
        """Run a row for embeddings or scores once. Failures of the engine mean that the row must be
        tried again."""
        exchange = PoolingExchange(
            self._runner.state,
            call,
            tier=BEST_EFFORT,
            slo=slo,
            tenant=tenant,
            arrival_s=self._runner.state.clock.now(),
        )
        try:
            reply = await exchange.complete()
        except (QueueFullError, OverloadedError) as error:
            raise RowPostponedError(str(error), error.retry_after_s) from error
        except (EngineDeadError, GenerationFailedError) as error:
            raise RowInterruptedError(str(error)) from error
        tokens = TokenUsage(exchange.usage.prompt_tokens, exchange.cached_tokens)
        return RowReply(200, reply.decode(), tokens)


def _response_row(state: ServerState, fields: Mapping[str, Any]) -> ResponseCall:
    """Rows are no part of conversations: their answers are in the output file. Raises
    InvalidRequestError."""
    for name in ("background", "previous_response_id", "store"):
        if fields.get(name):
            raise InvalidRequestError(
                f"'{name}' cannot be used in a batch.", name, "unsupported_parameter"
            )
    return ResponseCall(state, fields, stored=False)


RowCall = Call | AnyPoolingCall

ROW_CALLS: Mapping[str, Callable[[ServerState, Mapping[str, Any]], RowCall]] = {
    **CALLS,
    "/v1/responses": _response_row,
    "/v1/messages": MessageCall,
    **POOLING_CALLS,
}
"""`url` of a row -> its Call."""
