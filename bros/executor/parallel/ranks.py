"""The processes that run one model together, and what they say to each other.

Rank 0 decides what is computed and tells the others; all of them compute their part of it. They are
connected in several ways:

    joining   gloo, patient for minutes: ranks read their weights at different paces
    wires     sockets, for what rank 0 says: plans, for which the others wait without limit, and
              short answers in the middle of a step
    sums      the tensors of a step, patient for seconds: nccl on GPUs, else gloo
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import select
import socket
import struct
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

# ---- Connections from rank 0 to all other ranks, for what it says in every step.
#
# The other ranks need a plan before they can do anything. A rank that waits at a socket is woken
# once; gloo wakes a thread that wakes another one, which takes several times as long where idle
# processors are slow to wake, as those of virtual machines are (benchmarks/tp_speed.py). Where all
# ranks have a core, they look for a while before they sleep, so that those of a busy engine do not
# sleep at all between two steps: a plan then takes 70 to 90 us on its way instead of 155. Without a
# core for each, a rank that looks would keep others from running.
#
# Both ends make sure that they talk to a rank, by the process id that the system vouches for.


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
        """Raises OSError if a rank has ended, or has not listened for so long that it cannot be
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


logger = logging.getLogger(__name__)

Message = NDArray[np.int32]

_SHORT_BYTES = 2**20
"""Sums of up to so many go from each rank to each on the host.

gloo's own operations wake a thread on every rank and go round in a ring. Sums of SmolLM2-135M on
two cores, ms: 64 rows on 2 ranks 0.8 by all_reduce and 0.6 so, on 3 ranks 3.5 and 1.1; 512 rows,
which are 1.1 MiB, on 2 ranks 2.9 and 3.1, on 3 ranks 7.1 and 6.0.
"""

_JOIN_TIMEOUT_S = 600.0
_YES, _NO = b"\1", b"\0"
_ADDRESS_BYTES = 108  # at most, of a socket


class Ranks(Protocol):
    """This process among those that run one model; they all call the same methods in one order.

    Every method but `close` raises RanksLostError if another rank ended, or did not take part for
    as long as a rank may wait.
    """

    @property
    def rank(self) -> int:
        """0 .. size - 1. Rank 0 schedules and samples, the others follow."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def others(self) -> tuple[int, ...]:
        """Process ids of all other ranks, in their order."""
        ...

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks, in x, which is contiguous and on the device of this rank.

        Every rank ends with the same bits. Returns x.
        """
        ...

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x: [rows, widths[rank]], of the same type and with the same rows everywhere.

        Returns [rows, sum(widths)] in the order of ranks on rank 0, [0, sum(widths)] elsewhere.
        """
        ...

    def minimum(self, value: int) -> int:
        """The least value of any rank, on all. Waits until they have loaded what they load."""
        ...

    def send(self, message: array[int] | Message) -> None:
        """On rank 0: one message of int32 numbers to every other rank."""
        ...

    def receive(self) -> Message:
        """On the other ranks: the next message of rank 0, however long it takes."""
        ...

    def any_(self, flag: bool) -> bool:
        """What rank 0 says, on all; what the others say is not looked at."""
        ...

    def close(self) -> None:
        """Leave. Calling it twice is fine."""
        ...


class Alone:
    """The only rank: it waits for no other rank and sends to none."""

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
        """There is no other rank."""

    def receive(self) -> Message:
        raise AssertionError("rank 0 sends, it never receives")

    def any_(self, flag: bool) -> bool:
        return flag

    def close(self) -> None:
        """Nothing to leave."""


ALONE: Ranks = Alone()


class TorchRanks:
    """Ranks over torch.distributed, one process each, on one machine. See Ranks."""

    def __init__(self, sums: dist.ProcessGroup, timeout_s: float, clock: Clock) -> None:
        """Use `join`."""
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
        """Meet the others, as the variables say that torchrun sets: RANK, WORLD_SIZE,
        MASTER_ADDR and MASTER_PORT. Can be done once in a process.

        attempt: another number than that of ranks that have met there before, and have ended.

        device: where this rank computes. If it is a GPU, it becomes torch's current one.
        timeout_s: how long a rank waits for another one in the middle of a step.
        Raises RanksLostError if they do not all come.
        """
        clock = clock or SystemClock()
        start = clock.now()
        try:
            timeout = _seconds(_JOIN_TIMEOUT_S)
            store, rank, size = next(rendezvous("env://", timeout=timeout))
            # torchrun keeps its store for those it starts anew, and with it where others were.
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
        with self._waiting("the others to take a plan"):
            self._speaker.say(message.tobytes())

    def receive(self) -> Message:
        assert self.rank > 0, "rank 0 sends, it never receives"
        with self._waiting("rank 0's next plan"):
            return np.frombuffer(self._hearer.hear(), np.int32)

    def any_(self, flag: bool) -> bool:
        with self._waiting("rank 0 to say whether a step goes on"):
            if self.rank > 0:
                return self._hearer.hear(self._timeout_s) == _YES
            self._speaker.say(_YES if flag else _NO)
        return flag

    def close(self) -> None:
        if self._open:
            self._open = False
            dist.destroy_process_group()
            if self.rank > 0:
                self._hearer.close()
            else:
                self._speaker.close()

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
            self._speaker = listener.accept(self.others, self._timeout_s)
        else:
            name, cores = bytes(address[: int(size)].tolist()), len(os.sched_getaffinity(0))
            self._hearer = Hearer(name, self.others[0], looks=self.size <= cores)

    def _sum_short(self, x: Tensor) -> None:
        """Everybody has the terms of all, and adds them in one order."""
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
            logger.warning("%s", error)  # names sockets, and is nothing for clients
            raise RanksLostError(
                f"rank {self.rank} of {self.size} waited {waited:.1f} s for {what}, and another "
                "rank ended or does not answer"
            ) from error


def _group(backend: str, timeout_s: float) -> dist.ProcessGroup:
    """One of all ranks, which make their groups in the same order."""
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
    """With columns of zeros at the right: all ranks must give the same number."""
    missing = columns - x.shape[1]
    return F.pad(x, (0, missing)) if missing else x.contiguous()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
