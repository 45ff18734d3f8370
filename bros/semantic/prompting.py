"""The prompts of calls, made as far as the values in them are known."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from bros.semantic.errors import FailedStage
from bros.semantic.generating import TurnFailedError
from bros.semantic.live import LiveSession
from bros.semantic.nodes import InputPiece, Turn, Variable
from bros.semantic.prompt import PieceEncoder, Prompt
from bros.semantic.template import Text
from bros.semantic.transforms import TransformError

T = TypeVar("T")

_LONG_CHARS = 4_000


class Prompter:
    """Adds to the prompts of calls. One for all sessions: constant texts are encoded once."""

    def __init__(self, encoder: PieceEncoder) -> None:
        self._encoder = encoder

    async def grow(self, session: LiveSession, turn: Turn) -> Prompt:
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
                variable = session.core.graph.variables[piece.variable_id]
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
