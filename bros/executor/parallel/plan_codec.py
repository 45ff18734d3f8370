"""A step as one message of int32 numbers, for the ranks that compute it but do not schedule.

    header     which message, what kind, and how many there are of what follows
    rows       places in the step before        [rows]
               query_start                      [rows + 1], as in AttentionBatch
               segment_start                    [rows + parts + 1], of rows, then of parts
    shared     row_start [parts + 1], rows [members], as in SharedParts; if there are parts
    tokens     token ids, positions, slots      [tokens] each
    samples    the tokens whose logits are wanted  [samples]
    changes    which numbers of the segments, and what they are    [changes] together
    copies     out_device, out_host             [out] each
               back_host, back_device           [back] each
    pending    which tokens, and their sources  [pending] each

Segments are most of a plan, 3,072 bytes per 4,096 tokens of context of a row, and next to none of
them change from step to step. So both ends guess that each row has what it had in the step before,
and a message says where that is wrong (kernels/segment_changes.py). Shared parts are rows to this,
behind those of the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bros.core.plan import SEGMENT_WIDTH, KvCopies, StepPlan
from bros.executor.feed import Pending
from bros.executor.inputs import StepInputs
from bros.executor.parallel.ranks import Message
from bros.kernels.interface import AttentionBatch, SharedParts
from bros.kernels.segment_changes import changed_segments, segment_changes

_STOP, _STEP, _OPEN_STEP = range(3)  # kinds; an open step may be aborted
_NUMBERS = 2**31  # messages are numbered from 0 up to this, and from 0 again
_NOTHING = np.zeros(1, np.int32), np.zeros(0, np.int32)  # starts and numbers of no rows
_NEW = -1  # the place in the step before of a row that was not in it


class _Header(NamedTuple):
    number: int
    kind: int
    rows: int = 0
    tokens: int = 0
    samples: int = 0
    parts: int = 0
    members: int = 0
    changes: int = 0
    out: int = 0
    back: int = 0
    pending: int = 0


_HEADER = len(_Header._fields)


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank is told to compute.

    inputs: those of the plan, without `samples`: who asked for a token, and how it is chosen, is
        known to rank 0 only.
    may_abort: whether rank 0 is asked on the way.
    sources: int32 [tokens], the place of each token among those that the step before chose, or -1
        where inputs.token_ids has it; None if that has all.
    """

    inputs: StepInputs
    copies: KvCopies | None
    may_abort: bool
    sources: Tensor | None


class PlanEncoder:
    """Makes messages for one PlanDecoder each on all other ranks, which must read all of them."""

    def __init__(self) -> None:
        self._number = 0
        self._names: list[str | tuple[str, int]] = []
        self._starts, self._numbers = _NOTHING

    def step(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        *,
        may_abort: bool = False,
        pending: Pending | None = None,
    ) -> Message:
        """inputs: those of the plan, as build_inputs makes them; their segments must stay as they
        are. pending: its tokens that only the device knows, where the sources say so."""
        attention = inputs.attention
        shared, parts_of_rows = attention.shared, []
        places, starts = self._places(plan), attention.segment_start.numpy()
        numbers = attention.segments.numpy().reshape(-1)
        num_parts = members = 0
        if shared is not None:
            starts = np.concatenate([starts, starts[-1] + shared.segment_start.numpy()[1:]])
            numbers = np.concatenate([numbers, shared.segments.numpy().reshape(-1)])
            parts_of_rows = [shared.row_start.numpy(), shared.rows.numpy()]
            num_parts, members = shared.num_parts, len(shared.rows)
        changes = segment_changes(self._starts, self._numbers, places, starts, numbers)
        self._starts, self._numbers = starts, numbers
        parts: list[Message | array[int]] = [
            places,
            attention.query_start.numpy(),
            starts,
            *parts_of_rows,
            inputs.token_ids.numpy(),
            inputs.positions.numpy(),
            inputs.slots.numpy(),
            inputs.sample_rows.numpy(),
            changes,
        ]
        out = back = waiting = 0
        if plan.copies is not None:
            copies = plan.copies
            out, back = len(copies.out_device), len(copies.back_device)
            parts += [copies.out_device, copies.out_host, copies.back_host, copies.back_device]
        if pending is not None:
            sources = pending.sources.numpy()
            waits = np.flatnonzero(sources >= 0).astype(np.int32)
            waiting = len(waits)
            parts += [waits, sources[waits]]
        kind = _OPEN_STEP if may_abort else _STEP
        rows, tokens, samples = len(plan.chunks), len(inputs.token_ids), len(inputs.sample_rows)
        sizes = (rows, tokens, samples, num_parts, members, len(changes))
        return self._message(parts, kind, *sizes, out, back, waiting)

    def stop(self) -> Message:
        """Nothing comes after this."""
        return self._message([], _STOP)

    def _message(self, parts: Sequence[Any], *header: int) -> Message:
        """parts: arrays of int32; numpy's types do not say that these are buffers."""
        head = array("i", _Header(self._number, *header))
        self._number = (self._number + 1) % _NUMBERS
        return np.frombuffer(bytearray().join([head, *parts]), np.int32)

    def _places(self, plan: StepPlan) -> Message:
        """Of each row and shared part in the step before; parts are named by their first row."""
        names: list[str | tuple[str, int]] = [chunk.request_id for chunk in plan.chunks]
        names += [(plan.chunks[part.rows[0]].request_id, part.first) for part in plan.shared]
        if names == self._names:
            return np.arange(len(names), dtype=np.int32)
        before = {name: place for place, name in enumerate(self._names)}
        self._names = names
        return np.array([before.get(name, _NEW) for name in names], np.int32)


