"""A step that is planned while the one before it runs.

Plans run in their order, so whatever the running step computes is there for the next one:

    its tokens     count as computed when they were committed, and others may share them already
    its samples    are PENDING: nobody knows them yet, but there will be one for each
    its end        is predicted: the next step begins then, and deadlines are judged as of then

What turns out otherwise (a stop token, an error, an abort) costs a row that runs for nothing.
"""

from __future__ import annotations

import dataclasses

from bros.scheduler.policies import Turn
from bros.scheduler.prefixes import Prefixes
from bros.scheduler.state import RequestState
from bros.scheduler.steps import Step


def can_be_foreseen(step: Step) -> bool:
    """Whether the next step can do without knowing what this one samples."""
    selected = step.packing.selected
    return not any(state.needs_history and state.remaining == 0 for state, _ in selected)


def foresee(step: Step, prefixes: Prefixes, ends_s: float) -> None:
    """Let the requests of the running step go on as if it were done, which it will be at `ends_s`.

    All tokens that it computes are known by now, though some were not when it was planned: they
    were sampled by the one before it. So prefixes are published as early as if steps did not
    overlap; who finds them reads them in a later step. And before the next step takes memory,
    because from then on a request may have lost some of what it has computed here.
    """
    if not step.foreseen:
        step.foreseen = True
        prefixes.publish(step.packing, ())
        for state, _ in step.packing.selected:
            # Also if it has left meanwhile, which is all the same.
            if state.samples and state.remaining == 0:
                state.expect_output(ends_s)


def turn_behind(turn: Turn) -> Turn:
    """The same without those that only wait for their end, for a step behind another one."""
    urgent, filler = filter(_has_more, turn.urgent), filter(_has_more, turn.filler)
    return dataclasses.replace(turn, urgent=urgent, filler=filler)


def _has_more(state: RequestState) -> bool:
    return len(state.token_ids) < state.max_length if state.samples else state.remaining > 0
