"""Inputs on their way: buffers that are not overwritten too early, and tokens that come late."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.executor.inputs import pending_filled_in, upload
from bros.executor.target import CPU
from bros.kernels.staging import Staging
from support.kernel_cases import int32


class Copies:
    """A device that copies from staging buffers when it pleases, and events that wait for it."""

    def __init__(self) -> None:
        self.under_way: list[tuple[torch.Tensor, list[int]]] = []

    def send(self, buffer: torch.Tensor) -> None:
        self.under_way.append((buffer, buffer.tolist()))

    def finish(self, count: int) -> None:
        """The oldest `count` copies; each must still find what was sent."""
        for buffer, content in self.under_way[:count]:
            assert buffer.tolist() == content
        del self.under_way[:count]

    def new_event(self) -> Event:
        return Event(self)


class Event:
    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._last: tuple[torch.Tensor, list[int]] | None = None

    def record(self) -> None:
        self._last = self._copies.under_way[-1]

    def synchronize(self) -> None:
        for index, copy in enumerate(self._copies.under_way):
            if copy is self._last:
                self._copies.finish(index + 1)
                return


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 2)), max_size=20))
def test_no_buffer_is_written_before_it_was_copied(steps: list[tuple[int, int]]) -> None:
    copies = Copies()
    staging = Staging(CPU, copies.new_event)
    for number, (size, finished) in enumerate(steps):
        buffer = staging.take(size)
        assert buffer.shape == (size,) and buffer.dtype == torch.int32
        buffer.fill_(number)
        copies.send(buffer)
        staging.sent()
        assert len(copies.under_way) <= 2
        copies.finish(finished)
    copies.finish(len(copies.under_way))


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    rng=st.randoms(use_true_random=False),
)
def test_one_copy_brings_all_vectors(lengths: list[int], rng: random.Random) -> None:
    """At multiples of 16 bytes, for which kernels are compiled."""
    staging = Staging(CPU)
    vectors = [int32([rng.randrange(1000) for _ in range(length)]) for length in lengths]
    there = upload(vectors, staging, CPU)
    again = upload(vectors[::-1], staging, CPU)
    assert [vector.tolist() for vector in there] == [vector.tolist() for vector in vectors]
    assert [vector.tolist() for vector in again[::-1]] == [vector.tolist() for vector in vectors]
    start = there[0].data_ptr()
    assert all((v.data_ptr() - start) % 16 == 0 for v in there if len(v))
    assert len({vector.untyped_storage().data_ptr() for vector in there}) == 1


def test_late_tokens_are_filled_in_and_the_others_kept() -> None:
    token_ids = int32([5, -1, 7, -1])
    filled = pending_filled_in(token_ids, int32([40, 41, 42]), int32([-1, 2, -1, 0]))
    assert filled.tolist() == [5, 42, 7, 40] and filled.dtype == torch.int32
    assert token_ids.tolist() == [5, -1, 7, -1]
    assert pending_filled_in(filled, int32([9]), int32([-1, -1, -1, -1])).tolist() == [5, 42, 7, 40]
