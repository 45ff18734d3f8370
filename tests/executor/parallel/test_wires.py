"""What rank 0 says arrives whole and in order, and nobody else is listened to."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.executor.parallel.ranks import Hearer, Listener, Speaker
from support.tier import examples

HERE = os.getpid()
SOON_S = 0.05
PATIENCE_S = 30.0


def connected(timeout_s: float = PATIENCE_S, *, looks: bool = False) -> tuple[Speaker, Hearer]:
    listener = Listener()
    hearer = Hearer(listener.address, HERE, looks=looks)
    return listener.accept([HERE], timeout_s), hearer


@settings(max_examples=examples(30))
@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 3000, 70_000, 1_000_000]), max_size=6),
    looks=st.booleans(),
)
def test_messages_arrive_whole_and_in_order(sizes: list[int], looks: bool) -> None:
    speaker, hearer = connected(looks=looks)
    messages = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    thread = threading.Thread(target=lambda: [speaker.say(message) for message in messages])
    thread.start()
    assert [hearer.hear(PATIENCE_S) for _ in messages] == messages
    thread.join()
    speaker.close()
    hearer.close()


@pytest.mark.parametrize("looks", [False, True])
def test_the_end_of_the_first_rank_is_heard(looks: bool) -> None:
    speaker, hearer = connected(looks=looks)
    speaker.say(b"last")
    speaker.close()
    assert hearer.hear() == b"last"
    with pytest.raises(ConnectionError, match="rank 0 has closed"):
        hearer.hear()
    hearer.close()


def test_the_end_of_another_rank_is_noticed() -> None:
    speaker, hearer = connected()
    hearer.close()
    with pytest.raises(OSError):
        speaker.say(b"a")
    speaker.close()


@pytest.mark.parametrize("looks", [False, True])
def test_nobody_waits_longer_than_asked(looks: bool) -> None:
    speaker, hearer = connected(SOON_S, looks=looks)
    with pytest.raises(TimeoutError):
        hearer.hear(SOON_S)
    with pytest.raises(TimeoutError):
        speaker.say(bytes(10_000_000))
    speaker.close()
    hearer.close()


def test_strangers_are_not_listened_to() -> None:
    listener = Listener()
    stranger = Hearer(listener.address, HERE)
    with pytest.raises(TimeoutError):
        listener.accept([HERE + 1], SOON_S)
    with pytest.raises(ConnectionError):
        stranger.hear(PATIENCE_S)
    stranger.close()
    listener.close()


def test_strangers_are_not_believed() -> None:
    listener = Listener()
    with pytest.raises(ConnectionError, match="another process"):
        Hearer(listener.address, HERE + 1)
    listener.close()
