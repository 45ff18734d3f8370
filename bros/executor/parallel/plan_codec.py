"""Encodes a step as one int32 message, from rank 0 to the ranks that compute it without scheduling.

    header     see _Header
    rows       index in the previous step, -1 if new   [rows + parts]
               query_start                             [rows + 1], as in AttentionBatch
               segment_start                           [rows + parts + 1], of rows, then of parts
    shared     row_start [parts + 1], rows [members]   as in SharedParts; only if there are parts
    tokens     token ids, positions, slots             [tokens] each
    samples    indexes of the tokens to sample from    [samples]
    reads      indexes of the tokens to read           [reads]
    changes    indexes of changed numbers of segments, then their values   [changes] together
    copies     out_device, out_host                    [out] each
               back_host, back_device                  [back] each
    pending    indexes of pending tokens, then their sources   [pending] each
    kept       what the last rows continue, then what is dropped, as in Kept
                                                       [kept, 4], [dropped, 4]

Segments are most of a plan, 3,072 bytes per 4,096 tokens of context of a row, and very few change
from step to step. So both ends predict that each row keeps its segments of the previous step, and
a message carries only the differences (kernels/segment_changes.py). The codec treats shared parts
as further rows behind those of the plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bros.core.plan import SEGMENT_WIDTH, Kept, KvCopies, StepPlan
from bros.executor.inputs import PendingTokens, StepInputs
from bros.executor.parallel.ranks import Message
from bros.kernels.interface import AttentionBatch, SharedParts
from bros.kernels.segment_changes import changed_segments, segment_changes

_STOP, _STEP, _ABORTABLE_STEP = range(3)  # kinds of messages
_NUMBERS = 2**31  # message numbers wrap around here
_NO_ROWS = np.zeros(1, np.int32), np.zeros(0, np.int32)  # starts and numbers of no rows
_NEW = -1  # index in the previous step of a row that was not in it


class _Header(NamedTuple):
    """The start of a message. The fields after `kind` count what follows.

    number: of the message.
    kind: see above.
    step: number of the plan, which names what is kept if the step is suspended.
    """

    number: int
    kind: int
    rows: int = 0
    tokens: int = 0
    samples: int = 0
    reads: int = 0
    scored: int = 0
    parts: int = 0
    members: int = 0
    changes: int = 0
    out: int = 0
    back: int = 0
    pending: int = 0
    kept: int = 0
    dropped: int = 0
    step: int = 0


_HEADER = len(_Header._fields)


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """A decoded step.

    inputs: of the plan, but with `samples` and `readouts` empty: only rank 0 has the logits.
    copies: KV copies of the plan.
    may_abort: whether rank 0 may abort the step between layers.
    sources: int32 [tokens], as in PendingTokens; None if inputs.token_ids has all tokens.
    """

    inputs: StepInputs
    copies: KvCopies | None
    may_abort: bool
    sources: Tensor | None


class PlanEncoder:
    """Encodes the messages of rank 0. Every other rank has a PlanDecoder that reads all of them."""

    def __init__(self) -> None:
        self._number = 0
        self._names: list[str | tuple[str, int]] = []
        self._starts, self._numbers = _NO_ROWS

    def step(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        *,
        may_abort: bool = False,
        pending: PendingTokens | None = None,
    ) -> Message:
        """The message for a plan.

        inputs: from build_inputs. The encoder keeps their segments, which must not be changed.
        pending: input tokens that only the device knows.
        """
        attention = inputs.attention
        shared, parts_of_rows = attention.shared, []
        previous_rows, starts = self._previous_rows(plan), attention.segment_start.numpy()
        numbers = attention.segments.numpy().reshape(-1)
        num_parts = members = 0
        if shared is not None:
            starts = np.concatenate([starts, starts[-1] + shared.segment_start.numpy()[1:]])
            numbers = np.concatenate([numbers, shared.segments.numpy().reshape(-1)])
            parts_of_rows = [shared.row_start.numpy(), shared.rows.numpy()]
            num_parts, members = shared.num_parts, len(shared.rows)
        changes = segment_changes(self._starts, self._numbers, previous_rows, starts, numbers)
        self._starts, self._numbers = starts, numbers
        parts: list[Message | array[int]] = [
            previous_rows,
            attention.query_start.numpy(),
            starts,
            *parts_of_rows,
            inputs.token_ids.numpy(),
            inputs.positions.numpy(),
            inputs.slots.numpy(),
            inputs.sample_rows.numpy(),
            inputs.read_rows.numpy(),
            changes,
        ]
        out = back = num_pending = 0
        if plan.copies is not None:
            copies = plan.copies
            out, back = len(copies.out_device), len(copies.back_device)
            parts += [copies.out_device, copies.out_host, copies.back_host, copies.back_device]
        if pending is not None:
            sources = pending.sources.numpy()
            at = np.flatnonzero(sources >= 0).astype(np.int32)
            num_pending = len(at)
            parts += [at, sources[at]]
        kind = _ABORTABLE_STEP if may_abort else _STEP
        rows, tokens, samples = len(plan.chunks), len(inputs.token_ids), len(inputs.sample_rows)
        reads = len(inputs.read_rows)
        sizes = (rows, tokens, samples, reads, inputs.num_scored, num_parts, members, len(changes))
        for kept in (*inputs.kept, *inputs.dropped):
            parts.append(array("i", kept._replace(step=kept.step % _NUMBERS)))
        of_kept = len(inputs.kept), len(inputs.dropped), inputs.step % _NUMBERS
        return self._message(parts, kind, *sizes, out, back, num_pending, *of_kept)

    def stop(self) -> Message:
        """The last message."""
        return self._message([], _STOP)

    def _message(self, parts: Sequence[Any], *header: int) -> Message:
        """parts: int32 arrays, typed Any because numpy's stubs do not declare them as buffers."""
        head = array("i", _Header(self._number, *header))
        self._number = (self._number + 1) % _NUMBERS
        return np.frombuffer(bytearray().join([head, *parts]), np.int32)

    def _previous_rows(self, plan: StepPlan) -> Message:
        """The index of each row and shared part in the previous step, or _NEW.

        A shared part is identified by the request of its first row and the start of its range.
        """
        names: list[str | tuple[str, int]] = [chunk.request_id for chunk in plan.chunks]
        names += [(plan.chunks[part.rows[0]].request_id, part.first) for part in plan.shared]
        if names == self._names:
            return np.arange(len(names), dtype=np.int32)
        before = {name: index for index, name in enumerate(self._names)}
        self._names = names
        return np.array([before.get(name, _NEW) for name in names], np.int32)


