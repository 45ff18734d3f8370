"""Messages over ZeroMQ: one PUSH/PULL pair of sockets per engine process.

    server process                                  engine process
    PUSH (bind)   folder/commands   ------------->  PULL (connect)
    PULL (bind)   folder/replies    <-------------  PUSH (connect)

For an engine on another machine the folder has a file with the server's TCP endpoints (Endpoints)
instead of sockets. A message is two frames: the index of its type in COMMANDS or REPLIES, and
msgpack. Sockets have no high-water mark, so no message is dropped; each direction keeps its order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from bros.core.clock import Clock, SystemClock
from bros.engine.messages import (
    COMMANDS,
    REPLIES,
    Command,
    Failed,
    Heartbeat,
    Inbox,
    Reply,
    Submit,
)

_ENDPOINTS_FILE = "endpoints.json"
_STOP = "inproc://stop"

_ZMQ_HEARTBEAT_MS = 2000
"""Interval and timeout of ZeroMQ's own heartbeats between two machines."""


class Codec:
    """Encodes and decodes the messages of one direction."""

    def __init__(self, types: tuple[type, ...]) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._index = {message_type: bytes([i]) for i, message_type in enumerate(types)}
        self._decoders: list[msgspec.msgpack.Decoder[Any]] = [
            msgspec.msgpack.Decoder(message_type) for message_type in types
        ]

    def encode(self, message: Command | Reply) -> list[bytes]:
        return [self._index[type(message)], self._encoder.encode(message)]

    def decode(self, frames: list[bytes]) -> object:
        """Raises msgspec.ValidationError if the body is not what its type says."""
        index, body = frames
        return self._decoders[index[0]].decode(body)


def command_codec() -> Codec:
    return Codec(COMMANDS)


def reply_codec() -> Codec:
    return Codec(REPLIES)


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    """A socket without high-water mark that discards unsent messages when it is closed."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where the server listens.

    commands: ZeroMQ address of its PUSH socket.
    replies: ZeroMQ address of its PULL socket.
    server_key: its public CURVE key, which clients need to connect; empty: no encryption.
    """

    commands: str
    replies: str
    server_key: str = ""

    @classmethod
    def of(cls, folder: Path) -> Endpoints:
        """The endpoints in the folder's file; without a file, sockets in the folder."""
        try:
            return cls(**json.loads((folder / _ENDPOINTS_FILE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls(f"ipc://{folder}/commands", f"ipc://{folder}/replies")

    def write(self, folder: Path) -> None:
        """Write the folder's file. Call it before the process starts. Only the owner may be able to
        read the folder."""
        text = json.dumps(dataclasses.asdict(self))
        (folder / _ENDPOINTS_FILE).write_text(text, encoding="utf-8")

    def connect(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str
    ) -> zmq.Socket[bytes]:
        """A socket of the engine's end. It queues messages until the server listens."""
        socket = open_socket(context, kind)
        if self.server_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self.server_key.encode()
            socket.setsockopt(zmq.HEARTBEAT_IVL, _ZMQ_HEARTBEAT_MS)
        socket.connect(address)
        return socket


def _connect_replies(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> zmq.Socket[bytes]:
    endpoints = Endpoints.of(folder)
    replies = endpoints.connect(context, zmq.PUSH, endpoints.replies)
    replies.setsockopt(zmq.LINGER, 1000)  # for the last reply, such as Failed
    return replies


def send_failure(folder: Path, reason: str, *, hung: bool = False) -> None:
    """Send Failed to the server, from any process of the engine. The server uses the first one."""
    with zmq.Context() as context, _connect_replies(context, folder) as replies:
        replies.send_multipart(reply_codec().encode(Failed(reason, hung)))


@contextlib.contextmanager
def heartbeats(
    folder: Path,
    every_s: float,
    *,
    host: bool = False,
    check: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Send Heartbeat to the server every `every_s` seconds, on a thread, until the block ends.

    host: this process is not the engine, but has started it on another machine.
    check: called before each heartbeat, on that thread; does not return if the engine hangs.
    """
    ended = threading.Event()

    def send() -> None:
        with zmq.Context() as context, _connect_replies(context, folder) as replies:
            frames = reply_codec().encode(Heartbeat(os.getpid(), host))
            while not ended.wait(every_s):
                check()
                replies.send_multipart(frames)

    thread = threading.Thread(target=send, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class ZmqTransport:
    """The engine's end of the connection.

    A thread moves commands from the socket to `_inbox`, so that `has_arrivals` only looks at a
    queue. No other thread uses that socket: ZeroMQ sockets are not thread-safe.
    """

    def __init__(self, folder: Path, clock: Clock | None = None) -> None:
        """clock: of the engine; None: the system's."""
        self._clock = clock or SystemClock()
        self._context = zmq.Context()
        endpoints = Endpoints.of(folder)
        self._commands = endpoints.connect(self._context, zmq.PULL, endpoints.commands)
        self._replies = _connect_replies(self._context, folder)
        self._remote = bool(endpoints.server_key)
        if self._remote:
            # ZeroMQ loses messages silently when a connection breaks.
            for socket in (self._commands, self._replies):
                _exit_on_disconnect(socket, folder)
        self._decoder, self._encoder = command_codec(), reply_codec()
        self._inbox = Inbox()
        self.receive, self.put = self._inbox.receive, self._inbox.put
        self._stop, self._stopped = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._stop.bind(_STOP)
        self._stopped.connect(_STOP)
        self._receiver = threading.Thread(target=self._receive, name="commands", daemon=True)
        self._receiver.start()

    @property
    def has_arrivals(self) -> bool:
        """See Inbox."""
        return self._inbox.has_arrivals

    def _receive(self) -> None:
        """Put commands into the inbox, until `close`."""
        poller = zmq.Poller()
        poller.register(self._stopped, zmq.POLLIN)
        poller.register(self._commands, zmq.POLLIN)
        try:
            while self._stopped not in dict(poller.poll()):
                command = self._decoder.decode(self._commands.recv_multipart())
                if isinstance(command, Submit):
                    command = command.received(self._clock.now())
                self._inbox.put(command)  # type: ignore[arg-type]
        except Exception as error:
            self._inbox.put(error)  # raised on the engine's thread

    def send(self, reply: Reply) -> None:
        self._replies.send_multipart(self._encoder.encode(reply))

    def close(self) -> None:
        """Close once all replies are sent, or after a second."""
        self._stop.send(b"")
        self._receiver.join()
        self._stop.close()
        self._stopped.close()
        if self._remote:
            for socket in (self._commands, self._replies):
                socket.disable_monitor()
        self._commands.close()
        self._replies.close()
        self._context.term()


def _exit_on_disconnect(socket: zmq.Socket[bytes], folder: Path) -> None:
    """Exit when the connection of `socket` breaks, until its monitor is disabled.

    folder: removed here, because the process that made it may be dead.
    """
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)

    def wait() -> None:
        with monitor, contextlib.suppress(zmq.ZMQError):  # raised when the monitor is disabled
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)

    threading.Thread(target=wait, name="connection", daemon=True).start()
