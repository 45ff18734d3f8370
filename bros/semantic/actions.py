"""What a session has decided and somebody else has to do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bros.semantic.nodes import Call, Turn, TurnState, Variable


@dataclass(frozen=True, slots=True)
class Start:
    """All that the turn needs is there: it goes to the engine. Once for each turn at most."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Promote:
    """A turn that was started as best-effort is real-time from now on."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Abort:
    """A turn that was started is not wanted any more."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Prefill:
    """The first `pieces` of the turn's call are known while what follows is being generated."""

    turn: Turn
    pieces: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The variable is READY, FAILED or CANCELLED: who waits for it can be told.

    call: which makes it; the graph may have forgotten that by now.
    """

    variable: Variable
    call: Call | None = None


Action = Start | Promote | Abort | Prefill | Settled


def still_due(actions: Iterable[Action]) -> Iterator[Action]:
    """Without what events since then have made pointless: nothing is done for turns that are over,
    and who was never started need not be aborted."""
    untouched: set[Turn] = set()  # turns whose Start is among these actions
    for action in actions:
        match action:
            case Start(turn):
                untouched.add(turn)
                if turn.started:
                    yield action
            case Promote(turn):
                if turn.started and turn not in untouched:
                    yield action
            case Abort(turn):
                if turn not in untouched:
                    yield action
            case Prefill(turn, pieces):
                if turn.state is TurnState.WAITING and pieces == turn.prefilled:
                    yield action
            case Settled():
                yield action
