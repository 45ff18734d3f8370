"""Grammars of outputs, for tests without llguidance and with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bros.core.interfaces import StopRule


@dataclass
class Script:
    """A grammar of token ids: at each position of the output one of some tokens, then its end.

    positions: the allowed tokens; a single one is forced.
    """

    positions: Sequence[Sequence[int]]
    states: list[ScriptState] = field(default_factory=list)

    def start(self, request: object, stops: StopRule) -> ScriptState:
        """A scheduler's StartGrammar."""
        self.states.append(ScriptState(self.positions, stops))
        return self.states[-1]


class ScriptState:
    """Implements GrammarState."""

    def __init__(self, positions: Sequence[Sequence[int]], stops: StopRule) -> None:
        self._positions = positions
        self.stops = stops
        self.tokens: list[int] = []

    def advance(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        for token_id in token_ids:
            if token_id not in self.at(len(self.tokens)):
                raise ValueError(f"{token_id} is not allowed")
            self.tokens.append(token_id)
        forced: list[int] = []
        while len(forced) < most and len(self.at(len(self.tokens))) == 1:
            (token_id,) = self.at(len(self.tokens))
            forced.append(token_id)
            if token_id == self.stops.end:
                break
            self.tokens.append(token_id)
        return forced

    def constraint(self, ahead: int = 0) -> ScriptConstraint:
        return ScriptConstraint(self, len(self.tokens) + ahead)

    def at(self, index: int) -> Sequence[int]:
        """The tokens that are allowed at a position of the output."""
        return self._positions[index] if index < len(self._positions) else (self.stops.end,)


class ScriptConstraint:
    """Implements TokenConstraint."""

    def __init__(self, state: ScriptState, index: int) -> None:
        self._state = state
        self._index = index

    def allowed(self) -> Sequence[int] | None:
        """The allowed tokens; None if the sample will be ignored."""
        return self._state.at(self._index) if self._index == len(self._state.tokens) else None

    def allows(self, token_id: int) -> bool:
        allowed = self.allowed()
        return allowed is None or token_id in allowed

    def mask(self) -> bytes:
        allowed = self.allowed()
        if allowed is None:
            return b"\xff" * 200
        mask = bytearray(max(allowed) // 8 + 1)
        for token_id in allowed:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)
