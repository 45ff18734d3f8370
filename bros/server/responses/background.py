"""Runs background responses as best-effort requests, on the same path as requests over HTTP.

Whatever runs a response, and however often, its text and the ids in it are the same, so that a
stream of its events can go on after the server has failed.
"""

from __future__ import annotations

import json
import logging
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bros.batch.background import ResponseOutcome
from bros.batch.objects import RowInterruptedError, RowPostponedError, StoreUnavailableError
from bros.batch.responses import ResponseStatus, ResponseStore, StoredResponse
from bros.core.errors import BrosError
from bros.core.request import IdGenerator, Slo
from bros.server.batches.rows import RowRunner
from bros.server.errors import describe
from bros.server.http import offload_reply
from bros.server.openai.calls import BEST_EFFORT
from bros.server.openai.exchange import Exchange
from bros.server.responses.call import ResponseCall
from bros.server.responses.events import Events, background_events, failure
from bros.server.responses.running import RunningResponses
from bros.server.state import ServerState

logger = logging.getLogger(__name__)

_STORE_RETRY_S = 1.0
"""A response whose conversation the store cannot read now runs again after so long."""


class BackgroundExchange(Exchange):
    """One background response, whose output can be read while it runs."""

    shows_progress = True

    def __init__(self, state: ServerState, call: ResponseCall, **options: Any) -> None:
        """options: of Exchange, and `running` and `count_tokens`."""
        self._running: RunningResponses = options.pop("running")
        self._count_tokens: Callable[[str, int], None] = options.pop("count_tokens")
        super().__init__(state, call, **options)
        self._response_call = call

    async def complete(self) -> str:
        call, answer = self._response_call, self.answer
        writer = call.silent_writer(self.header)
        writer.hold = answer.held_output.add

        def events(after: int) -> Events:
            return background_events(writer.so_far(), after, runs=True)

        try:
            with self._running.shown(self._id, events) as running:
                while deltas := await answer.deltas():
                    for delta in deltas:
                        writer.write(delta)
                    running.notify()
                await answer.aclose()
                writer.close(answer.usage())
        finally:  # also if it is cancelled or interrupted
            self._count_tokens(self._tenant, answer.usage().completion_tokens)
        response = call.ended = writer.response
        return await offload_reply(self._state, self._tenant, response.to_json, response.size)


class EngineResponseHandler:
    """A ResponseHandler."""

    def __init__(
        self,
        runner: RowRunner,
        store: ResponseStore,
        running: RunningResponses,
        count_tokens: Callable[[str, int], None] = lambda tenant, tokens: None,
    ) -> None:
        """running: where the responses are while they run.
        count_tokens: called with tenant and output tokens of each run, for limits per minute, which
            the accounts of the runner do not have.
        """
        self._runner = runner
        self._store = store
        self._running = running
        self._count_tokens = count_tokens

    async def answer(self, response: StoredResponse, *, due_in_s: float) -> ResponseOutcome:
        state = self._runner.state
        try:
            call = await self._runner.check(lambda: self._call(response))
            exchange = BackgroundExchange(
                state,
                call,
                running=self._running,
                count_tokens=self._count_tokens,
                tier=BEST_EFFORT,
                slo=Slo(deadline_s=due_in_s),
                tenant=response.tenant,
                arrival_s=state.clock.now(),
                request_id=response.id,
                created=response.created_at,
            )
            body = await self._runner.run(exchange)
        except (RowPostponedError, RowInterruptedError):
            raise
        except StoreUnavailableError as error:  # as it reads the conversation
            raise RowPostponedError(str(error), _STORE_RETRY_S) from error
        except Exception as error:
            if not isinstance(error, BrosError):  # a BrosError is an error of the client
                logger.exception("a background response failed")
            found = failure(describe(error)).model_dump_json()
            return ResponseOutcome(ResponseStatus.FAILED, error=found)
        assert call.ended is not None
        return ResponseOutcome(ResponseStatus(call.ended.status), body)

    def _call(self, response: StoredResponse) -> ResponseCall:
        state = self._runner.state
        assert response.request is not None
        fields = json.loads(response.request)
        if fields.get("seed") is None:
            fields["seed"] = zlib.crc32(response.id.encode())
        same_ids = replace(state, ids=IdGenerator(random.Random(response.id)))
        call = ResponseCall(same_ids, fields, json.loads(response.input))
        if response.previous_id is not None:
            now = state.clock.unix_time()
            tenant, previous_id = response.tenant, response.previous_id
            call.continue_from(self._store.conversation(tenant, previous_id, now))
        return call
