"""Messages over ZeroMQ: one PUSH/PULL pair of sockets per engine process.

    server process                                  engine process
    PUSH (bind)   folder/commands   ------------->  PULL (connect)
    PULL (bind)   folder/replies    <-------------  PUSH (connect)

On another machine the folder has a file instead of sockets, which says where those are (Wire).
A message is two frames: the index of its type in COMMANDS or REPLIES, and msgpack. Nothing is
ever dropped for want of buffer (no high-water mark); order is kept in each direction.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from bros.engine.messages import COMMANDS, REPLIES, Command, Failed, Heartbeat, Inbox, Reply

_WIRE = "wire.json"
_STOP = "inproc://stop"

_HEARTBEAT_MS = 2000
"""How often the ends on two machines look whether the other is still there, and for how long."""


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
    """A socket without high-water mark that closes at once."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


@dataclass(frozen=True, slots=True)
class Wire:
    """Where the server listens.

    server_key: its public key (CURVE), where others could listen in: who does not know it cannot
        connect; empty: nothing is encrypted.
    """

    commands: str
    replies: str
    server_key: str = ""

    @classmethod
    def of(cls, folder: Path) -> Wire:
        """What the folder's file says; without one, sockets in the folder itself."""
        try:
            return cls(**json.loads((folder / _WIRE).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return cls(f"ipc://{folder}/commands", f"ipc://{folder}/replies")

    def write(self, folder: Path) -> None:
        """Before the process is started. The folder is readable by its owner only."""
        (folder / _WIRE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    def connect(
        self, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str
    ) -> zmq.Socket[bytes]:
        """A socket of the engine's end; messages wait in it until the server is there."""
        socket = open_socket(context, kind)
        if self.server_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = self.server_key.encode()
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.connect(address)
        return socket


def _connect_replies(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> zmq.Socket[bytes]:
    wire = Wire.of(folder)
    replies = wire.connect(context, zmq.PUSH, wire.replies)
    replies.setsockopt(zmq.LINGER, 1000)  # the last words, such as why it failed
    return replies


def send_last_words(folder: Path, reason: str) -> None:
    """Tell the server why its engine has failed, from any process. Of several, the first counts."""
    with zmq.Context() as context, _connect_replies(context, folder) as replies:
        replies.send_multipart(reply_codec().encode(Failed(reason)))


@contextlib.contextmanager
def heartbeats(folder: Path, every_s: float, *, host: bool = False) -> Iterator[None]:
    """Tell the server all the time within the block, on a thread, that this process runs.

    host: it is not the engine's, but the one that has started it on another machine.
    """
    ended = threading.Event()

    def tell() -> None:
        with zmq.Context() as context, _connect_replies(context, folder) as replies:
            while not ended.wait(every_s):
                replies.send_multipart(reply_codec().encode(Heartbeat(host)))

    thread = threading.Thread(target=tell, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class ZmqTransport:
    """The engine's end.

    A thread takes commands from their socket into `_inbox`, so that whether any have come is a look
    at a queue of this process; sockets are not for two threads.
    """

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        wire = Wire.of(folder)
        self._commands = wire.connect(self._context, zmq.PULL, wire.commands)
        self._replies = _connect_replies(self._context, folder)
        self._remote = bool(wire.server_key)
        if self._remote:
            # What has been handed over when a connection breaks is lost without notice.
            for socket in (self._commands, self._replies):
                _end_when_cut(socket, folder)
        self._decoder, self._encoder = command_codec(), reply_codec()
        self._inbox = Inbox()
        self.receive = self._inbox.receive
        self._stop, self._stopped = (self._context.socket(zmq.PAIR) for _ in range(2))
        self._stop.bind(_STOP)
        self._stopped.connect(_STOP)
        self._receiver = threading.Thread(target=self._take_in, name="commands", daemon=True)
        self._receiver.start()

    @property
    def has_arrivals(self) -> bool:
        """Whether commands wait to be received."""
        return self._inbox.has_arrivals

    def _take_in(self) -> None:
        """Put what comes into the inbox, until `close`."""
        poller = zmq.Poller()
        poller.register(self._stopped, zmq.POLLIN)
        poller.register(self._commands, zmq.POLLIN)
        try:
            while self._stopped not in dict(poller.poll()):
                frames = self._commands.recv_multipart()
                self._inbox.put(self._decoder.decode(frames))  # type: ignore[arg-type]
        except Exception as error:  # the engine's thread is to end by it
            self._inbox.put(error)

    def send(self, reply: Reply) -> None:
        self._replies.send_multipart(self._encoder.encode(reply))

    def close(self) -> None:
        """Close after unsent replies are out, or after a second."""
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


def _end_when_cut(socket: zmq.Socket[bytes], folder: Path) -> None:
    """End this process once the connection of `socket` breaks, until its monitor is disabled.

    folder: the process that has started this one may have no time to remove it.
    """
    monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED)

    def wait() -> None:
        with monitor, contextlib.suppress(zmq.ZMQError):  # raised once it is disabled
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)

    threading.Thread(target=wait, name="connection", daemon=True).start()