class PlanDecoder:
    """Reads the messages of one PlanEncoder, all of them and in their order."""

    def __init__(self) -> None:
        self._number = 0
        self._starts, self._numbers = _NOTHING

    def __call__(self, message: Message) -> Step | None:
        """What is to be computed; None: stop. Tensors may share the message's memory, and must not
        be changed."""
        header = _Header(*message[:_HEADER].tolist())
        assert header.number == self._number, f"plan {header.number} after {self._number - 1}"
        self._number = (self._number + 1) % _NUMBERS
        if header.kind == _STOP:
            return None
        read = _Reader(message, _HEADER)
        rows, count = header.rows, header.rows + header.parts
        places, query_start, starts = (read.take(n) for n in (count, rows + 1, count + 1))
        row_start = read.tensor(header.parts + 1 if header.parts else 0)
        members = read.tensor(header.members)
        token_ids, positions, slots = (read.tensor(header.tokens) for _ in range(3))
        sample_rows = read.tensor(header.samples)
        changes = read.take(header.changes)
        numbers = changed_segments(self._starts, self._numbers, places, starts, changes)
        self._starts, self._numbers = starts, numbers
        segments = torch.from_numpy(numbers.reshape(-1, SEGMENT_WIDTH))
        border, shared = int(starts[rows]), None
        if header.parts:
            part_starts = torch.from_numpy(starts[rows:] - border)
            shared = SharedParts(row_start, members, part_starts, segments[border:])
        attention = AttentionBatch(
            torch.from_numpy(query_start),
            torch.from_numpy(starts[: rows + 1]),
            segments[:border],
            shared,
        )
        inputs = StepInputs(token_ids, positions, slots, attention, sample_rows, ())
        copies = None
        if header.out or header.back:
            counts = (header.out, header.out, header.back, header.back)
            copies = KvCopies(*map(read.numbers, counts))
        sources = None
        if header.pending:
            waits, found = read.take(header.pending), read.take(header.pending)
            sources = torch.full((header.tokens,), -1, dtype=torch.int32)
            sources.numpy()[waits] = found
        return Step(inputs, copies, header.kind == _OPEN_STEP, sources)


class _Reader:
    """Takes one part of a message after the other."""

    def __init__(self, message: Message, at: int) -> None:
        self._message = message
        self._at = at

    def take(self, count: int) -> Message:
        part = self._message[self._at : self._at + count]
        self._at += count
        return part

    def tensor(self, count: int) -> Tensor:
        return torch.from_numpy(self.take(count))

    def numbers(self, count: int) -> array[int]:
        numbers = array("i")
        numbers.frombytes(self.take(count).tobytes())
        return numbers