class PlanDecoder:
    """Decodes the messages of one PlanEncoder: all of them, in order."""

    def __init__(self) -> None:
        self._number = 0
        self._starts, self._numbers = _NO_ROWS

    def __call__(self, message: Message) -> DecodedStep | None:
        """The step to compute, None for the message `stop`.

        Tensors may share the memory of the message and must not be changed.
        """
        header = _Header(*message[:_HEADER].tolist())
        assert header.number == self._number, f"plan {header.number} after {self._number - 1}"
        self._number = (self._number + 1) % _NUMBERS
        if header.kind == _STOP:
            return None
        read = _Reader(message, _HEADER)
        rows, count = header.rows, header.rows + header.parts
        previous_rows, query_start, starts = (read.take(n) for n in (count, rows + 1, count + 1))
        row_start = read.tensor(header.parts + 1 if header.parts else 0)
        members = read.tensor(header.members)
        token_ids, positions, slots = (read.tensor(header.tokens) for _ in range(3))
        sample_rows = read.tensor(header.samples)
        read_rows = read.tensor(header.reads)
        changes = read.take(header.changes)
        numbers = changed_segments(self._starts, self._numbers, previous_rows, starts, changes)
        self._starts, self._numbers = starts, numbers
        segments = torch.from_numpy(numbers.reshape(-1, SEGMENT_WIDTH))
        own, shared = int(starts[rows]), None
        if header.parts:
            part_starts = torch.from_numpy(starts[rows:] - own)
            shared = SharedParts(row_start, members, part_starts, segments[own:])
        attention = AttentionBatch(
            torch.from_numpy(query_start),
            torch.from_numpy(starts[: rows + 1]),
            segments[:own],
            shared,
        )
        copies = None
        if header.out or header.back:
            counts = (header.out, header.out, header.back, header.back)
            copies = KvCopies(*map(read.numbers, counts))
        sources = None
        if header.pending:
            at, found = read.take(header.pending), read.take(header.pending)
            sources = torch.full((header.tokens,), -1, dtype=torch.int32)
            sources.numpy()[at] = found
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            attention=attention,
            sample_rows=sample_rows,
            samples=(),
            read_rows=read_rows,
            num_scored=header.scored,
            step=header.step,
            kept=read.kept(header.kept),
            dropped=read.kept(header.dropped),
        )
        return DecodedStep(inputs, copies, header.kind == _ABORTABLE_STEP, sources)


class _Reader:
    """Reads consecutive parts of a message."""

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

    def kept(self, count: int) -> tuple[Kept, ...]:
        width = len(Kept._fields)
        return tuple([Kept(*self.take(width).tolist()) for _ in range(count)])
