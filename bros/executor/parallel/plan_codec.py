"""A step as one message of int32 numbers, for the ranks that compute it but do not schedule.

    header     _HEADER numbers: which message, what kind, and how many there are of what follows
    chunks     row, kept, kept_behind, changed     [chunks, 4], see below
               end of its tokens, start            [chunks] each
    tokens     token ids, slots                    [tokens] each
    samples    the tokens whose logits are wanted  [samples]
    changed    numbers of segments                 [sum of changed]
    copies     out_device, out_host                [out] each
               back_host, back_device              [back] each
    pending    which tokens, and their sources     [pending] each

Segments are most of a plan, 3,072 bytes per 4,096 tokens of context, and next to none of them
change from step to step. So both ends remember the segments of each request as they were sent last,
in a *row* that stands for it, and a message only says what has changed, mostly one segment:

    remembered   [ kept                 | was changed   | kept_behind ]
    now          [ kept                 | changed       | kept_behind ]

The sender decides which requests to forget. Their rows are given to others then, which begin with
nothing kept; so the receiver need not be told.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bros.core.plan import SEGMENT_WIDTH, KvCopies, StepPlan
from bros.executor.feed import Pending
from bros.executor.inputs import StepInputs
from bros.executor.parallel.ranks import Message
from bros.kernels.interface import AttentionBatch
from bros.kernels.parts import offsets

_STOP, _STEP, _OPEN_STEP = range(3)  # kinds; an open step may be given up
_PER_CHUNK = 4
_BYTES = 4  # of a number
_SEGMENT = np.dtype((np.void, _BYTES * SEGMENT_WIDTH))
_NUMBERS = 2**31  # messages are numbered from 0 up to this, and from 0 again


class _Header(NamedTuple):
    number: int
    kind: int
    chunks: int = 0
    tokens: int = 0
    samples: int = 0
    changed: int = 0
    out: int = 0
    back: int = 0
    pending: int = 0


_HEADER = len(_Header._fields)


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank is told to compute.

    inputs: those of the plan, without `samples`: who asked for a token, and how it is chosen, is
    nobody else's business. may_be_given_up: whether rank 0 is asked on the way. sources: int32
    [tokens], the place of each token among those that the step before chose, or -1 where
    inputs.token_ids has it; None if that has all.
    """

    inputs: StepInputs
    copies: KvCopies | None
    may_be_given_up: bool
    sources: Tensor | None


class _Known:
    """What was sent last of a request. before, behind: what is likely to be kept of it."""

    __slots__ = ("before", "behind", "row", "segments")

    def __init__(self, row: int) -> None:
        self.row = row
        self.segments = self.before = self.behind = b""

    def change_to(self, segments: bytes) -> None:
        """Keep as much as can be. Only if what was likely to be kept is not."""
        kept, behind = _ends_in_common(self.segments, segments)
        self.before = segments[:kept]
        self.behind = segments[len(segments) - behind :]


