"""What ranks that are tested say to each other."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Callable

import numpy as np
import torch

from bros.core.clock import SystemClock
from bros.core.errors import RanksLostError
from bros.executor.parallel.ranks import Ranks

SIZES = (0, 1, 5, 2000, 300_000)
WIDTHS = (5, 4, 4)
_PATIENCE_S = 25.0


def talk(ranks: Ranks) -> tuple[int, tuple[int, ...]]:
    """Every kind of talk, in an order that mixes them. Returns the ids of this process and of the
    others."""
    rank, size = ranks.rank, ranks.size
    for length in SIZES:
        message = np.arange(length, dtype=np.int32) * 7919
        if rank == 0:
            ranks.send(array("i", message.tolist()) if length % 2 else message)
        else:
            received = ranks.receive()
            assert received.dtype == np.int32 and np.array_equal(received, message)
        x = torch.full((length % 7, 3), 10.0**rank)
        assert ranks.all_reduce_(x) is x
        assert torch.equal(x, torch.full_like(x, float("1" * size)))
        assert ranks.broadcast_flag(length % 2 == 0 if rank == 0 else True) == (length % 2 == 0)
    long = torch.full((1000, 300), 10.0**rank)
    assert torch.equal(ranks.all_reduce_(long), torch.full_like(long, float("1" * size)))
    assert ranks.minimum(7 - rank) == 7 - (size - 1)
    assert ranks.minimum(2**40 + rank) == 2**40
    for rows in (0, 1, 3):
        whole = torch.arange(rows * sum(WIDTHS), dtype=torch.float32).view(rows, sum(WIDTHS))
        part = whole.split(WIDTHS, dim=1)[rank]
        gathered = ranks.gather(part, WIDTHS)
        assert torch.equal(gathered, whole if rank == 0 else whole[:0])
    ranks.close()
    return os.getpid(), ranks.others


def lose_one(ranks: Ranks, signal_number: int, what: str) -> tuple[str, float] | None:
    """Rank 1 is gone; what the others are told of it, and after how long."""
    if ranks.rank == 1:
        os.kill(os.getpid(), signal_number)
    talks: dict[str, Callable[[], object]] = {
        "sum": lambda: ranks.all_reduce_(torch.ones(3)),
        "gather": lambda: ranks.gather(torch.ones(1, 1), (1, 1)),
        "plan": lambda: ranks.send(array("i", [1])) if ranks.rank == 0 else ranks.receive(),
        "flag": lambda: ranks.broadcast_flag(True),
    }
    clock = SystemClock()
    start = clock.now()
    try:
        while clock.now() - start < _PATIENCE_S:  # what rank 0 says may be on its way a while
            talks[what]()
    except RanksLostError as error:
        return str(error), clock.now() - start
    return None


def hang_one(ranks: Ranks, what: str) -> tuple[str, float] | None:
    """Rank 1 never answers; see lose_one."""
    if ranks.rank == 1:
        signal.pause()
    return lose_one(ranks, 0, what)
