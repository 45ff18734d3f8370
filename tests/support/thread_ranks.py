"""Ranks that are threads of one process, for what needs no sockets."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bros.core.errors import RanksLostError
from bros.core.interfaces import Executor
from bros.executor.parallel.ranks import Message
from bros.executor.parallel.runner import follow, lead
from bros.executor.runner import ModelRunner

_PATIENCE_S = 30.0


class _Group:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_S)
        self.given: list[Tensor] = [torch.empty(0)] * size
        self.inboxes: list[deque[Message]] = [deque() for _ in range(size)]
        self.idle: set[int] = set()
        self.changed = threading.Condition()


class ThreadRanks:
    """Implements Ranks. said: what this rank took part in, in order."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.size = len(group.given)
        self.others = tuple(range(1, self.size))
        self.said: list[str] = []

    @classmethod
    def of(cls, size: int) -> list[ThreadRanks]:
        group = _Group(size)
        return [cls(group, rank) for rank in range(size)]

    def all_reduce_(self, x: Tensor) -> Tensor:
        self.said.append(f"sum of {list(x.shape)} {x.dtype}")
        return x.copy_(torch.stack(self._exchange(x)).sum(0))

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        self.said.append(f"gather {len(x)}")
        parts = self._exchange(x)
        return torch.cat(parts, 1) if self.rank == 0 else x.new_empty(0, sum(widths))

    def minimum(self, value: int) -> int:
        self.said.append("minimum")
        return min(int(given) for given in self._exchange(torch.tensor(value)))

    def send(self, message: Message) -> None:
        self.said.append("message")
        self._check()
        with self._group.changed:
            for inbox in self._group.inboxes[1:]:
                inbox.append(np.array(message, np.int32))
            self._group.changed.notify_all()

    def receive(self) -> Message:
        self.said.append("message")
        group, inbox = self._group, self._group.inboxes[self.rank]
        with group.changed:
            group.idle.add(self.rank)
            group.changed.notify_all()
            assert group.changed.wait_for(lambda: inbox or group.barrier.broken, _PATIENCE_S)
            self._check()
            group.idle.remove(self.rank)
            return inbox.popleft()

    def settle(self) -> None:
        """Wait until all others wait for a message."""
        group = self._group
        with group.changed:
            assert group.changed.wait_for(
                lambda: (
                    group.barrier.broken
                    or (len(group.idle) == self.size - 1 and not any(group.inboxes))
                ),
                _PATIENCE_S,
            )
        self._check()

    def broadcast_flag(self, flag: bool) -> bool:
        self.said.append("any")
        return bool(self._exchange(torch.tensor(flag))[0])

    def close(self) -> None:
        """As if the process had ended."""
        with self._group.changed:
            self._group.barrier.abort()
            self._group.changed.notify_all()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._check()
        self._group.given[self.rank] = x.clone()
        try:
            self._group.barrier.wait()
            given = list(self._group.given)
            self._group.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RanksLostError("a rank is gone") from error
        return given

    def _check(self) -> None:
        if self._group.barrier.broken:
            raise RanksLostError("a rank is gone")


@dataclass(frozen=True, slots=True)
class Team:
    """executor: of rank 0. errors: of the others, once they have ended."""

    executor: Executor
    ranks: list[ThreadRanks]
    threads: list[threading.Thread]
    errors: list[Exception]

    def wait(self) -> None:
        for thread in self.threads:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive(), "a rank does not end"


@contextmanager
def team(runners: Sequence[ModelRunner], ranks: list[ThreadRanks] | None = None) -> Iterator[Team]:
    """The first runner leads, the others follow, each on a thread of its own. They have ended
    when the block is left. ranks: those that the runners were made with, if they have shards."""
    ranks = ranks or ThreadRanks.of(len(runners))
    errors: list[Exception] = []

    # Each thread has its own number of torch threads, and sums depend on it in the last bit.
    num_threads = torch.get_num_threads()

    def run(rank: int) -> None:
        torch.set_num_threads(num_threads)
        try:
            follow(runners[rank], ranks[rank])
        except Exception as error:
            errors.append(error)
            ranks[rank].close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(1, len(ranks))]
    for thread in threads:
        thread.start()
    made = Team(lead(runners[0], ranks[0]), ranks, threads, errors)
    try:
        yield made
        made.executor.close()
        made.wait()
    finally:
        ranks[0].close()
        made.wait()
