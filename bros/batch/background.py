"""Runs background responses: claims them from the store, runs them, stores how they ended.

They take turns with the rows of batches, those with the earliest deadline first, and they end as
rows do when the engine fails. A response without an end is run, whichever process ran it before.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from bros.batch.objects import (
    RowInterruptedError,
    StoreFullError,
    StoreUnavailableError,
)
from bros.batch.responses import Claim, ResponseStatus, ResponseStore, StoredResponse
from bros.batch.runner import PollLoop, RunnerContext, StoreTrouble, run_row

logger = logging.getLogger(__name__)

_THREADS = 2
_SWEEP_S = 600.0
_MIN_DEADLINE_S = 0.001
"""Shortest deadline that the engine accepts."""


@dataclass(frozen=True, slots=True)
class ResponseOutcome:
    """How a response has ended.

    body: the response object, as JSON; None: as it was stored.
    error: code and message, as JSON, if it failed.
    """

    status: ResponseStatus
    body: str | None = None
    error: str | None = None


class ResponseHandler(Protocol):
    """Runs responses on the engine. Implemented by server/responses, and by tests."""

    async def answer(self, response: StoredResponse, *, due_in_s: float) -> ResponseOutcome:
        """Run a response as a best-effort request with a deadline of `due_in_s` seconds from now.

        An error of the client is an outcome. Raises RowPostponedError or RowInterruptedError if it
        must be tried again. Cancelling the call aborts it.
        """
        ...


class BackgroundRunner:
    """Runs the background responses of a store; one per process. `run` it in a task, `wake` it for
    changes."""

    def __init__(
        self, context: RunnerContext, store: ResponseStore, handler: ResponseHandler
    ) -> None:
        """context: of the BatchRunner, whose rows the responses take turns with."""
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="background")
        self._context = dataclasses.replace(context, threads=threads)
        self._store = store
        self._handler = handler
        self._polling = PollLoop(context.settings)
        self._owner = context.ids.new("background")
        self._running: dict[str, tuple[Claim, asyncio.Task[None]]] = {}
        self._trouble = StoreTrouble("background responses")

    @property
    def in_flight(self) -> int:
        """Responses that this process has claimed."""
        return len(self._running)

    def wake(self) -> None:
        """Poll the store at once: a response was created, cancelled or deleted."""
        self._polling.wake()

    async def run(self) -> None:
        """Run responses until cancelled; then release them for other processes."""
        sweeping = asyncio.create_task(self._sweep())
        try:
            await self._polling.run(self._poll)
        finally:
            sweeping.cancel()
            await asyncio.shield(asyncio.ensure_future(self._stop()))

    async def _poll(self) -> None:
        context, store, lease_s = self._context, self._store, self._context.settings.lease_s
        try:
            await context.io(store.look_for_room)
            now = await context.io(context.store.time, context.clock.unix_time())
            await context.io(store.fail_overdue, context.clock.unix_time())
            if self._running:
                ids = list(self._running)
                held = await context.io(store.renew, self._owner, ids, now, lease_s)
                for claim, task in self._running.values():
                    if (claim.response_id, claim.epoch) not in held:
                        task.cancel()  # it was cancelled or deleted, or has another owner
            room = context.limiter.limit - len(self._running)
            if room <= 0:
                return
            model = context.settings.model
            claims = await context.io(store.claim, self._owner, now, lease_s, room, model)
        except Exception as error:
            self._trouble.note(error)
            return
        self._trouble.end()
        for claim in claims:
            # Else the old task has to end first, and a later poll claims the response again.
            if claim.response_id not in self._running:
                task = asyncio.create_task(self._run(claim), name=claim.response_id)
                self._running[claim.response_id] = claim, task
                task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._running[task.get_name()]

    async def _run(self, claim: Claim) -> None:
        context, limiter = self._context, self._context.limiter
        try:
            await limiter.acquire((claim.deadline_at, claim.deadline_at), claim.tenant)
            try:
                outcome = await self._outcome(claim)
            finally:
                limiter.release(claim.tenant)
        except Exception:
            logger.exception("the background response %s failed", claim.response_id)
            outcome = ResponseOutcome(
                ResponseStatus.FAILED,
                error=_error("Internal server error; the server log has the details."),
            )
        if outcome is not None:
            await context.persist(
                self._store.finish, claim, outcome.status, outcome.body, outcome.error
            )

    async def _outcome(self, claim: Claim) -> ResponseOutcome | None:
        """None if the response has ended, was deleted, or has another owner."""
        context = self._context
        response = await context.persist(self._store.load, claim)
        if response is None:
            return None

        async def answer() -> ResponseOutcome:
            left_s = max(claim.deadline_at - context.clock.unix_time(), _MIN_DEADLINE_S)
            return await self._handler.answer(response, due_in_s=left_s)

        try:
            return await run_row(context, answer)
        except RowInterruptedError as error:
            return ResponseOutcome(ResponseStatus.FAILED, error=_error(str(error)))

    async def _sweep(self) -> None:
        """Delete expired responses."""
        context = self._context
        while True:
            try:
                await context.io(self._store.sweep, context.clock.unix_time())
            except (StoreUnavailableError, StoreFullError) as error:
                logger.warning("cannot delete expired responses: %s", error)
            except Exception:
                logger.exception("cannot delete expired responses")
            await asyncio.sleep(_SWEEP_S)

    async def _stop(self) -> None:
        """Stop all responses and release their leases."""
        tasks = [task for _, task in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._context.end(functools.partial(self._store.release, self._owner))


def _error(message: str) -> str:
    return json.dumps({"code": "server_error", "message": message})
