"""Turns of the event loop that have no time left, for tests."""

from __future__ import annotations

import dataclasses
import itertools

from bros.server.turns import MAX_TURN_S, LoopTurns
from support.scripted_server import Server


def used_up_turns() -> LoopTurns:
    """Turns of a loop that computes for so long that each of them has time for one thing only."""
    reads = itertools.count()
    return LoopTurns(lambda: next(reads) * 2 * MAX_TURN_S)


def use_turns(server: Server, turns: LoopTurns) -> None:
    """Let the requests of a server begin in these turns."""
    server.app.state.server = dataclasses.replace(server.state, turns=turns)
