"""Where ranks meet that this process has launched: a store that only this machine can reach."""

from __future__ import annotations

import socket

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

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
