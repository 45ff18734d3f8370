"""Runs a function in several processes that know each other as the ranks of one model."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed import TCPStore

from bros.core.clock import SystemClock
from bros.executor.parallel.ranks import Ranks, TorchRanks
from support.forking import forkserver

STEP_TIMEOUT_S = 60.0
"""How long ranks wait for each other, if a test does not say otherwise."""

_CPU = torch.device("cpu")


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *arguments: Any,
    step_timeout_s: float = STEP_TIMEOUT_S,
    timeout_s: float = 240.0,
    may_die: Collection[int] = (),
) -> list[Any]:
    """What function(ranks, *arguments) returns on each rank, all of them processes of their own.

    The function is one of a module, and everything that it takes and returns can be pickled.

    may_die: ranks that may end without a result, or never; they are not waited for, and their
    result is None.
    Raises AssertionError, with a rank's traceback, if one fails or they are not done in time.
    None of the processes is left then, nor otherwise.
    """
    context = forkserver()
    # With a store of our own, as torchrun has it, no free port has to be found beforehand.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, results = [], {}
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        arguments_of_rank = (sender, rank, size, store.port, step_timeout_s, function, arguments)
        process = context.Process(target=_run, args=arguments_of_rank, daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        results[receiver] = rank
    try:
        return _collect(size, results, timeout_s, may_die)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(
    size: int, waiting: dict[Connection, int], timeout_s: float, may_die: Collection[int]
) -> list[Any]:
    found: dict[int, Any] = {}
    clock = SystemClock()
    end = clock.now() + timeout_s
    while any(rank not in may_die for rank in waiting.values()):
        ready = wait(list(waiting), max(0.0, end - clock.now()))
        assert ready, f"ranks {sorted(waiting.values())} are not done after {timeout_s:.0f} s"
        for receiver in ready:
            assert isinstance(receiver, Connection)
            rank = waiting.pop(receiver)
            try:
                failure, found[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                failure = None if rank in may_die else "it ended without a result"
            receiver.close()
            assert failure is None, f"rank {rank}: {failure}"
    return [found.get(rank) for rank in range(size)]


def _run(
    sender: Connection,
    rank: int,
    size: int,
    port: int,
    step_timeout_s: float,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)
    try:
        ranks: Ranks = TorchRanks.join(_CPU, step_timeout_s)
        result = function(ranks, *arguments)
        ranks.close()
    except BaseException:
        sender.send_bytes(pickle.dumps((traceback.format_exc(), None)))
        sys.exit(1)
    sender.send_bytes(pickle.dumps((None, result)))
