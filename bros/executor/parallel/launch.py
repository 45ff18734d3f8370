"""Starts the ranks of a model with torchrun, the launcher of torch.distributed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from bros.core.errors import RanksLostError

# ---- The rendezvous of ranks that this process has launched: a store only this machine can reach.


_LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """A rendezvous for the ranks of one launcher, which only need the address of their store.

    torchrun's default rendezvous listens on all network interfaces, for launchers on other
    machines, and unpickles what it receives there.
    """

    def __init__(self) -> None:
        with socket.create_server((_LOOPBACK, 0)) as listener:
            self._port = listener.getsockname()[1]
            self._store = TCPStore(
                _LOOPBACK,
                self._port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        self._closed = False

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the store of the launcher and open none of their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(_LOOPBACK, self._port)
        return RendezvousInfo(PrefixStore("launcher", self._store), 0, 1, where)

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self.get_backend()

    def shutdown(self) -> bool:
        self.set_closed()
        return True


_BACKEND = "loopback"

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP")


def launch_ranks(
    count: int, module: str, arguments: Sequence[str], signals: Sequence[str] = STOP_SIGNALS
) -> None:
    """Run `python -m module arguments` in `count` processes of this machine until all have ended.

    They meet at a free port of the loopback interface (LoopbackRendezvous). When one of them fails,
    torchrun sends the others SIGTERM, and SIGKILL if they still run half a minute later. It treats
    `signals` that this process receives in the same way. Call this on the main thread.

    Raises RanksLostError, which says which rank failed and how; KeyboardInterrupt after a signal.
    """
    logging.disable(logging.ERROR)  # torchrun logs an error for every exit of a rank
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
    """The failure that caused the others. A killed rank (exitcode < 0) goes first: it reported
    nothing, so the errors of the others may have earlier timestamps."""
    rank = min(failures, key=lambda rank: (failures[rank].exitcode >= 0, failures[rank].timestamp))
    failure = failures[rank]
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    return f"rank {rank} ended with status {failure.exitcode}"
