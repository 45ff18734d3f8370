"""build_inputs against the same thing written as plain loops, by Python and by a compiled call."""

from __future__ import annotations

import gc
import random
import sys
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.plan import Chunk, Kept, Readout, SampleSpec, StepPlan
from bros.executor.chunk_arrays import ChunkArrays, concatenate, reference_concatenate
from bros.executor.inputs import build_inputs
from support.checkpoints import GREEDY
from support.sampling import IndexedSpec

INT32 = torch.int32

Concatenate = Callable[[tuple[Chunk, ...]], ChunkArrays]

needs_compiled = pytest.mark.skipif(
    concatenate is reference_concatenate, reason="the kernels were not built"
)
both_ways = pytest.mark.parametrize(
    "way",
    [reference_concatenate, pytest.param(concatenate, marks=needs_compiled)],
    ids=["python", "compiled"],
)


SEQUENCES: list[Callable[[list[int]], Any]] = [
    *(tuple, list, np.array),
    lambda numbers: array("i", numbers),
    lambda numbers: range(numbers[0], numbers[0] + len(numbers)),
    lambda numbers: [np.int32(number) for number in numbers],
    lambda numbers: memoryview(array("i", numbers)),
    lambda numbers: np.repeat(np.array(numbers, np.int32), 2)[::2],
]


def other_specs(rng: random.Random) -> list[SampleSpec]:
    """One with a prompt, and one of a class with other slots."""
    params = GREEDY.params
    return [SampleSpec(params, 0, rng.randrange(100)), IndexedSpec(params, 1, rng.randrange(100))]


def random_chunk(name: str, rng: random.Random) -> Chunk:
    num_tokens = rng.choice([1, 1, 1, rng.randint(2, 40)])
    segments = [rng.randrange(1000) for _ in range(3 * rng.choice([0, 1, 5]))]
    return Chunk(
        request_id=name,
        start=rng.randrange(100),
        token_ids=rng.choice(SEQUENCES)([rng.randrange(50000) for _ in range(num_tokens)]),
        segments=array("i", segments),
        slots=array("i", [rng.randrange(1000) for _ in range(num_tokens)]),
        sample=rng.choice([GREEDY, *other_specs(rng), None]),
    )


@both_ways
@given(count=st.integers(0, 12), rng=st.randoms(use_true_random=False))
def test_lays_chunks_end_to_end(way: Concatenate, count: int, rng: random.Random) -> None:
    chunks = tuple(random_chunk(str(index), rng) for index in range(count))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    samples: list[tuple[str, SampleSpec, int]] = []
    query_start, segment_start, segments = [0], [0], []
    for chunk in chunks:
        tokens.extend(chunk.token_ids)
        positions += range(chunk.start, chunk.start + len(chunk.token_ids))
        slots += chunk.slots
        segments += [list(chunk.segments[i : i + 3]) for i in range(0, len(chunk.segments), 3)]
        query_start.append(len(tokens))
        segment_start.append(len(segments))
        if chunk.sample is not None:
            rows.append(len(tokens) - 1)
            index = positions[-1] + 1 - chunk.sample.prompt_len
            samples.append((chunk.request_id, chunk.sample, index))
    arrays = way(chunks)
    assert arrays.token_ids.tolist() == tokens
    assert arrays.positions.tolist() == positions
    assert arrays.slots.tolist() == slots
    assert arrays.sample_rows.tolist() == rows
    assert arrays.samples == tuple(samples)
    assert arrays.query_start.tolist() == query_start
    assert arrays.segment_start.tolist() == segment_start
    assert arrays.segments.tolist() == segments
    assert arrays.segments.shape == (len(segments), 3)
    assert not arrays.special
    for tensor in arrays[:7]:
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == INT32 and tensor.is_contiguous()


def test_inputs_are_those_of_the_chunks_of_a_plan() -> None:
    rng = random.Random(0)
    chunks = tuple(random_chunk(str(index), rng) for index in range(9))
    inputs, arrays = build_inputs(StepPlan(7, chunks)), reference_concatenate(chunks)
    assert inputs.step == 7 and inputs.attention.num_rows == 9
    for found, expected in [
        (inputs.token_ids, arrays.token_ids),
        (inputs.positions, arrays.positions),
        (inputs.slots, arrays.slots),
        (inputs.sample_rows, arrays.sample_rows),
        (inputs.attention.query_start, arrays.query_start),
        (inputs.attention.segment_start, arrays.segment_start),
        (inputs.attention.segments, arrays.segments),
    ]:
        assert torch.equal(found, expected)
    assert inputs.samples == arrays.samples
    assert inputs.kept == () and inputs.readouts == () and len(inputs.read_rows) == 0


@both_ways
def test_chunks_that_are_read_or_continue_are_noticed(way: Concatenate) -> None:
    def chunk(**rest: Any) -> Chunk:
        return Chunk("a", 0, [7, 8], array("i"), array("i", [3, 4]), GREEDY, **rest)

    assert not way((chunk(), chunk())).special
    assert way((chunk(), chunk(readout=Readout(0, 2)))).special
    assert way((chunk(kept=Kept(1, 0, 2)), chunk())).special
    inputs = build_inputs(StepPlan(2, (chunk(readout=Readout(1, 2)), chunk(kept=Kept(1, 0, 2)))))
    assert inputs.read_rows.tolist() == [1] and inputs.kept == (Kept(1, 0, 2),)


