"""A step as one message of int32 numbers, for the ranks that compute it but do not schedule.

    header     which message, what kind, and how many there are of what follows
    chunks     row, kept, kept_behind, changed     [chunks, 4], see below
               query_start, segment_start          [chunks + 1] each, as in AttentionBatch
    tokens     token ids, positions, slots         [tokens] each
    samples    the tokens whose logits are wanted  [samples]
    changed    numbers of segments                 [changed]
    copies     out_device, out_host                [out] each
               back_host, back_device              [back] each
    pending    which tokens, and their sources     [pending] each

Segments are most of a plan, 3,072 bytes per 4,096 tokens of context, and next to none of them
change from step to step. So both ends remember the segments of each request as they were sent last,
in a *row* that stands for it, and a message only says what has changed, mostly one segment:

    as sent last   [ kept            | something  | kept_behind ]
    now            [ kept            | changed    | kept_behind ]

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

_STOP, _STEP, _OPEN_STEP = range(3)  # kinds; an open step may be given up
_PER_CHUNK = 4
_BYTES = 4  # of a number
_SEGMENT_BYTES = _BYTES * SEGMENT_WIDTH
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
    """What was sent last of a request, and what is likely to be kept of it next time: all but the
    segment that has changed last.

        segments   [ before | one segment | behind ]
                   0        kept          end          numbers

    head: what a message says of it then.
    """

    __slots__ = ("before", "behind", "end", "head", "kept", "row", "segments")

    def __init__(self, row: int) -> None:
        self.row = row
        self.segments = array("i")
        self.before = self.behind = b""
        self.kept = self.end = 0
        self.head = self._head(0, 0, 0)

    def change(self, segments: array[int]) -> tuple[array[int], int, int]:
        """They are not as was likely: what to say of them, and from where to where they have
        changed."""
        new = segments.tobytes()
        kept, behind = len(self.before), len(self.behind)
        if (
            len(new) < kept + behind
            or not new.startswith(self.before)
            or not new.endswith(self.behind)
        ):
            kept, behind = _kept(self.segments.tobytes(), new)
        end = len(new) - behind
        head = self._head(kept, behind, end)
        self.segments = segments
        likely = max(kept, end - _SEGMENT_BYTES)
        self.before, self.behind = new[:likely], new[end:]
        self.kept, self.end = likely // _BYTES, end // _BYTES
        self.head = self._head(likely, behind, end)
        return head, kept // _BYTES, end // _BYTES

    def _head(self, kept: int, behind: int, end: int) -> array[int]:
        sizes = (kept, behind, end - kept)
        return array("i", (self.row, *(size // _BYTES for size in sizes)))


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
        """inputs: those of the plan, as build_inputs makes them. pending: its tokens that only the
        device knows, where the sources say so."""
        chunks, changed = self._segments(plan)
        parts: list[Message | array[int]] = [
            chunks,
            inputs.attention.query_start.numpy(),
            inputs.attention.segment_start.numpy(),
            inputs.token_ids.numpy(),
            inputs.positions.numpy(),
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
            places = np.flatnonzero(sources >= 0).astype(np.int32)
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
        long: bytes are compared as a whole, and mostly that is all.
        """
        if len(self._recent) >= self._remembered:
            self._free += [known.row for known in self._older.values()]
            self._older, self._recent = self._recent, {}
        recent = self._recent
        heads, changed = array("i"), array("i")
        for chunk in plan.chunks:
            known = recent.get(chunk.request_id)
            if known is None:
                known = recent[chunk.request_id] = self._recall(chunk.request_id)
            segments = chunk.segments
            content = segments.tobytes()
            if (
                len(segments) == len(known.segments)
                and content.startswith(known.before)
                and content.endswith(known.behind)
            ):
                known.segments = segments
                heads += known.head
                changed += segments[known.kept : known.end]
            else:
                head, start, end = known.change(segments)
                heads += head
                changed += segments[start:end]
        return heads, changed

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
        heads = read.take(header.chunks * _PER_CHUNK)
        query_start, segment_start = (read.tensor(header.chunks + 1) for _ in range(2))
        token_ids, positions, slots = (read.tensor(header.tokens) for _ in range(3))
        sample_rows = read.tensor(header.samples)
        segments = self._segments(heads.tolist(), read.numbers(header.changed))
        attention = AttentionBatch(query_start, segment_start, segments)
        inputs = StepInputs(token_ids, positions, slots, attention, sample_rows, ())
        copies = None
        if header.out or header.back:
            counts = (header.out, header.out, header.back, header.back)
            copies = KvCopies(*map(read.numbers, counts))
        sources = None
        if header.pending:
            places, found = read.take(header.pending), read.take(header.pending)
            sources = torch.full((header.tokens,), -1, dtype=torch.int32)
            sources.numpy()[places] = found
        return Step(inputs, copies, header.kind == _OPEN_STEP, sources)

    def _segments(self, heads: list[int], changed: array[int]) -> Tensor:
        """Of all chunks, [segments, 3]."""
        rows = self._rows
        found: list[array[int]] = []
        number = iter(heads)
        at = 0
        for row, kept, behind, count in zip(number, number, number, number, strict=True):
            while row >= len(rows):
                rows.append(array("i"))
            segments = rows[row]
            segments[kept : len(segments) - behind] = changed[at : at + count]
            at += count
            found.append(segments)
        joined = np.frombuffer(bytearray().join(found), np.int32)
        return torch.from_numpy(joined).view(-1, SEGMENT_WIDTH)


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


def _kept(old: bytes, new: bytes) -> tuple[int, int]:
    """How many bytes are the same from the start, and from the end of what is left. Both are
    those of whole segments."""
    left, right = (np.frombuffer(each, np.int32).reshape(-1, SEGMENT_WIDTH) for each in (old, new))
    most = min(len(left), len(right))
    kept = _alike(left[:most], right[:most])
    rest = most - kept
    behind = _alike(left[len(left) - rest :][::-1], right[len(right) - rest :][::-1])
    return kept * _SEGMENT_BYTES, behind * _SEGMENT_BYTES


def _alike(left: Message, right: Message) -> int:
    """How many rows are the same before the first one that is not."""
    differ = np.flatnonzero((left != right).any(axis=1))
    return int(differ[0]) if len(differ) else len(left)
