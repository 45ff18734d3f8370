"""Communication of the processes (ranks) that run one model together.

Rank 0 schedules and sends each step to the others; every rank computes its shard of it. They use
three channels:

    joining       gloo, with a timeout of minutes: ranks load their weights at different speeds
    connections   Unix sockets, for messages of rank 0: plans, for which the others wait without a
                  timeout, and flags within a step
    sums          the collectives of a step, with a timeout of seconds: nccl on GPUs, else gloo
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import select
import socket
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from bros.core.clock import Clock, SystemClock
from bros.core.errors import RanksLostError
from bros.core.machine import available_cores

# ---- Connections over which rank 0 sends messages to all other ranks in every step.
#
# The other ranks are idle until they get a plan. A rank that waits at a socket is woken once; gloo
# wakes a thread that wakes another thread, which takes several times as long where idle processors
# wake slowly, as in virtual machines (benchmarks/tp_speed.py). If every rank has a core, ranks spin
# for a while before they sleep, so that a busy engine's ranks do not sleep between two steps: a
# plan then takes 70 to 90 us instead of 155. With fewer cores, a spinning rank would keep others
# from running, so ranks do not spin.
#
# Both ends check that the peer is a rank of this group, by the process id that the kernel reports.


_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_LENGTH = struct.Struct("=I")

_SPINS = 5000
"""About 5 ms, in which rank 0 samples, delivers the tokens and plans the next step."""


class Listener:
    """Rank 0's end while the others connect.

    address: of the socket, in the abstract namespace of this machine.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(b"")  # the system picks a free address
        self._socket.listen()
        self.address: bytes = self._socket.getsockname()

    def accept(self, process_ids: Sequence[int], timeout_s: float) -> MessageSender:
        """Wait until all these processes have connected. Raises OSError after the timeout."""
        self._socket.settimeout(timeout_s)
        found: dict[int, socket.socket] = {}
        while len(found) < len(process_ids):
            connection, _ = self._socket.accept()
            if _process_id(connection) in process_ids:
                found[_process_id(connection)] = connection
            else:
                connection.close()
        self.close()
        for connection in found.values():
            connection.settimeout(timeout_s)
        return MessageSender([found[process_id] for process_id in process_ids])

    def close(self) -> None:
        self._socket.close()


class MessageSender:
    """Rank 0's end of the connections to all other ranks."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        self._connections = connections

    def send(self, message: bytes) -> None:
        """Raises OSError if a rank has ended, or does not read for longer than the timeout."""
        framed = _LENGTH.pack(len(message)) + message
        for connection in self._connections:
            connection.sendall(framed)

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


class MessageReceiver:
    """The end of another rank."""

    def __init__(self, address: bytes, process_id: int, *, spins: bool = False) -> None:
        """process_id: of rank 0.
        spins: whether `receive` spins before it sleeps.

        Raises OSError if rank 0 does not listen at this address.
        """
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.connect(address)
        if _process_id(self._connection) != process_id:
            self.close()
            raise ConnectionError("another process listens at rank 0's address")
        self._spins = _SPINS if spins else 0
        self._poll = select.poll()
        self._poll.register(self._connection, select.POLLIN)

    def receive(self, timeout_s: float | None = None) -> bytearray:
        """The next message. Raises OSError if rank 0 has ended, and after the timeout."""
        self._spin()
        self._connection.settimeout(timeout_s)
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        self._connection.close()

    def _spin(self) -> None:
        for _ in range(self._spins):
            if self._poll.poll(0):
                return
            os.sched_yield()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self._connection.recv_into(view)
            if not count:
                raise ConnectionError("rank 0 has closed its connection")
            view = view[count:]
        return data


def _process_id(connection: socket.socket) -> int:
    """The process id of the peer, 0 if it has ended."""
    with contextlib.suppress(OSError):
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        return int(_CREDENTIALS.unpack(credentials)[0])
    return 0


logger = logging.getLogger(__name__)

Message = NDArray[np.int32]
"""What rank 0 sends for each step, see plan_codec.py."""

_SHORT_BYTES = 2**20
"""Host tensors up to this size are summed by sending them from each rank to each other rank.

