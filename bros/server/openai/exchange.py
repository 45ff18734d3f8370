"""From a call to its answer, over HTTP or elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import bros
from bros.core.errors import BrosError
from bros.core.request import NO_HINTS, ServiceClass, Slo
from bros.semantic.service.runner import PlainCall
from bros.server import http as offload
from bros.server.http import UntilClientLeaves
from bros.server.openai.calls import Call, Tier, slo_of, tier_of, tier_used
from bros.server.openai.stream import Answer, AnswerStream, ChunkFrame, Observer
from bros.server.sessions.joining import JoinedObserver
from bros.server.state import ServerState
from bros.text.generation import choice_ids


class Exchange:
    """One call and its answer. Close it in any case: nothing else ends what runs for it."""

    def __init__(
        self,
        state: ServerState,
        call: Call,
        *,
        tier: Tier,
        slo: Slo,
        tenant: str,
        arrival_s: float,
        joined: PlainCall | None = None,
    ) -> None:
        """arrival_s: on the state's clock; objectives count from then. joined: the session that
        the call is part of."""
        self._state = state
        self._call = call
        self._tier = tier
        self._slo = slo
        self._tenant = tenant
        self._arrival_s = arrival_s
        self._joined = joined
        self._id = state.ids.new(call.id_prefix)
        self._created = int(state.clock.unix_time())
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """What the engine gives; once `start` is done."""
        assert self._answer is not None
        return self._answer

    @property
    def header(self) -> dict[str, Any]:
        """What all responses begin with. Once `start` is done, for only then it is known what
        the engine serves the request as."""
        info = self._state.engine.info
        return {
            "id": self._id,
            "created": self._created,
            "model": self._state.model_name,
            "service_tier": tier_used(self._tier, best_effort=self.answer.best_effort),
            # What besides seed and parameters decides the output.
            "system_fingerprint": (
                f"bros-{bros.__version__}-{info.weights}-{info.kernels}-{info.kv_dtype}"
            ),
        }

    async def start(self) -> None:
        """Hand over all prompts. Raises what `Call.prompts` and TextGenerator.start raise."""
        state, call = self._state, self._call
        prompts = await call.prompts()
        hints = NO_HINTS if self._joined is None else self._joined.hints
        generation = await state.generator.start(
            prompts,
            call.sampling,
            request_id=self._id,
            service_class=self._tier.service_class,
            slo=self._slo,
            tenant=self._tenant,
            cache_salt=call.body.cache_salt or "",
            param=call.param,
            arrival_s=self._arrival_s,
            hints=hints,
        )
        self._answer = Answer(generation, partial(self._observer, prompts))
        state.recent.note(self._id, prompts=len(prompts), n=call.sampling.n)

    async def complete(self) -> str:
        """Wait for everything; the response as JSON. Raises what Answer.collect raises."""
        choices = await self.answer.collect()
        await self.answer.aclose()

        def render() -> str:
            return self._call.reply(self.header, choices, self.answer).model_dump_json()

        # Rendering the logprobs of one token costs about as much as a hundred of text.
        size = 100 * sum(len(choice.logprobs) for choice in choices)
        return await offload.run(self._state, render, size)

    async def aclose(self) -> None:
        """Abort what is unfinished."""
        if self._answer is not None:
            await self._answer.aclose()

    def _observer(
        self, prompts: Sequence[Sequence[int]], classes: Sequence[ServiceClass]
    ) -> Observer:
        observer = self._state.metrics.observer(self._arrival_s, classes)
        joined = self._joined
        if joined is None:
            return observer
        engine_ids = choice_ids(self._id, len(prompts), self._call.sampling.n)
        served_as = ServiceClass.BE if ServiceClass.BE in classes else ServiceClass.RT
        joined.accepted(served_as, engine_ids)
        prompt_tokens = sum(map(len, prompts))
        return JoinedObserver(
            joined, observer, num_choices=len(classes), prompt_tokens=prompt_tokens
        )

    def stream(self) -> AnswerStream:
        """The answer as events; closing it is the stream's business from then on."""
        call, options = self._call, self._call.body.stream_options
        include_usage = bool(options and options.include_usage)
        frame = ChunkFrame(call.chunk_kind, self.header, include_usage=include_usage)
        return AnswerStream(self.answer, call.writer(frame), self._state.stopping)


async def respond(
    request: Request,
    call: Call,
    arrival_s: float,
    joined: PlainCall | None = None,
    deadline_ms: float | None = None,
) -> Response:
    """Answer a call that came over HTTP. joined: the session that it is part of. deadline_ms: if
    the request has none in the usual places.

    Nothing is left running when the client leaves or anything fails. Raises InvalidRequestError
    for wrong headers, EngineDeadError if there is no engine, and what Exchange raises.
    """
    state = ServerState.of(request)
    try:
        slo = slo_of(call.body, request.headers, state.engine.info.default_slo, deadline_ms)
        exchange = _exchange(state, call, slo, arrival_s, joined)
        return await _answer(request, state, exchange, call)
    except BaseException as error:
        if joined is not None:
            if isinstance(error, BrosError):
                joined.failed(str(error))
            else:
                joined.cancelled()
        raise


def _exchange(
    state: ServerState, call: Call, slo: Slo, arrival_s: float, joined: PlainCall | None
) -> Exchange:
    body = call.body
    return Exchange(
        state,
        call,
        tier=tier_of(body),
        slo=slo,
        tenant=body.safety_identifier or body.user or "",
        arrival_s=arrival_s,
        joined=joined,
    )


async def _answer(request: Request, state: ServerState, exchange: Exchange, call: Call) -> Response:
    try:
        async with UntilClientLeaves(request.receive, state.stopping):
            await exchange.start()
            if call.body.stream:
                return exchange.stream()
            reply = await exchange.complete()
    except BaseException:
        await exchange.aclose()
        raise
    return Response(reply, media_type="application/json")
