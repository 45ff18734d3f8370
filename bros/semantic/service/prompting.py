"""The prompts of calls: they grow as values come, and their known beginnings are prefilled ahead.

producer   | prefill | decode ............................. |
consumer             | prefill-only: its beginning |        | prefill: the value | decode ...
                                                kept ───────┘ released at its first token
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from bros.core.clock import Clock
from bros.core.errors import BrosError
from bros.core.interfaces import EngineClient
from bros.core.request import EngineRequest, FinishReason, Hints, SamplingParams, ServiceClass
from bros.semantic.core.nodes import InputPiece, Level, LlmCall, Variable
from bros.semantic.core.prompt import PieceEncoder, Prompt
from bros.semantic.core.template import Text
from bros.semantic.errors import FailedStage
from bros.semantic.service.generating import LlmCallFailedError
from bros.semantic.service.live import ServedSession, SessionSettings
from bros.semantic.transforms import TransformError

T = TypeVar("T")

_LONG_CHARS = 4_000


class Prompter:
    """Adds to the prompts of calls. One for all sessions: constant texts are encoded once."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder

    async def grow(self, session: ServedSession, llm_call: LlmCall) -> Prompt:
        """The prompt of an LLM call, as far as the values in it are there.

        Raises LlmCallFailedError if the transform of an input fails.
        """
        record = session.record(llm_call.call.id)
        async with record.growing:
            prompt = record.prompt
            assert prompt is not None, "a call of the model that is not over"
            for piece in llm_call.call.pieces[prompt.num_pieces : llm_call.prompt_end]:
                first = not prompt.num_tokens
                if isinstance(piece, Text):
                    prompt.add(await self._constant(piece.text, first=first))
                    continue
                variable = session.machine.graph.variables[piece.variable_id]
                if not isinstance(piece, InputPiece) or variable.text is None:
                    break
                prompt.add(await self._value(piece, variable, first=first), variable.id)
            return prompt

    async def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text inside of a prompt."""
        return await off_loop(lambda: self._encoder.encode(text, first=False), len(text))

    async def _constant(self, text: str, *, first: bool) -> tuple[int, ...]:
        known = self._encoder.known(text, first=first)
        if known is not None:
            return known
        token_ids = await off_loop(lambda: self._encoder.encode(text, first=first), len(text))
        self._encoder.remember(text, token_ids, first=first)
        return token_ids

    async def _value(
        self, piece: InputPiece, variable: Variable, *, first: bool
    ) -> tuple[int, ...]:
        text, transforms = variable.text, piece.transforms
        assert text is not None
        if transforms is None and variable.token_ids is not None:
            return variable.token_ids  # what was generated, and not what its text is encoded as
        if transforms is not None:
            text = await apply(transforms, text, FailedStage.FILL, variable.id)
        return await off_loop(lambda: self._encoder.encode(text, first=first), len(text))


async def apply(
    transforms: Callable[[str], str], text: str, stage: FailedStage, variable: str
) -> str:
    """What transforms make of a text. Raises LlmCallFailedError (`stage`)."""
    try:
        return await off_loop(lambda: transforms(text), len(text))
    except TransformError as error:
        raise LlmCallFailedError(stage, str(error), variable) from error


async def off_loop(work: Callable[[], T], num_chars: int) -> T:
    """Do work, on a thread if it is long enough to hold up everybody else."""
    return work() if num_chars <= _LONG_CHARS else await asyncio.to_thread(work)


logger = logging.getLogger(__name__)

_LEAST_BLOCKS = 2
"""Fewer new ones are not worth a request of their own."""


class Prefiller:
    """Prefill-only requests for LLM calls that wait. Their errors are logged and ignored."""

    def __init__(
        self, prompter: Prompter, engine: EngineClient, clock: Clock, settings: SessionSettings
    ) -> None:
        self._prompter = prompter
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self.count = 0

    def begin(self, session: ServedSession, llm_call: LlmCall) -> asyncio.Task[None]:
        """Compute what is known of the LLM call's prompt, after what was known of it before."""
        record = session.record(llm_call.call.id)
        record.prefill = asyncio.create_task(self._prefill(session, llm_call, record.prefill))
        return record.prefill

    async def end(self, session: ServedSession, llm_call: LlmCall) -> None:
        """The LLM call runs now, or never will: what is unfinished is stopped."""
        prefill = session.record(llm_call.call.id).prefill
        if prefill is not None:
            prefill.cancel()
            await asyncio.gather(prefill, return_exceptions=True)

    async def _prefill(
        self, session: ServedSession, llm_call: LlmCall, before: asyncio.Task[None] | None
    ) -> None:
        record = session.record(llm_call.call.id)
        try:
            if before is not None:
                await before
            prompt = await self._prompter.grow(session, llm_call)
            token_ids, private_from = prompt.token_ids(), prompt.private_from
            block_size = self._engine.info.block_size
            whole = len(token_ids) // block_size * block_size  # only full blocks can be shared
            if whole - session.begun.num_tokens(token_ids) < _LEAST_BLOCKS * block_size:
                return
            session.begun.add(token_ids)
            self.count += 1
            request = EngineRequest(
                request_id=f"{llm_call.call.id}.{llm_call.index}-fill{len(token_ids)}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                service_class=ServiceClass.BE,
                arrival_s=self._clock.now(),
                tenant=session.tenant,
                cache_salt=session.sharing.cache_salt,
                prefill_only=True,
                hints=Hints(
                    program=session.uid,
                    depth=llm_call.depth,
                    grouped=llm_call.label.level > Level.THROUGHPUT,
                    private_from=private_from,
                    private_salt=session.sharing.private_salt,
                    keep_s=self._settings.park_s,
                    early=True,
                ),
            )
            record.kept.add(request.request_id)
            if await self._run(request):
                record.llm_call(llm_call.index).prefilled_tokens = whole
        except (BrosError, LlmCallFailedError) as error:
            logger.debug("no prefill of %s: %s", llm_call.call.id, error)
        except Exception:
            logger.exception("the prefill of %s failed", llm_call.call.id)

    async def _run(self, request: EngineRequest) -> bool:
        """Whether the engine did it."""
        outputs = aiter(await self._engine.submit(request))
        reason = None
        try:
            while reason is None:
                reason = (await anext(outputs)).finish_reason
        finally:
            if reason is None:
                await self._engine.abort(request.request_id)
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
        return reason is FinishReason.LENGTH
