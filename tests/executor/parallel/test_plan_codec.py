"""What comes out of a message is what the plan says, whatever was sent before."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.core.plan import (
    PENDING,
    SEGMENT_WIDTH,
    Chunk,
    Kept,
    KvCopies,
    Readout,
    SampleSpec,
    SharedPrefix,
    StepPlan,
)
from bros.core.request import SamplingParams, ServiceClass
from bros.executor.inputs import PendingTokens, StepInputs, build_inputs
from bros.executor.parallel.plan_codec import DecodedStep, Message, PlanDecoder, PlanEncoder
from support.scheduling import make_scheduler, request
from support.tier import examples
from support.toy_model import ToyModel

GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0)
BLOCK = 16
DECODING_ROWS = 64
CONTEXT = 4096


class Changing:
    """A request whose segments change as those of requests do, and in worse ways."""

    def __init__(self, name: str, rng: random.Random) -> None:
        self.name = name
        self._rng = rng
        self._segments: list[tuple[int, int, int]] = []
        self._change = [self._grow, self._grow, self._lose, self._shuffle, self._start_over]

    def chunk(self) -> Chunk:
        """In one of several ways, or just as it was, as after an aborted step."""
        rng = self._rng
        for _ in range(rng.choice([0, 1, 1, 1, 2])):
            rng.choice(self._change)()
        size = rng.choice([1, 1, 1, rng.randint(2, 40)])
        first = rng.randrange(size)
        readout = Readout(first, size, range(first, size), 3)
        return Chunk(
            self.name,
            rng.randrange(5000),
            [rng.randrange(50_000) for _ in range(size)],
            array("i", [number for segment in self._segments for number in segment]),
            array("i", [rng.randrange(10**6) for _ in range(size)]),
            rng.choice([GREEDY, GREEDY, None]),
            rng.choice([None, None, readout]),
        )

    def _grow(self) -> None:
        if self._segments and self._rng.random() < 0.7:
            place = self._rng.choice([-1, self._rng.randrange(len(self._segments))])
            block, lo, hi = self._segments[place]
            longer = self._rng.choice([(block, lo, hi + 1), (block, lo - 1, hi)])
            self._segments[place] = longer
        else:
            for _ in range(self._rng.choice([1, 1, 1, 20])):
                self._segments.append((self._rng.randrange(10**5), 0, 1))

    def _lose(self) -> None:
        for _ in range(self._rng.randint(1, 3)):
            if self._segments:
                place = self._rng.randrange(len(self._segments))
                last = self._segments.pop()
                if place < len(self._segments):
                    self._segments[place] = last

    def _shuffle(self) -> None:
        self._rng.shuffle(self._segments)

    def _start_over(self) -> None:
        self._segments.clear()


def random_copies(rng: random.Random) -> KvCopies | None:
    if rng.random() < 0.5:
        return None
    out, back = rng.choice([(0, 3), (2, 0), (5, 4)])
    return KvCopies(*(array("i", rng.sample(range(10**6), n)) for n in (out, out, back, back)))


def decoding(steps: int) -> Iterator[StepPlan]:
    """Rows with about CONTEXT tokens, each of which fills a block in another step."""
    blocks = iter(range(10**9))
    held = [
        array("i", [x for _ in range(CONTEXT // BLOCK) for x in (next(blocks), 0, BLOCK)])
        for _ in range(DECODING_ROWS)
    ]
    for row, segments in enumerate(held):
        segments[-1] = 1 + row % BLOCK
    for step in range(steps):
        chunks = []
        for row, segments in enumerate(held):
            block, _, used = segments[-SEGMENT_WIDTH:]
            start = CONTEXT - BLOCK + used
            before = segments[:]
            if used == BLOCK:
                segments.extend((next(blocks), 0, 1))
            else:
                segments[-1] += 1
            slots = array("i", [BLOCK * block + used])
            chunks.append(Chunk(f"request {row}", start, [7], before, slots, GREEDY))
        yield StepPlan(step, tuple(chunks))


def tensors(inputs: StepInputs) -> dict[str, Tensor]:
    attention = inputs.attention
    shared = attention.shared
    parts = (
        {}
        if shared is None
        else {
            "row_start": shared.row_start,
            "rows": shared.rows,
            "part_start": shared.segment_start,
            "part_segments": shared.segments,
        }
    )
    return {
        "token_ids": inputs.token_ids,
        "positions": inputs.positions,
        "slots": inputs.slots,
        "sample_rows": inputs.sample_rows,
        "read_rows": inputs.read_rows,
        "query_start": attention.query_start,
        "segment_start": attention.segment_start,
        "segments": attention.segments,
    } | parts


def check(step: DecodedStep | None, plan: StepPlan) -> None:
    """The tensors are those that build_inputs makes."""
    assert step is not None
    expected = tensors(build_inputs(plan))
    assert tensors(step.inputs).keys() == expected.keys()
    for name, found in tensors(step.inputs).items():
        assert found.dtype == torch.int32 and found.is_contiguous()
        assert found.shape == expected[name].shape and torch.equal(found, expected[name]), name
    assert step.copies == plan.copies
    kept = tuple(chunk.kept for chunk in plan.chunks if chunk.kept is not None)
    assert (step.inputs.kept, step.inputs.dropped) == (kept, plan.dropped)
    assert step.inputs.step == plan.step


def begin_alike(chunks: Sequence[Chunk], rng: random.Random) -> tuple[SharedPrefix, ...]:
    """Lets some chunks begin with the same two pieces of context, the second only some of these."""
    outer = array("i", sorted(rng.sample(range(len(chunks)), rng.randint(2, len(chunks)))))
    inner = outer[:2]
    sizes = rng.choice([2, 5]), rng.choice([1, 3])
    first, end = sizes[0], sum(sizes)
    blocks = rng.choice([0, 7])
    for row in outer:
        own = 0 if row in inner else 100 + row
        for place in range(end):
            block = blocks + place + (own if place >= first else 0)
            at = place * SEGMENT_WIDTH
            chunks[row].segments[at:at] = array("i", (block, 0, BLOCK))
    return SharedPrefix(outer, 0, first), SharedPrefix(inner, first, end)


@settings(max_examples=examples(25, long=1500))
@given(steps=st.integers(1, 25), rng=st.randoms(use_true_random=False))
def test_any_sequence_of_plans_comes_out_as_it_went_in(steps: int, rng: random.Random) -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    requests = [Changing(f"request {number}", rng) for number in range(8)]
    for number in range(steps):
        if rng.random() < 0.2:  # one ends, and another one begins, perhaps under its name
            name = rng.choice([requests[0].name, f"request {number} anew"])
            requests[0] = Changing(name, rng)
            rng.shuffle(requests)
        chosen = rng.sample(requests, rng.randint(0, len(requests)))
        chunks = tuple(request.chunk() for request in chosen)
        shared = begin_alike(chunks, rng) if len(chunks) > 2 and rng.random() < 0.5 else ()
        kept = [Kept(rng.randrange(number + 1), row, rng.randint(1, 30)) for row in range(9)]
        continuing = rng.choice([0, 0, rng.randint(0, len(chunks))])
        for chunk, at in zip(chunks[len(chunks) - continuing :], kept, strict=False):
            chunk.kept = at
        dropped = tuple(kept[6 : rng.choice([6, 7, 9])])
        plan = StepPlan(number, chunks, random_copies(rng), shared, dropped)
        is_open = rng.random() < 0.5
        step = decoder(encoder.step(plan, build_inputs(plan), may_abort=is_open))
        check(step, plan)
        assert step is not None and step.sources is None and step.may_abort == is_open


def test_what_was_guessed_need_not_be() -> None:
    """Letters are segments. In each list, what follows a change is not like what came before."""
    for history in (
        ["abcd", "aBcd", "axcd", "aycD", "aycDe"],
        ["abc", "aBc", "axc", "aBC", "aB", "", "aB"],
        ["ab", "abcd", "abcD", "abcd", "abc", "abcde"],
        ["aaaa", "aaa", "aaaaa", "aabaa", "aaaa"],
    ):
        encoder, decoder = PlanEncoder(), PlanDecoder()
        for step, letters in enumerate(history):
            segments = array("i", [x for letter in letters for x in (ord(letter), 0, BLOCK)])
            plan = StepPlan(step, (Chunk("a", 9, [1], segments, array("i", [1]), GREEDY),))
            check(decoder(encoder.step(plan, build_inputs(plan))), plan)


@pytest.mark.parametrize("layout", ["plain", "bidirectional"])
@pytest.mark.parametrize("on_pressure", ["checkpoint", "recompute"])
def test_plans_of_a_scheduler_in_little_memory(layout: str, on_pressure: str) -> None:
    """With preemption, copies to the host and back, and prefixes that are shared."""
    scheduler = make_scheduler(
        "priority", blocks=24, host_blocks=40, kv_layout=layout, on_pressure=on_pressure,
        prefix_cache="lru",
    )  # fmt: skip
    model, rng = ToyModel(), random.Random(1)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    copied = number = 0
    now = 0.0
    while number < 60 or scheduler.has_work:
        now += 0.1
        if number < 60 and rng.random() < 0.5:
            number += 1
            prompt = [1 + number % 3] * rng.randint(1, 24) + [number + 1] * rng.randint(1, 12)
            service_class = rng.choice([ServiceClass.BE, ServiceClass.RT])
            asked = request(str(number), prompt, service_class, max_tokens=rng.randint(1, 20))
            scheduler.submit(asked, now)
        plan = scheduler.schedule(now)
        if plan is None:
            scheduler.take_ended()
            continue
        check(decoder(encoder.step(plan, build_inputs(plan))), plan)
        copied += plan.copies is not None
        result = model.execute(plan)
        assert result is not None
        scheduler.apply(result, now)
    preempted = sum(each.preemptions for each in scheduler.stats().by_class.values())
    assert preempted > 5
    assert (copied > 5) == (on_pressure == "checkpoint")


def test_tokens_that_only_the_device_knows() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    slots = [array("i", [0]), array("i", [1, 2]), array("i", [3])]
    tokens = [[PENDING], [8, 9], [PENDING]]
    plan = StepPlan(
        5,
        tuple(Chunk(str(i), 3, tokens[i], array("i"), slots[i], GREEDY) for i in range(3)),
    )
    sources = torch.tensor([4, -1, -1, 0], dtype=torch.int32)
    pending = PendingTokens(torch.zeros(5, dtype=torch.int32), sources)
    step = decoder(encoder.step(plan, build_inputs(plan), pending=pending))
    assert step is not None and step.sources is not None
    assert step.sources.dtype == torch.int32
    assert torch.equal(step.sources, sources)


def test_the_last_message() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    assert decoder(encoder.stop()) is None


def test_a_message_that_was_missed_is_noticed() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    messages: list[Message] = [encoder.step(plan, build_inputs(plan)) for plan in decoding(3)]
    decoder(messages[0])
    with pytest.raises(AssertionError, match="plan 2 after 0"):
        decoder(messages[2])


def test_rows_that_decode_take_few_bytes() -> None:
    """Of the 196,608 bytes of segments that they have."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    sizes = []
    for plan in decoding(40):
        message = encoder.step(plan, build_inputs(plan))
        sizes.append(message.nbytes)
        check(decoder(message), plan)
    assert max(sizes[1:]) < 3000


