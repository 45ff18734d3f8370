"""What chat and text completions share: from a checked request to a response."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import bros
from bros.core.request import SamplingParams
from bros.engine.generation import numbered
from bros.server import offload
from bros.server.answer import Answer, FinishedChoice
from bros.server.interrupts import run_interruptible
from bros.server.protocol import GenerationRequest
from bros.server.sse import EventStream
from bros.server.state import ServerState
from bros.server.stream import ChunkFrame, ChunkWriter
from bros.server.terms import slo_of, tier_of, tier_used


class Exchange:
    """One request for text and its response.

    Raises InvalidRequestError for wrong headers, EngineDeadError if there is no engine.
    """

    def __init__(
        self,
        request: Request,
        body: GenerationRequest,
        sampling: SamplingParams,
        *,
        id_prefix: str,
        arrival_s: float,
    ) -> None:
        self._state = ServerState.of(request)
        self._request = request
        self._body = body
        self._sampling = sampling
        self._arrival_s = arrival_s
        self._info = self._state.engine.info
        self._tier = tier_of(body)
        self._slo = slo_of(body, request.headers, self._info.default_slo)
        self._id = self._state.ids.new(id_prefix)
        self._created = int(self._state.clock.unix_time())
        self._answer: Answer | None = None

    @property
    def header(self) -> dict[str, Any]:
        """What all responses begin with. Once `generate` is done, for only then it is known
        what the engine serves the request as."""
        assert self._answer is not None
        info = self._info
        return {
            "id": self._id,
            "created": self._created,
            "model": self._state.model_name,
            "service_tier": tier_used(self._tier, best_effort=self._answer.best_effort),
            # What besides seed and parameters decides the output.
            "system_fingerprint": (
                f"bros-{bros.__version__}-{info.weights}-{info.kernels}-{info.kv_dtype}"
            ),
        }

    def frame(self, kind: str) -> ChunkFrame:
        """For stream chunks whose `object` is `kind`; available when `header` is."""
        options = self._body.stream_options
        return ChunkFrame(kind, self.header, include_usage=bool(options and options.include_usage))

    async def generate(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        """Start on all prompts; to be awaited by what is given to `respond`.

        `param` is the field that holds the prompt. Raises what TextGenerator.start raises.
        """
        state, n = self._state, self._sampling.n
        starts = [
            state.generator.start(
                prompt,
                self._sampling,
                request_id=request_id,
                service_class=self._tier.service_class,
                slo=self._slo,
                tenant=self._body.safety_identifier or self._body.user or "",
                cache_salt=self._body.cache_salt or "",
                param=param,
                arrival_s=self._arrival_s,
            )
            for request_id, prompt in zip(numbered(self._id, len(prompts)), prompts, strict=True)
        ]
        observe = partial(state.metrics.observer, self._arrival_s)
        self._answer = await Answer.start(starts, n, observe)
        state.recent.note(self._id, prompts=len(prompts), n=n)

    async def respond(
        self,
        start: Coroutine[Any, Any, None],
        make_writer: Callable[[], ChunkWriter],
        complete: Callable[[list[FinishedChoice], Answer], BaseModel],
    ) -> Response:
        """Run `start`, then stream through what `make_writer` makes, or wait and send what
        `complete` makes.

        Nothing is left running when the client leaves or anything fails.
        """
        receive, stopping = self._request.receive, self._state.stopping
        try:
            await run_interruptible(start, receive, stopping)
            assert self._answer is not None
            if self._body.stream:
                return EventStream(self._answer, make_writer(), stopping)
            choices = await run_interruptible(self._answer.collect(), receive, stopping)
            await self._answer.aclose()
        except BaseException:
            if self._answer is not None:
                await self._answer.aclose()
            raise
        answer = self._answer

        def render() -> str:
            return complete(choices, answer).model_dump_json()

        # Rendering the logprobs of one token costs about as much as a hundred of text.
        size = 100 * sum(len(choice.logprobs) for choice in choices)
        body = await offload.run(self._state, render, size)
        return Response(body, media_type="application/json")
