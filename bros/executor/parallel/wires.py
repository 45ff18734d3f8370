"""Connections from rank 0 to all other ranks, for what it says in every step.

A plan has to be with the others before they can do anything. Who waits at a socket is woken once;
gloo wakes a thread that wakes another one, which takes several times as long where processors that
sleep are slow to wake, as those of virtual machines are (benchmarks/tp_speed.py). Where all ranks
have a core, they look for a while before they sleep, so that those of a busy engine do not sleep at
all between two steps: a plan then takes 70 to 90 us on its way instead of 155. Where they have not,
who looks keeps others from running.

Both ends make sure that they talk to a rank, by the process id that the system vouches for.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Sequence

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LENGTH = struct.Struct("=I")

_LOOKS = 5000
"""For about 5 ms, in which rank 0 chooses tokens, hands them on, and plans the next step."""


class Listener:
    """Rank 0's end, while others connect to it. address: a name that only this machine knows."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"")  # the system finds a free name
        self._socket.listen()
        self.address: bytes = self._socket.getsockname()

    def accept(self, process_ids: Sequence[int], timeout_s: float) -> Speaker:
        """Wait for all of these. Raises OSError if they do not come in time."""
        self._socket.settimeout(timeout_s)
        found: dict[int, socket.socket] = {}
        while len(found) < len(process_ids):
            wire, _ = self._socket.accept()
            if _process_id(wire) in process_ids:
                found[_process_id(wire)] = wire
            else:
                wire.close()
        self.close()
        for wire in found.values():
            wire.settimeout(timeout_s)
        return Speaker([found[process_id] for process_id in process_ids])

    def close(self) -> None:
        self._socket.close()


class Speaker:
    """Rank 0's end of the connections to all others."""

    def __init__(self, wires: Sequence[socket.socket]) -> None:
        self._wires = wires

    def say(self, message: bytes) -> None:
        """Raises OSError if somebody is gone, or has not listened for so long that it cannot be
        sent in time."""
        framed = _LENGTH.pack(len(message)) + message
        for wire in self._wires:
            wire.sendall(framed)

    def close(self) -> None:
        for wire in self._wires:
            wire.close()


class Hearer:
    """The end of another rank."""

    def __init__(self, address: bytes, process_id: int, *, looks: bool = False) -> None:
        """process_id: of rank 0. looks: before it sleeps. Raises OSError if rank 0 is not there."""
        self._wire = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._wire.connect(address)
        if _process_id(self._wire) != process_id:
            self.close()
            raise ConnectionError("what answers at rank 0's address is another process")
        self._looks = _LOOKS if looks else 0
        self._arrivals = select.poll()
        self._arrivals.register(self._wire, select.POLLIN)

    def hear(self, timeout_s: float | None = None) -> bytearray:
        """The next message. Raises OSError if rank 0 is gone, or says nothing for so long."""
        self._look()
        self._wire.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._take(_LENGTH.size))
        return self._take(length)

    def close(self) -> None:
        self._wire.close()

    def _look(self) -> None:
        for _ in range(self._looks):
            if self._arrivals.poll(0):
                return
            os.sched_yield()

    def _take(self, size: int) -> bytearray:
        taken = bytearray(size)
        view = memoryview(taken)
        while view:
            count = self._wire.recv_into(view)
            if not count:
                raise ConnectionError("rank 0 has closed its connection")
            view = view[count:]
        return taken


def _process_id(wire: socket.socket) -> int:
    """Of the other end, 0 if it is gone already."""
    with contextlib.suppress(OSError):
        credentials = wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])
    return 0