class PlanEncoder:
    """Makes messages for one PlanDecoder each on all other ranks, which must read all of them."""

    def __init__(self, remembered: int = 512) -> None:
        """remembered: requests at least, of those that were in a plan last."""
        self._remembered = remembered
        self._number = 0
        # Who was in a plan lately, and who was not since these were begun anew.
        self._recent: dict[str, _Known] = {}
        self._older: dict[str, _Known] = {}
        self._num_rows = 0
        self._free: list[int] = []

    @property
    def num_rows(self) -> int:
        """Rows that decoders have."""
        return self._num_rows

    def step(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        *,
        may_be_given_up: bool = False,
        pending: Pending | None = None,
    ) -> Message:
        """inputs: those of the plan, on the host. pending: its tokens that only the device knows,
        where the sources say so."""
        chunks, changed = self._segments(plan)
        query_start = inputs.attention.query_start.numpy()
        parts: list[Message | array[int]] = [
            chunks,
            query_start[1:],
            inputs.positions.numpy()[query_start[:-1]],
            inputs.token_ids.numpy(),
            inputs.slots.numpy(),
            inputs.sample_rows.numpy(),
            changed,
        ]
        out = back = waiting = 0
        if plan.copies is not None:
            copies = plan.copies
            out, back = len(copies.out_device), len(copies.back_device)
            parts += [copies.out_device, copies.out_host, copies.back_host, copies.back_device]
        if pending is not None:
            sources = pending.sources.numpy()
            places = np.flatnonzero(sources >= 0)
            waiting = len(places)
            parts += [places, sources[places]]
        kind = _OPEN_STEP if may_be_given_up else _STEP
        sizes = (len(plan.chunks), len(inputs.token_ids), len(inputs.sample_rows), len(changed))
        return self._message(_Header(0, kind, *sizes, out, back, waiting), parts)

    def stop(self) -> Message:
        """Nothing comes after this."""
        return self._message(_Header(0, _STOP), [])

    def _message(self, header: _Header, parts: Sequence[Message | array[int]]) -> Message:
        header = header._replace(number=self._number)
        self._number = (self._number + 1) % _NUMBERS
        return np.concatenate([header, *parts], dtype=np.int32, casting="unsafe")

    def _segments(self, plan: StepPlan) -> tuple[array[int], array[int]]:
        """_PER_CHUNK numbers per chunk, and what has changed.

        This is run for every row of every step, where looking at single numbers would take too
        long: bytes are compared as a whole.
        """
        if len(self._recent) >= self._remembered:
            self._free += [known.row for known in self._older.values()]
            self._older, self._recent = self._recent, {}
        recent = self._recent
        rows: list[int] = []
        changed = array("i")
        for chunk in plan.chunks:
            known = recent.get(chunk.request_id)
            if known is None:
                known = recent[chunk.request_id] = self._recall(chunk.request_id)
            new = chunk.segments.tobytes()
            before, behind = known.before, known.behind
            if not (new.startswith(before) and new.endswith(behind)) or len(new) < len(
                before
            ) + len(behind):
                known.change_to(new)
                before, behind = known.before, known.behind
            kept, end = len(before) // _BYTES, (len(new) - len(behind)) // _BYTES
            rows += (known.row, kept, len(behind) // _BYTES, end - kept)
            changed += chunk.segments[kept:end]
            known.segments = new
            if end - kept > SEGMENT_WIDTH:  # of these, the last one will change again
                known.before = new[: (end - SEGMENT_WIDTH) * _BYTES]
        return array("i", rows), changed

    def _recall(self, request_id: str) -> _Known:
        known = self._older.pop(request_id, None)
        if known is not None:
            return known
        if self._free:
            return _Known(self._free.pop())
        self._num_rows += 1
        return _Known(self._num_rows - 1)


class PlanDecoder:
    """Reads the messages of one PlanEncoder, all of them and in their order."""

    def __init__(self) -> None:
        self._number = 0
        self._rows: list[array[int]] = []

    def __call__(self, message: Message) -> Step | None:
        """What is to be computed; None: stop. Tensors may share the message's memory."""
        header = _Header(*message[:_HEADER].tolist())
        assert header.number == self._number, f"plan {header.number} after {self._number - 1}"
        self._number = (self._number + 1) % _NUMBERS
        if header.kind == _STOP:
            return None
        read = _Reader(message, _HEADER)
        chunks = read.take(header.chunks * _PER_CHUNK).reshape(-1, _PER_CHUNK)
        ends, starts = read.take(header.chunks), read.take(header.chunks)
        token_ids, slots = read.take(header.tokens), read.take(header.tokens)
        sample_rows = read.take(header.samples)
        inputs = StepInputs(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(_positions(ends, starts)),
            slots=torch.from_numpy(slots),
            attention=self._attention(ends, chunks, read.take_array(header.changed)),
            sample_rows=torch.from_numpy(sample_rows),
            samples=(),
        )
        copies = None
        if header.out or header.back:
            counts = (header.out, header.out, header.back, header.back)
            copies = KvCopies(*map(read.take_array, counts))
        sources = None
        if header.pending:
            places, found = read.take(header.pending), read.take(header.pending)
            sources = torch.full((header.tokens,), -1, dtype=torch.int32)
            sources.numpy()[places] = found
        return Step(inputs, copies, header.kind == _OPEN_STEP, sources)

    def _attention(self, ends: Message, chunks: Message, changed: array[int]) -> AttentionBatch:
        rows = self._rows
        used: list[array[int]] = []
        at = 0
        for row, kept, behind, count in chunks.tolist():
            while row >= len(rows):
                rows.append(array("i"))
            segments = rows[row]
            segments[kept : len(segments) - behind] = changed[at : at + count]
            at += count
            used.append(segments)
        widths = np.fromiter(map(len, used), np.int32, len(used))
        joined = np.frombuffer(bytearray().join(used), np.int32)
        return AttentionBatch(
            query_start=torch.from_numpy(np.concatenate(([0], ends), dtype=np.int32)),
            segment_start=torch.from_numpy(offsets(widths // SEGMENT_WIDTH)),
            segments=torch.from_numpy(joined).view(-1, SEGMENT_WIDTH),
        )


class _Reader:
    """Takes one part of a message after the other."""

    def __init__(self, message: Message, at: int) -> None:
        self._message = message
        self._at = at

    def take(self, count: int) -> Message:
        part = self._message[self._at : self._at + count]
        self._at += count
        return part

    def take_array(self, count: int) -> array[int]:
        numbers = array("i")
        numbers.frombytes(self.take(count).tobytes())
        return numbers


def _ends_in_common(old: bytes, new: bytes) -> tuple[int, int]:
    """How many bytes are the same from the start, and from the end of what is left. Both are
    those of whole segments."""
    left, right = (np.frombuffer(each, _SEGMENT) for each in (old, new))
    most = min(len(left), len(right))
    differ = np.flatnonzero(left[:most] != right[:most])
    kept = int(differ[0]) if len(differ) else most
    rest = most - kept
    differ = np.flatnonzero(left[len(left) - rest :] != right[len(right) - rest :])
    behind = rest - 1 - int(differ[-1]) if len(differ) else rest
    return kept * _SEGMENT.itemsize, behind * _SEGMENT.itemsize


def _positions(ends: Message, starts: Message) -> Message:
    """starts[0], starts[0] + 1, ... up to token ends[0] of the step, then those of the next."""
    begins = np.concatenate(([0], ends[:-1]))
    positions = np.arange(ends[-1], dtype=np.int32)
    positions += np.repeat(starts - begins, ends - begins).astype(np.int32)
    return positions