gloo's all_reduce wakes a thread on every rank and communicates in a ring. Sums of SmolLM2-135M on
two cores, ms, all_reduce and this: 64 rows on 2 ranks 0.8 and 0.6, on 3 ranks 3.5 and 1.1; 512
rows (1.1 MiB) on 2 ranks 2.9 and 3.1, on 3 ranks 7.1 and 6.0.
"""

_JOIN_TIMEOUT_S = 600.0
_YES, _NO = b"\1", b"\0"
_ADDRESS_BYTES = 108  # the longest address of a Unix socket


class Ranks(Protocol):
    """One rank's communication with the others. All ranks call the same methods in the same order.

    Every method except `close` raises RanksLostError if another rank ended, or did not take part
    within the timeout.
    """

    @property
    def rank(self) -> int:
        """0 .. size - 1. Rank 0 schedules and samples, the others follow."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def others(self) -> tuple[int, ...]:
        """Process ids of all other ranks, in the order of ranks."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in place; returns x. All ranks get the same bits.

        x: contiguous, on the device of this rank.
        """
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate x [rows, widths[rank]] along columns; dtype and rows are equal on all ranks.

        Returns [rows, sum(widths)] in the order of ranks on rank 0, [0, sum(widths)] on others.
        """
        ...

    def minimum(self, value: int) -> int:
        """The least value of all ranks, on every rank. The timeout allows for loading a model."""
        ...

    def send(self, message: array[int] | Message) -> None:
        """On rank 0: send one message of int32 numbers to every other rank."""
        ...

    def receive(self) -> Message:
        """On other ranks: the next message of rank 0. Waits without a timeout."""
        ...

    def broadcast_flag(self, flag: bool) -> bool:
        """The flag of rank 0, on every rank. The argument of the others is ignored."""
        ...

    def close(self) -> None:
        """Leave the group. May be called twice."""
        ...


class SingleRank:
    """Ranks of a model that runs in one process: there is no communication."""

    rank = 0
    size = 1
    others: tuple[int, ...] = ()

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return x

    def minimum(self, value: int) -> int:
        return value

    def send(self, message: array[int] | Message) -> None:
        """Does nothing: there is no other rank."""

    def receive(self) -> Message:
        raise AssertionError("rank 0 sends, it never receives")

    def broadcast_flag(self, flag: bool) -> bool:
        return flag

    def close(self) -> None:
        """Does nothing."""


SINGLE_RANK: Ranks = SingleRank()


class TorchRanks:
    """Ranks over torch.distributed, one process each, on one machine. See Ranks."""

    def __init__(self, sums: dist.ProcessGroup, timeout_s: float, clock: Clock) -> None:
        """Private: use `join`."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._sums = sums
        self._timeout_s = timeout_s
        self._clock = clock
        self._open = True
        self.others = self._process_ids()
        self._connect()

    @classmethod
    def join(
        cls,
        device: torch.device,
        timeout_s: float,
        clock: Clock | None = None,
        *,
        attempt: int = 0,
    ) -> TorchRanks:
        """Connect to the other ranks; possible once per process.

        Reads the environment variables that torchrun sets: RANK, WORLD_SIZE, MASTER_ADDR and
        MASTER_PORT.

        device: of this rank. A GPU becomes torch's current device.
        timeout_s: how long a rank waits for another rank within a step.
        attempt: a number that earlier ranks at the same store have not used.
        Raises RanksLostError if not all ranks connect in time.
        """
        clock = clock or SystemClock()
        start = clock.now()
        # Of one machine: else gloo listens at the address that the host's name has.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        try:
            timeout = _seconds(_JOIN_TIMEOUT_S)
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            # When torchrun restarts ranks, its store still holds the addresses of the old ones.
            store = PrefixStore(f"attempt {attempt}", store)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
            if device.type == "cuda":
                torch.cuda.set_device(device)
            sums = _group("nccl" if device.type == "cuda" else "gloo", timeout_s)
            return cls(sums, timeout_s, clock)
        except (RuntimeError, ValueError, OSError) as error:
            waited = clock.now() - start
            raise RanksLostError(
                f"the ranks did not all come together within {waited:.0f} s: {_first_line(error)}"
            ) from error

    def all_reduce_(self, x: Tensor) -> Tensor:
        with self._waiting("the sum of a layer"):
            if x.is_cuda or x.nbytes > _SHORT_BYTES:
                dist.all_reduce(x, group=self._sums)
            elif len(x):
                self._sum_short(x)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        rows, widest = len(x), max(widths)
        if self.rank > 0:
            if rows:
                self._gather(_widened(x, widest), None)
            return x.new_empty(0, sum(widths))
        if not rows:
            return x.new_empty(0, sum(widths))
        parts = [x.new_empty(rows, widest) for _ in widths]
        self._gather(_widened(x, widest), parts)
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)

    def minimum(self, value: int) -> int:
        least = torch.tensor([value])
        with self._waiting("the others to load the model"):
            dist.all_reduce(least, dist.ReduceOp.MIN)
        return int(least)

    def send(self, message: array[int] | Message) -> None:
        assert self.rank == 0, "only rank 0 sends"
        with self._waiting("the others to receive a plan"):
            self._sender.send(message.tobytes())

    def receive(self) -> Message:
        assert self.rank > 0, "rank 0 sends, it never receives"
        with self._waiting("rank 0's next plan"):
            return np.frombuffer(self._receiver.receive(), np.int32)

    def broadcast_flag(self, flag: bool) -> bool:
        with self._waiting("rank 0 to decide whether the step is aborted"):
            if self.rank > 0:
                return self._receiver.receive(self._timeout_s) == _YES
            self._sender.send(_YES if flag else _NO)
        return flag

    def close(self) -> None:
        if self._open:
            self._open = False
            dist.destroy_process_group()
            if self.rank > 0:
                self._receiver.close()
            else:
                self._sender.close()

    def _process_ids(self) -> tuple[int, ...]:
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(every, torch.tensor([os.getpid()]))
        return tuple(int(pid) for rank, pid in enumerate(every) if rank != self.rank)

    def _connect(self) -> None:
        address = torch.zeros(_ADDRESS_BYTES, dtype=torch.uint8)
        size = torch.zeros(1, dtype=torch.int64)
        if self.rank == 0:
            listener = Listener()
            size[0] = len(listener.address)
            address[: len(listener.address)] = torch.tensor(list(listener.address))
        dist.broadcast(size, 0)
        dist.broadcast(address, 0)
        if self.rank == 0:
            self._sender = listener.accept(self.others, self._timeout_s)
        else:
            name, cores = bytes(address[: int(size)].tolist()), available_cores()
            self._receiver = MessageReceiver(name, self.others[0], spins=self.size <= cores)

    def _sum_short(self, x: Tensor) -> None:
        """Every rank receives the terms of all ranks and adds them in the same order."""
        terms = x.new_empty(self.size, *x.shape)
        works = []
        for rank, term in enumerate(terms):
            if rank == self.rank:
                term.copy_(x)
            else:
                works += [dist.isend(x, rank, self._sums), dist.irecv(term, rank, self._sums)]
        _wait(works)
        torch.sum(terms, 0, out=x)

    def _gather(self, x: Tensor, parts: list[Tensor] | None) -> None:
        with self._waiting("the logits of all ranks"):
            dist.gather(x, parts, 0, group=self._sums)

    @contextlib.contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        start = self._clock.now()
        try:
            yield
        except (RuntimeError, OSError) as error:
            waited = self._clock.now() - start
            logger.warning("%s", error)  # details for the log, not for clients
            raise RanksLostError(
                f"rank {self.rank} of {self.size} waited {waited:.1f} s for {what}; another rank "
                "ended or does not answer"
            ) from error


def _group(backend: str, timeout_s: float) -> dist.ProcessGroup:
    """A process group of all ranks. They must create their groups in the same order."""
    group = dist.new_group(backend=backend, timeout=_seconds(timeout_s))
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None, "every rank is a member"
        work.wait()


def _seconds(value: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=value)


def _widened(x: Tensor, columns: int) -> Tensor:
    """x, padded with columns of zeros: all ranks must send the same number of columns."""
    missing = columns - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
