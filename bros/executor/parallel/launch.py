"""Starts the ranks of a model through torch.distributed's launcher, which is torchrun."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)

from bros.core.errors import RanksLostError
from bros.executor.parallel.rendezvous import LoopbackRendezvous

_BACKEND = "loopback"

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")


def launch_ranks(
    count: int, module: str, arguments: Sequence[str], signals: Sequence[str] = STOP_SIGNALS
) -> None:
    """Run `python -m module arguments` in `count` processes of this machine until all have ended.

    They meet at a free port of the loopback device (LoopbackRendezvous). Once one of them fails,
    the others are sent SIGTERM, and SIGKILL if they are still there half a minute later. `signals`
    that reach this process are passed on to them the same way. To be called on the main thread.

    Raises RanksLostError saying which rank failed and how, KeyboardInterrupt after a signal.
    """
    logging.disable(logging.ERROR)  # of the launcher, for which every end is an event of note
    rendezvous_handler_registry.register(_BACKEND, _meet)
    options = [
        "--nnodes=1",
        f"--nproc-per-node={count}",
        f"--rdzv-backend={_BACKEND}",
        f"--signals-to-handle={','.join(signals)}",
        "--module",
        module,
        *arguments,
    ]
    try:
        torchrun.run(torchrun.parse_args(options))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        raise RanksLostError(_first_failure(error.failures)) from None
    except SignalException:
        raise KeyboardInterrupt from None
    finally:
        logging.disable(logging.NOTSET)


def _meet(_: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous()


def _first_failure(failures: Mapping[int, ProcessFailure]) -> str:
    """The end that others are a consequence of: who is killed says nothing to them before."""
    rank = min(failures, key=lambda rank: (failures[rank].exitcode >= 0, failures[rank].timestamp))
    failure = failures[rank]
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    return f"rank {rank} ended with status {failure.exitcode}"
