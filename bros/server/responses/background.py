"""Runs background responses as best-effort requests, on the same path as requests over HTTP."""

from __future__ import annotations

import json
import logging

from bros.batch.background import ResponseOutcome
from bros.batch.objects import RowInterruptedError, RowPostponedError
from bros.batch.responses import ResponseStatus, ResponseStore, StoredResponse
from bros.core.errors import BrosError
from bros.core.request import Slo
from bros.server.batches.rows import RowRunner
from bros.server.errors import describe
from bros.server.openai.calls import BEST_EFFORT
from bros.server.openai.exchange import Exchange
from bros.server.responses.call import ResponseCall
from bros.server.responses.events import failure

logger = logging.getLogger(__name__)


class EngineResponseHandler:
    """A ResponseHandler."""

    def __init__(self, runner: RowRunner, store: ResponseStore) -> None:
        self._runner = runner
        self._store = store

    async def answer(self, response: StoredResponse, *, due_in_s: float) -> ResponseOutcome:
        state = self._runner.state
        try:
            call = await self._runner.check(lambda: self._call(response))
            exchange = Exchange(
                state,
                call,
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
        call = ResponseCall(state, json.loads(response.request), json.loads(response.input))
        if response.previous_id is not None:
            now = state.clock.unix_time()
            tenant, previous_id = response.tenant, response.previous_id
            call.continue_from(self._store.conversation(tenant, previous_id, now))
        return call
