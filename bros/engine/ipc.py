"""Messages over ZeroMQ: one PUSH/PULL pair of unix sockets per engine process.

    server process                                  engine process
    PUSH (bind)   folder/commands   ------------->  PULL (connect)
    PULL (bind)   folder/replies    <-------------  PUSH (connect)

A message is two frames: the index of its type in COMMANDS or REPLIES, and msgpack. Nothing is
ever dropped for want of buffer (no high-water mark); order is kept in each direction.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bros.engine.messages import COMMANDS, REPLIES, Command, Reply


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


class ZmqTransport:
    """The engine's end."""

    def __init__(self, folder: Path) -> None:
        self._context = zmq.Context()
        self._commands = open_socket(self._context, zmq.PULL)
        self._commands.connect(command_address(folder))
        self._replies = open_socket(self._context, zmq.PUSH)
        self._replies.setsockopt(zmq.LINGER, 1000)  # the last words, such as why it failed
        self._replies.connect(reply_address(folder))
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
