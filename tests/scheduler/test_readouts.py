"""Positions of a prompt are read once each: under preemption, overlap and loss of the engine."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.config import POLICIES, PREFIX_CACHE
from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.core.plan import Chunk, ReadPositions
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Pooling,
    RequestOutput,
    SamplingParams,
)
from bros.engine.engine import Engine
from bros.scheduler.admission import Limits
from support.late_executor import LateExecutor
from support.outputs import expand_all
from support.prefix_run import SIZE, Run
from support.scheduling import engine_info, make_scheduler, request
from support.tier import examples
from support.toy_model import ToyModel
from support.virtual_time import BE, RT

Entry = tuple[int, int, float]
"""(position, token, log-probability)."""


def right_entries(asked: EngineRequest) -> list[Entry]:
    tokens = list(asked.prompt_token_ids)[: len(asked.prompt_token_ids) - asked.resumed]
    return [
        (position, tokens[position], ToyModel.logprobs(tokens[:position], tokens[position]))
        for position in range(1, len(tokens))
    ]


def right_sum(asked: EngineRequest) -> tuple[int, float]:
    """(positions, sum of their states) of the pooling that it asks for."""
    tokens = list(asked.prompt_token_ids)
    first = 0 if asked.pooling is Pooling.MEAN else len(tokens) - 1
    states = [ToyModel.next_token(tokens[: p + 1]) for p in range(first, len(tokens))]
    return len(states), float(sum(states))


def pooled_sum(outputs: Sequence[RequestOutput]) -> tuple[int, float]:
    pieces = [piece for output in outputs for piece in output.pooled]
    return sum(p.count for p in pieces), sum(array("f", p.values)[0] for p in pieces)


def entries(outputs: Sequence[RequestOutput]) -> list[Entry]:
    return [
        (position, entry.token_id, entry.logprob)
        for output in outputs
        for piece in output.prompt_logprobs
        for position, entry in enumerate(piece, start=piece.first)
    ]


class Served:
    """An engine, and what each request got, in order."""

    def __init__(self, *, overlap: bool, policy: str, blocks: int, **options: object) -> None:
        clock, model = ManualClock(1.0), ToyModel(SIZE)
        scheduler = make_scheduler(
            policy, blocks=blocks, block_size=SIZE, depth=2 if overlap else 1, **options
        )  # type: ignore[arg-type]
        self.scheduler = scheduler
        self.chunks: list[Chunk] = []
        executor = LateExecutor(
            model, clock, lambda plan: 0.02, lambda plan: self.chunks.extend(plan.chunks)
        )
        self.engine = Engine(
            scheduler,
            executor,
            clock,
            engine_info(blocks=blocks, block_size=SIZE),
            async_scheduling="on" if overlap else "off",
        )
        self.outputs: dict[str, list[RequestOutput]] = {}

    def submit(self, asked: EngineRequest) -> None:
        self.engine.submit(asked)
        self.outputs[asked.request_id] = []

    def step(self) -> None:
        for output in expand_all(self.engine.step()):
            self.outputs[output.request_id].append(output)
        self.scheduler.check_integrity()

    def drain(self) -> None:
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("no progress")


def random_request(rng: random.Random, name: str) -> EngineRequest:
    family = rng.choice([0, 0, 100])
    prompt = [family + 1 + i for i in range(rng.randint(1, 40))]
    asked = request(
        name,
        prompt,
        rng.choice([RT, BE]),
        max_tokens=rng.choice([0, 1, 6, 20]),
        prompt_logprobs=rng.choice([None, 0, 2]),
    )
    if rng.random() < 0.4:
        return embedding(asked, rng.choice([Pooling.MEAN, Pooling.LAST]))
    return asked


def embedding(asked: EngineRequest, pooling: Pooling) -> EngineRequest:
    return dataclasses.replace(asked, sampling=SamplingParams(max_tokens=0), pooling=pooling)


@settings(max_examples=examples(30, long=600))
@given(
    policy=st.sampled_from(POLICIES),
    overlap=st.booleans(),
    blocks=st.sampled_from([16, 20, 60]),
    host_blocks=st.sampled_from([0, 4, 64]),
    prefix_cache=st.sampled_from(PREFIX_CACHE),
    max_batch_tokens=st.sampled_from([3, 8, 32]),
    seed=st.integers(0, 2**16),
)
def test_every_position_is_read_once_in_any_load(
    policy: str, overlap: bool, seed: int, **options: object
) -> None:
    rng = random.Random(seed)
    served = Served(policy=policy, overlap=overlap, **options)  # type: ignore[arg-type]
    requests = [random_request(rng, f"r{number}") for number in range(rng.randint(1, 9))]
    for asked in requests:
        served.submit(asked)
        for _ in range(rng.randint(0, 4)):
            if served.engine.has_work:
                served.step()
    served.drain()
    for asked in requests:
        outputs, most = served.outputs[asked.request_id], asked.sampling.max_tokens
        assert most is not None
        if asked.pooling is not None:
            assert pooled_sum(outputs) == right_sum(asked)
        tokens = [token for output in outputs for token in output.token_ids]
        right = ToyModel.continuation(asked.prompt_token_ids, most)
        assert tokens == right
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        wanted = [] if asked.sampling.prompt_logprobs is None else right_entries(asked)
        assert entries(outputs) == wanted
        # All positions come before the first token.
        begun = [output.has_begun for output in outputs]
        assert begun == sorted(begun)


@settings(max_examples=examples(30))
@given(
    policy=st.sampled_from(POLICIES),
    blocks=st.sampled_from([22, 60]),
    max_batch_tokens=st.sampled_from([3, 40, 64]),
    seed=st.integers(0, 2**16),
)
def test_whole_texts_are_never_cut(policy: str, seed: int, **options: object) -> None:
    """As an encoder needs it, with steps as long as the longest text at least."""
    rng = random.Random(seed)
    served = Served(policy=policy, overlap=False, whole_prompts=True, max_model_len=40, **options)  # type: ignore[arg-type]
    requests = [
        embedding(
            request(f"r{n}", rng.randint(1, 40), rng.choice([RT, BE])),
            rng.choice([Pooling.MEAN, Pooling.LAST]),
        )
        for n in range(rng.randint(1, 12))
    ]
    for asked in requests:
        served.submit(asked)
        if rng.random() < 0.5 and served.engine.has_work:
            served.step()
    served.drain()
    for asked in requests:
        outputs = served.outputs[asked.request_id]
        assert pooled_sum(outputs) == right_sum(asked)
        assert sum(len(output.pooled) for output in outputs) == 1
    assert {(chunk.start, len(chunk.token_ids)) for chunk in served.chunks} == {
        (0, len(asked.prompt_token_ids)) for asked in requests
    }
    counted = served.engine.stats().by_class.values()
    assert sum(each.finished for each in counted) == len(requests)
    assert sum(each.output_tokens for each in counted) == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_another_engine_reads_the_rest(overlap: bool) -> None:
    """It is cut after any output; what it had until then is not read again."""
    asked = request("r", 37, max_tokens=9, prompt_logprobs=1)
    options = {"policy": "bros", "blocks": 60, "max_batch_tokens": 8}
    whole = Served(overlap=overlap, **options)  # type: ignore[arg-type]
    whole.submit(asked)
    whole.drain()
    outputs = whole.outputs["r"]
    for cut in range(1, len(outputs)):
        tokens = [token for output in outputs[:cut] for token in output.token_ids]
        rest = dataclasses.replace(
            asked,
            prompt_token_ids=[*asked.prompt_token_ids, *tokens],
            resumed=len(tokens),
            num_read=max(output.num_read for output in outputs[:cut]),
        )
        other = Served(overlap=overlap, **options)  # type: ignore[arg-type]
        other.submit(rest)
        other.drain()
        assert entries(other.outputs["r"]) == entries(outputs[cut:])
        found = [token for output in other.outputs["r"] for token in output.token_ids]
        assert found == [token for output in outputs[cut:] for token in output.token_ids]


def test_cached_kv_serves_no_position_that_is_read() -> None:
    run = Run()
    run.submit("before", 41)
    run.drain()
    run.submit("reads", 80, prompt_logprobs=0)
    run.submit("plain", 80)
    run.drain()
    assert (run.cached["reads"], run.computed["reads"]) == (0, 80)
    assert run.cached["plain"] > 0
    run.submit("after", 80)  # its own blocks are cached for others
    run.drain()
    assert run.cached["after"] == 76


def test_the_last_token_needs_no_other_hidden_state() -> None:
    run = Run()
    run.submit("before", 41)
    run.drain()
    asked = embedding(request("embeds", 41), Pooling.LAST)
    run.requests["embeds"], run.answers["embeds"] = asked, []
    run.cached["embeds"] = run.computed["embeds"] = 0
    run.scheduler.submit(asked, run.now)
    run.drain()
    assert (run.cached["embeds"], run.computed["embeds"]) == (40, 1)


def test_a_model_that_cannot_do_it_refuses() -> None:
    run = Run()
    with pytest.raises(InvalidRequestError, match="score head"):
        run.scheduler.submit(embedding(request("a", 5), Pooling.SCORE), 0.0)
    with pytest.raises(InvalidRequestError, match="'first'"):
        run.scheduler.submit(embedding(request("a", 5), Pooling.FIRST), 0.0)
    limits = Limits(max_model_len=9, vocab_size=9, max_num_seqs=1, max_queue=1, generates=False)
    with pytest.raises(InvalidRequestError, match="generates no text"):
        limits.check(request("a", 5))
    limits.check(embedding(request("a", 5), Pooling.MEAN))


def test_positions_that_were_read_may_come_from_the_cache() -> None:
    run = Run(max_batch_tokens=16)
    run.submit("before", 41)
    run.drain()
    asked = request("reads", 60, prompt_logprobs=0, max_tokens=2)
    run.submit("reads", 60, prompt_logprobs=0, max_tokens=2)
    run.abort("reads")
    run.requests["rest"] = dataclasses.replace(asked, request_id="rest", num_read=30)
    run.scheduler.submit(run.requests["rest"], run.now)
    run.answers["rest"], run.cached["rest"], run.computed["rest"] = [], 0, 0
    plan = run.schedule()
    (chunk,) = plan.chunks
    assert chunk.start == 28  # 30 in whole blocks
    assert chunk.readout is not None and chunk.readout.first == 2
    run.finish(plan)
    run.drain()


def test_no_token_is_sampled_for_a_request_of_none() -> None:
    run = Run()
    run.submit("none", 40, max_tokens=0)
    chunks = []
    while run.scheduler.has_work:
        chunks += run.step().values()
    assert all(chunk.sample is None and chunk.readout is None for chunk in chunks)
    assert (run.ends["none"], run.answers["none"]) == (FinishReason.LENGTH, [])
    stats = run.scheduler.stats().by_class[RT]
    assert (stats.prompt_tokens, stats.output_tokens, stats.finished) == (40, 0, 1)
    assert (stats.ttft_met, stats.both_met) == (1, 1)


def test_a_prompt_as_long_as_the_context_can_be_computed() -> None:
    run = Run(blocks=10, max_model_len=40)
    run.submit("none", 40, max_tokens=0)
    with pytest.raises(PromptTooLongError):
        run.submit("one", 40, max_tokens=1)
    run.drain()
    assert run.computed["none"] == 40


class Failing(ToyModel):
    def read(self, chunk: Chunk, tokens: Sequence[int]) -> ReadPositions:
        return ReadPositions(chunk.request_id, chunk.start + len(tokens), error="broken")


def test_a_position_that_cannot_be_read_ends_its_request_alone() -> None:
    run = Run()
    run.model = Failing(SIZE)
    run.submit("reads", 20, prompt_logprobs=0)
    run.submit("plain", list(range(500, 520)))
    run.drain()
    assert run.ends["reads"] is FinishReason.ERROR and run.answers["reads"] == []
    assert run.answers["plain"] == run.answer("plain")
    run.submit("after", 20)
    run.drain()
    assert run.cached["after"] == 0  # its KV may be wrong
