"""A device on which copies and kernels take any time they like, and what goes wrong on it.

    compute    [gather 1][scatter 1][chunks 1]  [gather 2][chunks 2] ...
    to host              [   out 1        ]               [ out 2 ]
    from host  [  in 1 ]

A plan becomes operations, each on some cells: slots of the device and of the host, and places in
the buffers between them. An operation begins when those have ended that it has to wait for, and
that is all that holds it back. What it has to wait for is what an executor has to see to with
streams and events; each rule can be left out, to see what it is good for.

The shadow memory knows for every cell which operation should have written it last whenever it
is read, if everything happened one after the other: all of `out`, all of `back`, the chunks.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from bros.core.plan import SEGMENT_WIDTH, KvCopies, StepPlan

Cell = tuple[str, int]
"""(which memory, place in it)"""

LONGEST = {
    "gather": (2, 10, 100),
    "out": (2, 20, 1000),
    "in": (2, 20, 100),
    "scatter": (2, 10, 100),
    "chunk": (2, 10, 50),
}
"""How long operations take at most, in any unit: now and then a copy lasts many steps."""

BUFFERS = 2
"""For copies in each direction; a step takes any of them."""


class Rule(StrEnum):
    """What has to wait for what.

    That a host slot is not written again while it is read needs no rule of its own: tokens
    preempted later are gathered after the kernels of earlier steps, which began when the tokens
    that they restore had been read. In one plan no host slot is both.
    """

    STEPS_IN_ORDER = "whatever touches the device's slots waits for the kernels of earlier steps"
    WRITES_AFTER_GATHER = "chunks and loads of a step write when its victims are gathered"
    READS_AFTER_SCATTER = "chunks read when what comes back has arrived"
    OUT_AFTER_GATHER = "a copy to the host begins when its buffer is filled"
    SCATTER_AFTER_IN = "what comes back is put into slots when its buffer is filled"
    IN_AFTER_OUT = "a host slot is read when the copy to it has ended"
    OUT_AFTER_OUT = "a host slot is written again when the copy to it before has ended"
    BUFFER_OUT_AGAIN = "a buffer for victims is filled again when it has been copied"
    BUFFER_IN_AGAIN = "a buffer for what comes back is filled again when it has been emptied"


class Hazard(NamedTuple):
    """reader: kind of the operation that read something else than it should have.

    writer: kind of the one it should have waited for, or (too late) of the one that should
    have waited for it. too_late: what was to be read has been overwritten.
    """

    reader: str
    writer: str
    too_late: bool
    cell: Cell


@dataclass(eq=False)
class Operation:
    """begins, ends: virtual time. expected: what it reads -> number of the operation that should
    have written it last, -1 if none has."""

    kind: str
    number: int
    reads: tuple[Cell, ...]
    writes: tuple[Cell, ...]
    expected: dict[Cell, int] = field(default_factory=dict)
    begins: int = 0
    ends: int = 0


@dataclass
class _Step:
    """The operations of one plan; those of copies are None if there is nothing to copy.

    place: which buffers its copies go through, -1 if none.
    """

    place: int = -1
    gather: Operation | None = None
    out: Operation | None = None
    back: Operation | None = None
    scatter: Operation | None = None
    chunks: list[Operation] = field(default_factory=list)


class Device:
    """Takes plans and works out when everything they ask for happens.

    rng: for how long things take. lead: plans that may be handed over before the one before them
    is done; 0 waits for the chunks each time, though never for copies to the host. without:
    rules that are not kept.
    """

    def __init__(
        self,
        block_size: int,
        rng: random.Random,
        *,
        lead: int = 0,
        without: Collection[Rule] = (),
    ) -> None:
        self._block_size = block_size
        self._rng = rng
        self._lead = lead
        self._without = without
        self._now = 0
        self._steps: list[_Step] = []
        self._operations: list[Operation] = []
        self._latest: dict[Cell, int] = {}

    def submit(self, plan: StepPlan, num_chunks: int) -> None:
        """Begin a step, of which only the first `num_chunks` chunks run before it is aborted."""
        self._check(plan)
        self._now += self._rng.randrange(4)
        if len(self._steps) > self._lead:
            chunks = self._steps[-1 - self._lead].chunks
            self._now = max([self._now, *(chunk.ends for chunk in chunks)])
        step = _Step()
        self._steps.append(step)
        if plan.copies is not None:
            self._copy(step, plan.copies)
        before = dict(self._latest)
        for chunk in plan.chunks[:num_chunks]:
            slots = self._slots_in(chunk.segments)
            wait = [*self._kept(Rule.STEPS_IN_ORDER, self._earlier_kernels())]
            wait += self._kept(Rule.WRITES_AFTER_GATHER, [step.gather])
            wait += self._kept(Rule.READS_AFTER_SCATTER, [step.scatter])
            step.chunks.append(
                self._start(
                    "chunk", _cells("slot", slots), _cells("slot", chunk.slots), wait, before
                )
            )

    def hazards(self) -> list[Hazard]:
        """Everything that was read too early or too late so far, in order of time."""
        events = [(op.begins, 1, op.number) for op in self._operations]
        events += [(op.ends, 0, op.number) for op in self._operations]
        memory: dict[Cell, int] = {}
        being_written: dict[Cell, int] = {}
        found: list[Hazard] = []
        for _, begins, number in sorted(events):
            op = self._operations[number]
            # It reads all the time, so no write may lie in between, or have begun.
            found += self._wrong(op, memory, being_written)
            if begins:
                being_written.update(dict.fromkeys(op.writes, number))
                continue
            for cell in op.writes:
                memory[cell] = number
                if being_written.get(cell) == number:
                    del being_written[cell]
        return found

    def _wrong(
        self, op: Operation, memory: dict[Cell, int], being_written: dict[Cell, int]
    ) -> Iterator[Hazard]:
        """What an operation reads now that is not what it should read."""
        for cell, expected in op.expected.items():
            seen = being_written.get(cell, memory.get(cell, -1))
            if seen == expected and cell not in being_written:
                continue
            too_late = seen > expected
            writer = self._operations[seen if too_late else expected]
            yield Hazard(op.kind, writer.kind, too_late, cell)

    def _copy(self, step: _Step, copies: KvCopies) -> None:
        earlier = self._steps[:-1]
        step.place = self._rng.randrange(BUFFERS)
        place, same_buffer = step.place, [s for s in earlier if s.place == step.place]
        if copies.out_device:
            victims = _cells("slot", copies.out_device)
            buffer = _cells(f"out {place}", range(len(victims)))
            hosts = _cells("host", copies.out_host)
            wait = [*self._kept(Rule.STEPS_IN_ORDER, self._earlier_kernels())]
            wait += self._kept(Rule.BUFFER_OUT_AGAIN, (s.out for s in same_buffer))
            step.gather = self._start("gather", victims, buffer, wait)
            wait = [*self._kept(Rule.OUT_AFTER_GATHER, [step.gather])]
            wait += self._kept(Rule.OUT_AFTER_OUT, _writing(hosts, (s.out for s in earlier)))
            step.out = self._start("out", buffer, hosts, wait)
        if copies.back_device:
            targets = _cells("slot", copies.back_device)
            buffer = _cells(f"in {place}", range(len(targets)))
            hosts = _cells("host", copies.back_host)
            wait = [*self._kept(Rule.IN_AFTER_OUT, _writing(hosts, (s.out for s in self._steps)))]
            wait += self._kept(Rule.BUFFER_IN_AGAIN, (s.scatter for s in same_buffer))
            step.back = self._start("in", hosts, buffer, wait)
            wait = [*self._kept(Rule.SCATTER_AFTER_IN, [step.back])]
            wait += self._kept(Rule.STEPS_IN_ORDER, self._earlier_kernels())
            wait += self._kept(Rule.WRITES_AFTER_GATHER, [step.gather])
            step.scatter = self._start("scatter", buffer, targets, wait)

    def _start(
        self,
        kind: str,
        reads: tuple[Cell, ...],
        writes: tuple[Cell, ...],
        wait: Iterable[Operation],
        before: dict[Cell, int] | None = None,
    ) -> Operation:
        """before: the writes so far, if not all up to now (chunks do not read each other's)."""
        op = Operation(kind, len(self._operations), reads, writes)
        latest = self._latest if before is None else before
        op.expected = {cell: latest.get(cell, -1) for cell in reads}
        op.begins = max([self._now, *(other.ends for other in wait)]) + self._rng.choice((0, 0, 3))
        op.ends = op.begins + self._rng.randint(1, self._rng.choice(LONGEST[kind]))
        self._operations.append(op)
        self._latest.update(dict.fromkeys(writes, op.number))
        return op

    def _kept(self, rule: Rule, waits_for: Iterable[Operation | None]) -> list[Operation]:
        if rule in self._without:
            return []
        return [op for op in waits_for if op is not None]

    def _earlier_kernels(self) -> list[Operation | None]:
        """All that touches the device's slots in the step before, which waited for those before."""
        if len(self._steps) < 2:
            return []
        step = self._steps[-2]
        return [step.gather, step.scatter, *step.chunks]

    def _check(self, plan: StepPlan) -> None:
        """What a plan promises, whenever its parts happen."""
        copies = plan.copies or KvCopies()
        written = [slot for chunk in plan.chunks for slot in chunk.slots]
        read = {slot for chunk in plan.chunks for slot in self._slots_in(chunk.segments)}
        for slots in (written, copies.out_device, copies.back_device):
            assert len(set(slots)) == len(slots), "a slot twice"
        hosts = [*copies.out_host, *copies.back_host]
        assert len(set(hosts)) == len(hosts), "a host slot is written and read, or twice"
        assert read.isdisjoint(written), "a chunk reads what one of the same step writes"
        assert set(copies.back_device).isdisjoint(written), "what comes back is overwritten"

    def _slots_in(self, segments: Iterable[int]) -> list[int]:
        numbers = list(segments)
        return [
            numbers[i] * self._block_size + offset
            for i in range(0, len(numbers), SEGMENT_WIDTH)
            for offset in range(numbers[i + 1], numbers[i + 2])
        ]


def _cells(memory: str, places: Iterable[int]) -> tuple[Cell, ...]:
    return tuple((memory, place) for place in places)


def _writing(cells: Collection[Cell], ops: Iterable[Operation | None]) -> list[Operation]:
    wanted = set(cells)
    return [op for op in ops if op is not None and not wanted.isdisjoint(op.writes)]
