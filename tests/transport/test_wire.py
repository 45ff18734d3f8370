"""The connection of an engine on another machine: encrypted, and neither end goes on without it."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from bros.core.clock import ManualClock
from bros.engine.messages import Abort, Command, Failed, GetStats, Submit
from bros.transport.ipc import Endpoints, ZmqTransport, command_codec, open_socket, reply_codec
from support.process_engine import ask

WAIT_MS = 10_000


class Server:
    """The server's end, at ports of the loopback device."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        public, secret = zmq.curve_keypair()
        self.commands = open_socket(context, zmq.PUSH)
        self.replies = open_socket(context, zmq.PULL)
        for socket in (self.commands, self.replies):
            socket.curve_server, socket.curve_secretkey = True, secret
            socket.bind("tcp://127.0.0.1:*")
        addresses = [s.get_string(zmq.LAST_ENDPOINT) for s in (self.commands, self.replies)]
        self.endpoints = Endpoints(addresses[0], addresses[1], public.decode())


@pytest.fixture
def server() -> Iterator[Server]:
    with zmq.Context() as context:
        server = Server(context)
        yield server
        context.destroy(linger=0)


def test_messages_pass_in_both_directions(server: Server, tmp_path: Path) -> None:
    server.endpoints.write(tmp_path)
    assert Endpoints.of(tmp_path) == server.endpoints
    transport = ZmqTransport(tmp_path)
    server.commands.send_multipart(command_codec().encode(Abort("a")))
    server.commands.send_multipart(command_codec().encode(GetStats(1)))
    [first, *_] = transport.receive(wait=True)
    assert first == Abort("a")
    transport.send(Failed("why"))
    assert server.replies.poll(WAIT_MS)
    assert reply_codec().decode(server.replies.recv_multipart()) == Failed("why")
    transport.close()


def test_a_request_arrives_on_the_clock_of_the_engine(server: Server, tmp_path: Path) -> None:
    server.endpoints.write(tmp_path)
    transport = ZmqTransport(tmp_path, ManualClock(500_000.0))
    request = ask("a")
    for arrival_s in (98.5, 0.0):  # of which the second one has no time
        command = Submit(dataclasses.replace(request, arrival_s=arrival_s), sent_s=100.0)
        server.commands.send_multipart(command_codec().encode(command))
    received: list[Command] = []
    while len(received) < 2:
        received += transport.receive(wait=True)
    assert [c.request.arrival_s for c in received if isinstance(c, Submit)] == [499_998.5, 0.0]
    transport.close()


def test_a_message_that_cannot_be_read_ends_the_engine(server: Server, tmp_path: Path) -> None:
    server.endpoints.write(tmp_path)
    transport = ZmqTransport(tmp_path)
    kind, _ = command_codec().encode(Abort("a"))
    server.commands.send_multipart([kind, b"?"])
    with pytest.raises(msgspec.MsgspecError):
        transport.receive(wait=True)
    transport.close()


@pytest.mark.parametrize("key", ["none", "other"])
def test_a_peer_without_the_key_neither_receives_nor_sends(
    server: Server, tmp_path: Path, key: str
) -> None:
    other = zmq.curve_keypair()[0].decode() if key == "other" else ""
    endpoints = Endpoints(server.endpoints.commands, server.endpoints.replies, other)
    with zmq.Context() as context:
        thief = endpoints.connect(context, zmq.PULL, endpoints.commands)
        liar = endpoints.connect(context, zmq.PUSH, endpoints.replies)
        with contextlib.suppress(zmq.Again):  # if its connection has been refused already
            liar.send_multipart(reply_codec().encode(Failed("a lie")), zmq.NOBLOCK)
        # A peer with the key connects later, and gets and sends everything all the same.
        server.endpoints.write(tmp_path)
        transport = ZmqTransport(tmp_path)
        transport.send(Failed("why"))
        assert server.replies.poll(WAIT_MS)
        assert reply_codec().decode(server.replies.recv_multipart()) == Failed("why")
        for name in ("a", "b", "c"):
            server.commands.send_multipart(command_codec().encode(Abort(name)))
        names: list[str] = []
        while len(names) < 3:
            names += [c.request_id for c in transport.receive(wait=True) if isinstance(c, Abort)]
        assert names == ["a", "b", "c"]
        assert not server.replies.poll(0) and not thief.poll(0)
        transport.close()
        context.destroy(linger=0)


_ENGINE = """
import sys
from pathlib import Path
from bros.transport.ipc import ZmqTransport
from bros.engine.messages import Failed

transport = ZmqTransport(Path(sys.argv[1]))
transport.send(Failed("here"))
list(transport.receive(wait=True))
list(transport.receive(wait=True))
print("went on", flush=True)
"""


def test_an_engine_ends_when_its_connection_breaks(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    server.endpoints.write(folder)
    command = [sys.executable, "-c", _ENGINE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as engine:
        assert server.replies.poll(WAIT_MS)
        server.commands.send_multipart(command_codec().encode(GetStats(1)))
        server.commands.close(linger=WAIT_MS)
        assert engine.wait(20) == 1
        assert engine.stdout is not None and engine.stdout.read() == b""
    assert not folder.exists(), "its key is of no use any more"
