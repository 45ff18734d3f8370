"""Starts the ranks of a model through torch.distributed's launcher, which is torchrun."""

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

# ---- Where ranks meet that this process has launched: a store that only this machine can reach.


_LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """All ranks are of one launcher, so there is nothing to agree on but where their store is.

    The rendezvous that torchrun uses by itself listens on all network devices, for launchers of
    other machines, and unpickles what it is told there.
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
        """Ranks use the store of the launcher, and open none of their own."""
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
    """The end that others are a consequence of: a process that is killed reports nothing before."""
    rank = min(failures, key=lambda rank: (failures[rank].exitcode >= 0, failures[rank].timestamp))
    failure = failures[rank]
    if failure.exitcode < 0:
        return f"rank {rank} was ended by {failure.signal_name()}"
    return f"rank {rank} ended with status {failure.exitcode}"
