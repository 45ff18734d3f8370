"""Messages of rank 0 arrive whole and in order, and other processes cannot connect."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.executor.parallel.ranks import Listener, MessageReceiver, MessageSender
from support.tier import examples

HERE = os.getpid()
SOON_S = 0.05
PATIENCE_S = 30.0


def connected(
    timeout_s: float = PATIENCE_S, *, spins: bool = False
) -> tuple[MessageSender, MessageReceiver]:
    listener = Listener()
    receiver = MessageReceiver(listener.address, HERE, spins=spins)
    return listener.accept([HERE], timeout_s), receiver


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 3000, 70_000, 1_000_000]), max_size=6),
    spins=st.booleans(),
)
def test_messages_arrive_whole_and_in_order(sizes: list[int], spins: bool) -> None:
    sender, receiver = connected(spins=spins)
    messages = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    thread = threading.Thread(target=lambda: [sender.send(message) for message in messages])
    thread.start()
    assert [receiver.receive(PATIENCE_S) for _ in messages] == messages
    thread.join()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("spins", [False, True])
def test_the_end_of_the_first_rank_is_heard(spins: bool) -> None:
    sender, receiver = connected(spins=spins)
    sender.send(b"last")
    sender.close()
    assert receiver.receive() == b"last"
    with pytest.raises(ConnectionError, match="rank 0 has closed"):
        receiver.receive()
    receiver.close()


def test_the_end_of_another_rank_is_noticed() -> None:
    sender, receiver = connected()
    receiver.close()
    with pytest.raises(OSError):
        sender.send(b"a")
    sender.close()


@pytest.mark.parametrize("spins", [False, True])
def test_no_rank_waits_longer_than_asked(spins: bool) -> None:
    sender, receiver = connected(SOON_S, spins=spins)
    with pytest.raises(TimeoutError):
        receiver.receive(SOON_S)
    with pytest.raises(TimeoutError):
        sender.send(bytes(10_000_000))
    sender.close()
    receiver.close()


def test_strangers_are_not_listened_to() -> None:
    listener = Listener()
    stranger = MessageReceiver(listener.address, HERE)
    with pytest.raises(TimeoutError):
        listener.accept([HERE + 1], SOON_S)
    with pytest.raises(ConnectionError):
        stranger.receive(PATIENCE_S)
    stranger.close()
    listener.close()


def test_strangers_are_not_believed() -> None:
    listener = Listener()
    with pytest.raises(ConnectionError, match="another process"):
        MessageReceiver(listener.address, HERE + 1)
    listener.close()
