"""Hidden states of suspended steps, until their rows continue (core.plan.Kept).

    step 7   rows     0  1  2        suspended before layer 12:   keeps 0, 1, 2 at 12
    step 9   rows     3  0  1        suspended before layer 20:   keeps 3, 0, 1 at 20; 2 still at 12
    step 10  rows  4  2  3  0  1     4 begins with layer 0, 2 joins it at 12, the others at 20

Between two layers, a row is nothing but its residual and the output of the last MLP, which is not
added yet: both are [tokens, hidden].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from bros.core.plan import Kept, SuspendedStep
from bros.executor.inputs import StepInputs
from bros.executor.models.decoder import Joining, State, Stopped


class KeptStates:
    """The kept hidden states of one rank. All ranks get the same inputs, so they keep the same."""

    def __init__(self) -> None:
        self._states: dict[Kept, State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def drop(self, dropped: Iterable[Kept]) -> None:
        for kept in dropped:
            del self._states[kept]

    def clear(self) -> None:
        self._states.clear()

    def take(
        self, inputs: StepInputs, upload: Callable[[StepInputs], StepInputs]
    ) -> tuple[StepInputs | None, Sequence[Joining]]:
        """Take what the step continues. Returns (inputs of the rows that begin with the first
        layer, None if there are none; the rows that join later).

        inputs: on the host.
        upload: brings inputs to the device.
        """
        count = inputs.attention.num_rows
        row = count - len(inputs.kept)
        first = upload(inputs if row == count else inputs.first(row)) if row else None
        joining = []
        starts = inputs.attention.query_start.tolist() if inputs.kept else []
        for layer, group in itertools.groupby(inputs.kept, key=lambda kept: kept.layer):
            states = []
            for kept in group:
                states.append(self._take(kept, starts[row + 1] - starts[row]))
                row += 1
            so_far = upload(inputs if row == count else inputs.first(row))
            joining.append(Joining(layer, so_far, _stacked(states)))
        return first, joining

    def _take(self, kept: Kept, num_tokens: int) -> State:
        """The first tokens of what is kept; the others stay."""
        state = self._states.pop(kept)
        length = len(state[0])
        if num_tokens < length:
            rest = kept._replace(first=kept.first + num_tokens)
            self._states[rest] = _rows(state, num_tokens, length)
            state = _rows(state, 0, num_tokens)
        return state

    def suspend(
        self, inputs: StepInputs, stopped: Stopped, joining: Sequence[Joining], num_layers: int
    ) -> SuspendedStep:
        """Keep the rows of a step that was stopped before a layer.

        inputs, joining: as of `take`.
        """
        layer, starts = stopped.layer, inputs.attention.query_start.tolist()
        fresh = len(starts) - 1 - len(inputs.kept)
        row = 0
        if layer > 0:
            row = fresh + sum(kept.layer < layer for kept in inputs.kept)
            for index, (start, end) in enumerate(itertools.pairwise(starts[: row + 1])):
                kept = Kept(inputs.step, index, layer)
                self._states[kept] = _rows(stopped.state, start, end)
        row = max(row, fresh)
        for joins in joining:
            if joins.layer < layer:
                continue
            first = starts[row]
            while row < len(starts) - 1 and inputs.kept[row - fresh].layer == joins.layer:
                kept = inputs.kept[row - fresh]
                place = starts[row] - first, starts[row + 1] - first
                self._states[kept] = _rows(joins.state, *place)
                row += 1
        return SuspendedStep(inputs.step, layer, num_layers)


def _rows(state: State, start: int, end: int) -> State:
    """Copies of some rows, which do not keep the others in memory."""
    residual, delta = state
    return residual[start:end].clone(), None if delta is None else delta[start:end].clone()


def _stacked(states: Sequence[State]) -> State:
    residuals = torch.cat([residual for residual, _ in states])
    deltas = [delta for _, delta in states if delta is not None]
    return residuals, torch.cat(deltas) if deltas else None
