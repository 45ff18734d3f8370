"""Messages over ZeroMQ: one PUSH/PULL pair of unix sockets per engine process.

    server process                                  engine process
    PUSH (bind)   folder/commands   ------------->  PULL (connect)
    PULL (bind)   folder/replies    <-------------  PUSH (connect)

A message is two frames: the index of its type in COMMANDS or REPLIES, and msgpack. Nothing is
ever dropped for want of buffer (no high-water mark); order is kept in each direction.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bros.engine.messages import COMMANDS, REPLIES, Alive, Command, Failed, Reply


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


def command_address(folder: Path) -> str:
    return f"ipc://{folder}/commands"


def reply_address(folder: Path) -> str:
    return f"ipc://{folder}/replies"


def _connect_replies(context: zmq.Context[zmq.Socket[bytes]], folder: Path) -> zmq.Socket[bytes]:
    replies = open_socket(context, zmq.PUSH)
    replies.setsockopt(zmq.LINGER, 1000)  # the last words, such as why it failed
    replies.connect(reply_address(folder))
    return replies


def send_last_words(folder: Path, reason: str) -> None:
    """Tell the server why its engine has failed, from any process. Of several, the first counts."""
    with zmq.Context() as context, _connect_replies(context, folder) as replies:
        replies.send_multipart(reply_codec().encode(Failed(reason)))


@contextlib.contextmanager
def signs_of_life(folder: Path, every_s: float) -> Iterator[None]:
    """Tell the server all the time within the block, on a thread, that this process runs."""
    ended = threading.Event()

    def tell() -> None:
        with zmq.Context() as context, _connect_replies(context, folder) as replies:
            while not ended.wait(every_s):
                replies.send_multipart(reply_codec().encode(Alive()))

    thread = threading.Thread(target=tell, name="signs-of-life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class ZmqTransport:
    """The engine's end."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._commands = open_socket(self._context, zmq.PULL)
        self._commands.connect(command_address(folder))
        self._replies = _connect_replies(self._context, folder)
        self._decoder, self._encoder = command_codec(), reply_codec()

    def receive(self, *, wait: bool) -> Iterable[Command]:
        """All commands that have arrived; blocks for the first one if `wait`."""
        flags = 0 if wait else zmq.NOBLOCK
        while True:
            try:
                frames = self._commands.recv_multipart(flags)
            except zmq.Again:
                return
            yield self._decoder.decode(frames)  # type: ignore[misc]
            flags = zmq.NOBLOCK

    def send(self, reply: Reply) -> None:
        self._replies.send_multipart(self._encoder.encode(reply))

    def close(self) -> None:
        """Close after unsent replies are out, or after a second."""
        self._commands.close()
        self._replies.close()
        self._context.term()
