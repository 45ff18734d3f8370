"""An engine for programs: it answers what it is told to, and keeps account of everything."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineInfo, EngineStats, RequestTrace
from bros.core.request import (
    EngineRequest,
    FinishReason,
    IdGenerator,
    RequestOutput,
    ServiceClass,
    Slo,
)
from bros.semantic.service.live import SessionSettings
from bros.semantic.service.runner import Router
from bros.semantic.service.service import SessionService
from bros.simulator.virtual_loop import LoopClock
from bros.text.generation import TextGenerator
from support.played_stream import PlayedStream
from support.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
assert EOS is not None
BLOCK = 4
MAX_LEN = 2000
STEP_S = 0.01


def byte_ids(text: str) -> tuple[int, ...]:
    """One token per byte, which is never how a longer text is encoded."""
    return tuple(token for char in text for token in TOKENIZER.encode(char))


def text_of(token_ids: Sequence[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=False)


def echo(prompt: str) -> str:
    """An answer that depends on all of the prompt."""
    return f"<{zlib.crc32(prompt.encode()):08x}>"


class ProgramEngine:
    """An EngineClient: each request takes step_s for every block of its prompt, then for a token.

    answer: prompt -> text, or its tokens. Tests set: `refusals`, raised one by one on submission;
    `errors`: last outputs, given instead of an answer one by one; `relegates`. `die` and `revive`
    are for the whole engine. open: requests that are being worked on; most_open: at once so far.
    cached: share of each prompt that it says was cached.
    kept: ids whose KV is kept. What was asked is in submitted, aborted, promoted, released;
    awaited: whether those that were promoted are waited for alone.
    """

    def __init__(
        self, answer: Callable[[str], str | Sequence[int]] = echo, step_s: float = STEP_S
    ) -> None:
        self.answer = answer
        self.step_s = step_s
        self.cached = 0.0
        self.alive = True
        self.refusals: list[BaseException] = []
        self.errors: list[RequestOutput] = []
        self.relegates = False
        self.submitted: list[EngineRequest] = []
        self.submitted_s: dict[str, float] = {}
        self.aborted: list[str] = []
        self.promoted: dict[str, Slo] = {}
        self.awaited: dict[str, bool] = {}
        self.released: list[str] = []
        self.open: dict[str, asyncio.Future[None]] = {}
        self._streams: dict[str, PlayedStream] = {}
        self.most_open = 0
        self.kept: set[str] = set()
        self.info = EngineInfo(
            model="fake", weights="none", kernels="none", kv_dtype="none", device="none",
            max_model_len=MAX_LEN, vocab_size=TOKENIZER.vocab_size, block_size=BLOCK,
            num_kv_blocks=1000, policy="bros", yields=True, eos_token_ids=(EOS,),
        )  # fmt: skip

    async def submit(self, request: EngineRequest) -> PlayedStream:
        await asyncio.sleep(0)
        if not self.alive:
            raise EngineDeadError("The engine is dead.")
        assert request.request_id not in self.submitted_s, "ids are never used twice"
        if self.refusals:
            raise self.refusals.pop(0)
        self.submitted.append(request)
        self.submitted_s[request.request_id] = asyncio.get_running_loop().time()
        self.open[request.request_id] = asyncio.get_running_loop().create_future()
        self.most_open = max(self.most_open, len(self.open))
        served = ServiceClass.BE if self.relegates else request.service_class
        stream = PlayedStream(served, self._outputs(request, self.open[request.request_id]))
        self._streams[request.request_id] = stream
        return stream

    async def abort(self, request_id: str) -> None:
        if request_id in self.open:
            self.aborted.append(request_id)
            del self.open[request_id]
            self._streams[request_id].stop()

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        if request_id in self.open:
            self.promoted[request_id] = slo
            self.awaited[request_id] = awaited

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self.kept.discard(request_id)

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def trace(self, request_id: str) -> RequestTrace | None:
        return None

    async def close(self) -> None:
        return None

    def die(self) -> None:
        """All that is open is lost."""
        self.alive = False
        for future in self.open.values():
            if not future.done():
                future.set_exception(EngineDeadError("The engine died."))
        self.open.clear()
        self.kept.clear()

    def revive(self) -> None:
        self.alive = True

    def llm_calls(self) -> list[EngineRequest]:
        """Requests that generate, in the order in which they came."""
        return [request for request in self.submitted if not request.prefill_only]

    def fills(self) -> list[EngineRequest]:
        return [request for request in self.submitted if request.prefill_only]

    async def _outputs(
        self, request: EngineRequest, death: asyncio.Future[None]
    ) -> AsyncIterator[RequestOutput]:
        await self._work(death, self.step_s * (1 + len(request.prompt_token_ids) // BLOCK))
        if self.errors and not request.prefill_only:
            yield self._last(request, self.errors.pop(0))
            return
        if request.prefill_only:
            yield self._last(
                request, RequestOutput(request_id="", finish_reason=FinishReason.LENGTH)
            )
            return
        answer = self.answer(text_of(request.prompt_token_ids))
        script = [*(byte_ids(answer) if isinstance(answer, str) else answer), EOS]
        most = request.sampling.max_tokens or MAX_LEN
        for count, token_id in enumerate(script[:most], start=1):
            output = RequestOutput(
                request_id=request.request_id,
                token_ids=(token_id,),
                cached_tokens=round(self.cached * len(request.prompt_token_ids)),
            )
            if token_id == EOS or count == most:
                output.finish_reason = FinishReason.STOP if token_id == EOS else FinishReason.LENGTH
                yield self._last(request, output)
                return
            yield output
            await self._work(death, self.step_s)

    async def _work(self, death: asyncio.Future[None], seconds: float) -> None:
        if (await asyncio.wait({death}, timeout=seconds))[0]:
            death.result()

    def _last(self, request: EngineRequest, output: RequestOutput) -> RequestOutput:
        output.request_id = request.request_id
        self.open.pop(request.request_id, None)
        if request.hints.keep_s and output.finish_reason is not FinishReason.ERROR:
            self.kept.add(request.request_id)
        return output


def make_service(
    engine: Any, seed: int = 0, router: Router | None = None, **settings: Any
) -> SessionService:
    """A service over an engine, in the time of the running loop."""
    ids, clock = IdGenerator(random.Random(seed)), LoopClock()
    generator = TextGenerator(engine, TOKENIZER, clock, ids)
    return SessionService(
        generator, engine, TOKENIZER, clock, ids, SessionSettings(**settings), router
    )