def test_inputs_do_not_share_memory_with_the_plan() -> None:
    chunk = Chunk("a", 0, [7], array("i", [1, 0, 4]), array("i", [3]), None)
    inputs = build_inputs(StepPlan(0, (chunk,)))
    inputs.slots.add_(1)
    inputs.attention.segments.add_(1)
    assert chunk.slots == array("i", [3])
    assert chunk.segments == array("i", [1, 0, 4])


def good(**changes: Any) -> Any:
    """A chunk of two tokens and one segment."""
    chunk = Chunk("a", 5, [7, 8], array("i", [1, 0, 4]), array("i", [3, 4]), GREEDY)
    for name, value in changes.items():
        setattr(chunk, name, value)
    return chunk


class Lies:
    """A sequence whose length is not what it says."""

    def __init__(self, says: int, items: list[int]) -> None:
        self.says, self.items = says, items

    def __len__(self) -> int:
        return self.says

    def __getitem__(self, index: int) -> int:
        return self.items[index]


class Changes:
    """An integer that changes its list when it is read."""

    def __init__(self, change: Callable[[list[Any]], None]) -> None:
        self.home: list[Any] = [self, self, self]
        self._change = change

    def __index__(self) -> int:
        self._change(self.home)
        return 1


class Fails:
    def __len__(self) -> int:
        raise KeyError("no length")


class Holder:
    """Has the attributes of a chunk in a dictionary."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def attributes(chunk: Chunk) -> dict[str, Any]:
    return {name: getattr(chunk, name) for name in Chunk.__slots__}


@needs_compiled
@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"token_ids": None}, TypeError),
        ({"token_ids": 5}, TypeError),
        ({"token_ids": [1, "2"]}, TypeError),
        ({"token_ids": [1, 2.5]}, TypeError),
        ({"token_ids": [1, 2**31]}, OverflowError),
        ({"token_ids": [1, 2**80]}, OverflowError),
        ({"token_ids": array("q", [-(2**31) - 1])}, OverflowError),
        ({"token_ids": Lies(3, [1, 2])}, ValueError),
        ({"token_ids": Lies(1, [1, 2])}, ValueError),
        ({"token_ids": Lies(2**40, [1, 2])}, OverflowError),
        ({"token_ids": Changes(lambda home: home.append(1)).home}, ValueError),
        ({"token_ids": Fails()}, KeyError),
        ({"token_ids": np.zeros((2, 2), np.int32)}, ValueError),
        ({"segments": None}, TypeError),
        ({"segments": [1, 0, 4]}, TypeError),
        ({"segments": array("q", [1, 0, 4])}, TypeError),
        ({"segments": array("f", [1, 0, 4])}, TypeError),
        ({"segments": array("I", [1, 0, 4])}, TypeError),
        ({"segments": array("i", [1, 0, 4, 5])}, ValueError),
        ({"segments": np.zeros((3, 3), np.int32)}, ValueError),
        ({"segments": np.zeros(6, np.int32)[::2]}, (BufferError, ValueError)),
        ({"slots": (3, 4)}, TypeError),
        ({"slots": bytearray(8)}, TypeError),
        ({"start": None}, TypeError),
        ({"start": 1.5}, TypeError),
        ({"start": 2**31}, OverflowError),
        ({"start": 2**31 - 1}, OverflowError),
    ],
)
def test_wrong_chunks_raise_and_leave_nothing_behind(
    changes: dict[str, Any], error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    before, wrong, after = good(), good(**changes), good()
    objects = [before, before.token_ids, before.segments, before.slots, before.sample, wrong]
    objects += [GREEDY, *changes.values()]
    gc.collect()
    counts = [sys.getrefcount(found) for found in objects]
    for _ in range(3):
        with pytest.raises(error):
            concatenate((before, wrong, after))
    gc.collect()
    assert [sys.getrefcount(found) for found in objects] == counts
    before.segments.append(1)  # BufferError if a buffer had not been released
    before.slots.append(1)


@needs_compiled
def test_lists_that_become_shorter_while_they_are_read_raise() -> None:
    for change in (list.clear, list.pop):
        chunk = good(token_ids=Changes(change).home)
        with pytest.raises(ValueError, match="has changed"):
            concatenate((good(), chunk))


@needs_compiled
def test_results_hold_no_chunk_and_no_buffer() -> None:
    chunks = (good(), good(token_ids=array("i", [1, 2])))
    objects = [found for chunk in chunks for found in (chunk, *attributes(chunk).values())]
    counts = [sys.getrefcount(found) for found in objects]
    for _ in range(5):
        concatenate(chunks)
    assert [sys.getrefcount(found) for found in objects] == counts
    chunks[1].token_ids.append(1)
    chunks[0].slots.append(1)


@needs_compiled
def test_chunks_of_other_classes_and_with_missing_attributes() -> None:
    other = Holder(**attributes(good()))
    chunks: Any = (good(), other, good())
    assert concatenate(chunks).positions.tolist() == [5, 6] * 3
    chunks = (other, good(), other)
    assert concatenate(chunks).positions.tolist() == [5, 6] * 3
    for name in Chunk.__slots__:
        chunk = good()
        delattr(chunk, name)
        with pytest.raises(AttributeError):
            concatenate((good(), chunk))
        rest = attributes(good())
        del rest[name]
        missing: Any = (good(), Holder(**rest))
        with pytest.raises(AttributeError):
            concatenate(missing)
    for chunks in ([good()], None, good()):
        with pytest.raises(TypeError):
            concatenate(chunks)
    for chunks in ((None,), (1, 2), (Chunk,)):
        with pytest.raises((AttributeError, TypeError)):
            concatenate(chunks)