def test_who_comes_and_goes_changes_nothing_for_the_others() -> None:
    """Each row has 3,072 bytes of segments."""
    encoder, decoder = PlanEncoder(), PlanDecoder()
    rows = next(decoding(1)).chunks
    sizes = []
    for step, present in enumerate(
        (rows[:20], rows[:20], rows[3:20], (*rows[3:9], rows[0], *rows[9:20]), rows[19:2:-1])
    ):
        plan = StepPlan(step, tuple(present))
        message = encoder.step(plan, build_inputs(plan))
        sizes.append(message.nbytes)
        check(decoder(message), plan)
    assert sizes[0] > 20 * 3072
    assert max(sizes[1], sizes[2], sizes[4]) < 800
    assert 3072 < sizes[3] < 2 * 3072 + 800


def test_a_segment_that_grows_between_others_is_all_that_is_sent() -> None:
    encoder, decoder = PlanEncoder(), PlanDecoder()
    segments = array("i", [x for block in range(1000) for x in (block, 0, BLOCK)])
    segments[3 * 400 + 2] = 3
    sizes = []
    for step in range(5):
        chunk = Chunk("a", 9, [1], segments[:], array("i", [1]), GREEDY)
        plan = StepPlan(step, (chunk,))
        message = encoder.step(plan, build_inputs(plan))
        sizes.append(message.nbytes)
        check(decoder(message), plan)
        segments[3 * 400 + 2] += 1
    assert sizes[0] > 12_000
    assert max(sizes[1:]) < 112
