"""An engine that can be killed at any moment, and whose answers can be foretold."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence

from bros.core.errors import BrosError, EngineDeadError, InvalidRequestError
from bros.core.interfaces import EngineInfo, EngineReport, EngineStats, RequestTrace
from bros.core.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    TokenLogprobs,
    expanded,
    shortened,
)
from bros.engine.client import OutputStream
from bros.engine.messages import Outputs, Reply
from bros.engine.outbox import Outbox
from bros.simulator.virtual_loop import LoopClock

EOS = 0
VOCAB = 50
STEP_S = 0.01

INFO = EngineInfo(
    model="killable", weights="none", kernels="none", kv_dtype="none", device="none",
    max_model_len=1000, vocab_size=VOCAB, block_size=4, num_kv_blocks=100, policy="bros",
    yields=True, max_queue=10, eos_token_ids=(EOS,),
)  # fmt: skip


def next_token(token_ids: Sequence[int], num_output: int, sampling: SamplingParams) -> int:
    """Depends on all tokens before it, how many of them are output, and on the seed."""
    seed = 0 if sampling.greedy else sampling.seed
    token = zlib.crc32(repr((tuple(token_ids), num_output, seed)).encode()) % VOCAB
    return 1 + token % (VOCAB - 1) if num_output < sampling.min_tokens else token


def foretold(request: EngineRequest) -> list[int]:
    """What an engine that nothing happens to answers."""
    tokens = list(request.prompt_token_ids)
    answer: list[int] = []
    while len(answer) < (request.sampling.max_tokens or 10):
        answer.append(next_token(tokens + answer, len(answer), request.sampling))
        if answer[-1] == EOS:
            break
    return answer


class KillableEngine:
    """A ReportingClient: every step takes step_s, and gives each request a token.

    refusals: raised one by one on submission. killers: ids that end the engine when they begin.
    shed: ids that are refused after they were accepted. hung: it does nothing, nor answers.
    What was asked is in submitted, promoted and released, by id.
    """

    def __init__(self, step_s: float = STEP_S, info: EngineInfo = INFO) -> None:
        self.step_s = step_s
        self.info = info
        self.alive = False
        self.refusals: list[BrosError] = []
        self.killers: set[str] = set()
        self.shed: set[str] = set()
        self.hung = False
        self.submitted: dict[str, EngineRequest] = {}
        self.promoted: dict[str, Slo] = {}
        self.released: list[str] = []
        self.deaths = 0
        self.steps = 0
        self.closed = False
        self._open: dict[str, tuple[OutputStream, list[int]]] = {}
        self._aborted: set[str] = set()
        self._listener: Callable[[EngineReport], None] = lambda report: None
        self._worker: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.alive = True
        self._outbox = Outbox(self._deliver, LoopClock())
        self._listener(EngineReport(version=1, full=True))
        self._worker = asyncio.get_running_loop().create_task(self._work())

    def report(self) -> None:
        """Send a report."""
        self._listener(EngineReport(version=2))

    def die(self) -> None:
        """All that is open is lost."""
        if not self.alive:
            return
        self.alive = self.hung = False
        self.deaths += 1
        self.steps = 0
        assert self._worker is not None
        if self._worker is not asyncio.current_task():
            self._worker.cancel()
        for stream, _ in self._open.values():
            stream.put(EngineDeadError("The engine died."))
        self._open.clear()
        self._aborted.clear()

    def subscribe(self, listener: Callable[[EngineReport], None]) -> None:
        self._listener = listener

    @property
    def open_ids(self) -> set[str]:
        return set(self._open)

    async def submit(self, request: EngineRequest) -> OutputStream:
        deaths = self.deaths
        if request.request_id in self._open:
            raise InvalidRequestError("in use", "request_id")
        await asyncio.sleep(self.step_s / 2)
        await self._while_hung()
        if not self.alive or deaths != self.deaths:
            raise EngineDeadError("The engine is dead.")
        if self.refusals:
            raise self.refusals.pop(0)
        self.submitted[request.request_id] = request
        self._outbox.open(request)
        stream = OutputStream(request.service_class)
        self._open[request.request_id] = (stream, list(request.prompt_token_ids))
        return stream

    async def abort(self, request_id: str) -> None:
        if request_id in self._open:
            self._aborted.add(request_id)

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        if request_id in self._open:
            self.promoted[request_id] = slo

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def stats(self) -> EngineStats:
        await self._while_hung()
        if not self.alive:
            raise EngineDeadError("The engine is dead.")
        return EngineStats(steps=self.steps, kv_blocks_total=self.info.num_kv_blocks)

    async def trace(self, request_id: str) -> RequestTrace | None:
        if not self.alive:
            raise EngineDeadError("The engine is dead.")
        asked = self.submitted.get(request_id)
        if asked is None:
            return None
        return RequestTrace(
            request_id=request_id, service_class=asked.service_class,
            requested_class=ServiceClass.RT, slo=asked.slo, output_tokens=0,
            prompt_tokens=len(asked.prompt_token_ids), events=(), waits={},
        )  # fmt: skip

    async def close(self) -> None:
        self.die()
        self.closed = True

    async def _while_hung(self) -> None:
        while self.hung and self.alive:
            await asyncio.sleep(self.step_s)

    async def _work(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            await self._while_hung()
            self.steps += 1
            for request_id, (_, tokens) in list(self._open.items()):
                if request_id in self.killers:
                    self.die()
                    return
                self._outbox.send(Outputs((shortened(self._output(request_id, tokens)),)))
            self._outbox.flush_if_due()

    def _deliver(self, reply: Reply) -> None:
        assert isinstance(reply, Outputs)
        for output in map(expanded, reply.outputs):
            stream, _ = self._open[output.request_id]
            if output.finish_reason is not None:
                del self._open[output.request_id]
            stream.put(output)

    def _output(self, request_id: str, tokens: list[int]) -> RequestOutput:
        request = self.submitted[request_id]
        if request_id in self._aborted:
            self._aborted.remove(request_id)
            return RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)
        if request_id in self.shed:
            return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR,
                                 error="Too busy.", retry_after_s=2.0)  # fmt: skip
        if request.prefill_only:
            return RequestOutput(request_id=request_id, finish_reason=FinishReason.LENGTH)
        num_output = len(tokens) - len(request.prompt_token_ids) + request.resumed
        token_id = next_token(tokens, num_output, request.sampling)
        tokens.append(token_id)
        reason = None
        if token_id == EOS:
            reason = FinishReason.STOP
        elif num_output + 1 >= (request.sampling.max_tokens or 10):
            reason = FinishReason.LENGTH
        logprobs = ()
        if request.sampling.logprobs is not None:
            logprobs = (TokenLogprobs(token_id, -float(num_output)),)
        return RequestOutput(
            request_id=request_id, token_ids=(token_id,), logprobs=logprobs, finish_reason=reason,
            cached_tokens=len(request.prompt_token_ids) // 4 * 4 * (num_output == request.resumed),
        )  # fmt: skip
