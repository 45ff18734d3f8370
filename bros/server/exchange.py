"""What chat and text completions share: from a checked request to a response."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

import bros
from bros.core.request import SamplingParams
from bros.server import offload
from bros.server.answer import Answer, FinishedChoice
from bros.server.interrupts import run_interruptible
from bros.server.protocol import GenerationRequest
from bros.server.sse import EventStream
from bros.server.state import ServerState
from bros.server.stream import ChunkFrame, ChunkWriter
from bros.server.terms import slo_of, tier_of


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
        self._tier = tier_of(body)
        self._slo = slo_of(body, request.headers)
        self._answer: Answer | None = None
        info = self._state.engine.info
        self.header: dict[str, Any] = {
            "id": self._state.ids.new(id_prefix),
            "created": int(self._state.clock.unix_time()),
            "model": self._state.model_name,
            "service_tier": self._tier.used,
            # What besides seed and parameters decides the output.
            "system_fingerprint": (
                f"bros-{bros.__version__}-{info.weights}-{info.kernels}-{info.kv_dtype}"
            ),
        }

    def frame(self, kind: str) -> ChunkFrame:
        """For stream chunks whose `object` is `kind`."""
        options = self._body.stream_options
        return ChunkFrame(kind, self.header, include_usage=bool(options and options.include_usage))

    async def generate(self, prompts: Sequence[Sequence[int]], param: str) -> None:
        """Start on all prompts; to be awaited by what is given to `respond`.

        `param` is the field that holds the prompt. Raises what TextGenerator.start raises.
        """
        state, n = self._state, self._sampling.n
        base_id = self.header["id"]
        starts = [
            state.generator.start(
                prompt,
                self._sampling,
                request_id=base_id if len(prompts) == 1 else f"{base_id}-{i}",
                service_class=self._tier.service_class,
                slo=self._slo,
                tenant=self._body.safety_identifier or self._body.user or "",
                param=param,
            )
            for i, prompt in enumerate(prompts)
        ]
        observer = state.metrics.observer(self._tier.service_class, self._arrival_s)
        self._answer = await Answer.start(starts, n, observer)

    async def respond(
        self,
        start: Coroutine[Any, Any, None],
        writer: ChunkWriter,
        complete: Callable[[list[FinishedChoice], Answer], BaseModel],
    ) -> Response:
        """Run `start`, then stream through `writer` or wait and send what `complete` makes.

        Nothing is left running when the client leaves or anything fails.
        """
        receive, stopping = self._request.receive, self._state.stopping
        try:
            await run_interruptible(start, receive, stopping)
            assert self._answer is not None
            if self._body.stream:
                return EventStream(self._answer, writer, stopping)
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
