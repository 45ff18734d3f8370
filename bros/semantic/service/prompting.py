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
from bros.semantic.core.nodes import InputPiece, Level, Turn, Variable
from bros.semantic.core.prompt import PieceEncoder, Prompt
from bros.semantic.core.template import Text
from bros.semantic.errors import FailedStage
from bros.semantic.service.generating import TurnFailedError
from bros.semantic.service.live import ServedSession, SessionSettings
from bros.semantic.transforms import TransformError

T = TypeVar("T")

_LONG_CHARS = 4_000


class Prompter:
    """Adds to the prompts of calls. One for all sessions: constant texts are encoded once."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder

    async def grow(self, session: ServedSession, turn: Turn) -> Prompt:
        """The prompt of a turn, as far as the values in it are there.

        Raises TurnFailedError if the transform of an input fails.
        """
        record = session.record(turn.call.id)
        async with record.growing:
            prompt = record.prompt
            assert prompt is not None, "a call of the model that is not over"
            for piece in turn.call.pieces[prompt.num_pieces : turn.prompt_end]:
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
    """What transforms make of a text. Raises TurnFailedError (`stage`)."""
    try:
        return await off_loop(lambda: transforms(text), len(text))
    except TransformError as error:
        raise TurnFailedError(stage, str(error), variable) from error


async def off_loop(work: Callable[[], T], num_chars: int) -> T:
    """Do work, on a thread if it is long enough to hold up everybody else."""
    return work() if num_chars <= _LONG_CHARS else await asyncio.to_thread(work)


logger = logging.getLogger(__name__)

_LEAST_BLOCKS = 2
"""Fewer new ones are not worth a request of their own."""


class Prefiller:
    """Fills on behalf of turns that wait. Nothing depends on them: what fails is left out."""

    def __init__(
        self, prompter: Prompter, engine: EngineClient, clock: Clock, settings: SessionSettings
    ) -> None:
        self._prompter = prompter
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self.count = 0

    def begin(self, session: ServedSession, turn: Turn) -> asyncio.Task[None]:
        """Compute what is known of the turn's prompt, after what was known of it before."""
        record = session.record(turn.call.id)
        record.fill = asyncio.create_task(self._fill(session, turn, record.fill))
        return record.fill

    async def end(self, session: ServedSession, turn: Turn) -> None:
        """The turn runs now, or never will: what is unfinished is stopped."""
        fill = session.record(turn.call.id).fill
        if fill is not None:
            fill.cancel()
            await asyncio.gather(fill, return_exceptions=True)

    async def _fill(
        self, session: ServedSession, turn: Turn, before: asyncio.Task[None] | None
    ) -> None:
        record = session.record(turn.call.id)
        try:
            if before is not None:
                await before
            prompt = await self._prompter.grow(session, turn)
            token_ids, private_from = prompt.token_ids(), prompt.private_from
            block_size = self._engine.info.block_size
            whole = len(token_ids) // block_size * block_size  # only full blocks can be shared
            if whole - session.begun.num_tokens(token_ids) < _LEAST_BLOCKS * block_size:
                return
            session.begun.add(token_ids)
            self.count += 1
            request = EngineRequest(
                request_id=f"{turn.call.id}.{turn.index}-fill{len(token_ids)}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                service_class=ServiceClass.BE,
                arrival_s=self._clock.now(),
                tenant=session.tenant,
                cache_salt=session.sharing.cache_salt,
                fill=True,
                hints=Hints(
                    program=session.uid,
                    depth=turn.depth,
                    grouped=turn.label.level > Level.THROUGHPUT,
                    private_from=private_from,
                    private_salt=session.sharing.private_salt,
                    keep_s=self._settings.park_s,
                    early=True,
                ),
            )
            record.kept.add(request.request_id)
            if await self._run(request):
                record.turn(turn.index).prefilled_tokens = whole
        except (BrosError, TurnFailedError) as error:
            logger.debug("no prefill of %s: %s", turn.call.id, error)
        except Exception:
            logger.exception("the prefill of %s failed", turn.call.id)

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
