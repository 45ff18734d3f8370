"""An answer that another engine began goes on as if nothing had happened."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import ManualClock, SystemClock
from bros.core.config import EngineConfig
from bros.core.errors import InvalidRequestError, OverloadedError, PromptTooLongError
from bros.core.interfaces import RequestTrace
from bros.core.plan import Chunk, SampledToken
from bros.core.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    ServiceClass,
    Slo,
    TokenLogprobs,
    expanded,
)
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.executor.model_store import ModelFiles
from bros.executor.sampler import HostStepSampler, NumpySampler
from bros.scheduler.admission import objectives
from support.late_executor import LateExecutor
from support.scheduling import engine_info, make_scheduler, request
from support.tier import by_tier
from support.tiny_models import save_tiny_llama
from support.toy_model import VOCAB, ToyModel

SEEDS = range(12)


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    reason: FinishReason | None


class Chooser(ToyModel):
    """Logits depend on all tokens so far, and on nothing else; the choice is the real one."""

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        assert chunk.sample is not None
        draw = np.random.default_rng(list(tokens))
        logits = torch.from_numpy(3.0 * draw.standard_normal(VOCAB, np.float32))
        logits[draw.integers(0, 12)] += 6.0  # so that tokens come again, and answers end
        index = len(tokens) - chunk.sample.prompt_len
        request = chunk.request_id, chunk.sample, index
        return HostStepSampler(NumpySampler())(logits[None], [request])[0]


def random_sampling(rng: random.Random) -> SamplingParams:
    greedy, min_tokens = rng.random() < 0.3, rng.choice([0, 0, 4, 9])
    return SamplingParams(
        temperature=0.0 if greedy else 1.0,
        top_k=rng.choice([0, 0, 5, 40]),
        top_p=rng.choice([1.0, 0.9]),
        seed=rng.getrandbits(40),
        logprobs=rng.choice([None, 0, 2]),
        logit_bias=rng.choice([{}, {3: 4.0, 5: -20.0}]),
        presence_penalty=rng.choice([0.0, 0.0, 1.0]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.5]),
        min_tokens=min_tokens,
        max_tokens=rng.randint(max(2, min_tokens), 18),
        stop_token_ids=rng.choice([(), (4, 7)]),
    )


def random_requests(seed: int) -> list[EngineRequest]:
    rng = random.Random(seed)
    beginning = [rng.randrange(1, 99) for _ in range(8)]
    return [
        EngineRequest(
            request_id=f"r{number}",
            prompt_token_ids=[
                *beginning[: rng.choice([0, 8])],
                *(rng.randrange(1, 99) for _ in range(rng.randint(2, 12))),
            ],
            sampling=random_sampling(rng),
            service_class=rng.choice(list(ServiceClass)),
        )
        for number in range(10)
    ]


def make_engine(*, blocks: int, overlap: bool = False, **options: object) -> Engine:
    clock, model = ManualClock(1.0), Chooser()
    options = {"prefix_cache": "class-aware", "max_batch_tokens": 16, **options}
    scheduler = make_scheduler(blocks=blocks, depth=2 if overlap else 1, **options)  # type: ignore[arg-type]
    executor = LateExecutor(model, clock, lambda plan: 0.01) if overlap else model
    mode = "on" if overlap else "off"
    return Engine(scheduler, executor, clock, engine_info(blocks=blocks), async_scheduling=mode)


def serve(engine: Engine, requests: Sequence[EngineRequest], seed: int = 0) -> dict[str, Answer]:
    """Requests come while others run."""
    rng, answers = random.Random(seed), {r.request_id: Answer([], [], None) for r in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        while waiting and (not engine.has_work or rng.random() < 0.4):
            engine.submit(waiting.pop(0))
        for output in map(expanded, engine.step()):
            before = answers[output.request_id]
            before.tokens.extend(output.token_ids)
            before.logprobs.extend(output.logprobs)
            answers[output.request_id] = before._replace(reason=output.finish_reason)
    return answers


def resume(asked: EngineRequest, tokens: Sequence[int]) -> EngineRequest:
    prompt = [*asked.prompt_token_ids, *tokens]
    return dataclasses.replace(asked, prompt_token_ids=prompt, resumed=len(tokens))


@pytest.mark.parametrize(
    ("blocks", "host_blocks", "overlap"),
    by_tier(
        fast=[(14, 6, True), (200, 0, False)],
        long=list(itertools.product([14, 200], [0, 6], [False, True])),
    ),
)
def test_a_resumed_answer_is_the_rest_of_it(blocks: int, host_blocks: int, overlap: bool) -> None:
    preemptions = 0
    reasons = set()
    for seed in SEEDS:
        requests, rng = random_requests(seed), random.Random(seed)
        whole = serve(make_engine(blocks=400), requests)
        cut, rest = [], {}
        for asked in requests:
            tokens, logprobs, reason = whole[asked.request_id]
            k = rng.randrange(len(tokens))
            cut.append(resume(asked, tokens[:k]))
            rest[asked.request_id] = Answer(tokens[k:], logprobs[k:], reason)
            reasons.add(reason)
        engine = make_engine(blocks=blocks, host_blocks=host_blocks, overlap=overlap)
        assert serve(engine, cut, seed) == rest
        stats = engine.stats()
        preemptions += sum(each.preemptions for each in stats.by_class.values())
        each_class = stats.by_class.values()
        assert sum(each.output_tokens for each in each_class) == sum(
            len(answer.tokens) for answer in rest.values()
        )
        prompts = sum(len(asked.prompt_token_ids) for asked in requests)
        assert sum(each.prompt_tokens for each in each_class) == prompts
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert (preemptions > 0) == (blocks < 20)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_model_goes_on_where_it_was(tmp_path: Path, temperature: float) -> None:
    save_tiny_llama(tmp_path)
    config = EngineConfig(
        policy="fcfs", kernels="reference", kv_blocks=64, threads=1, weights="fp32"
    )
    files = ModelFiles(folder=tmp_path, name="tiny")
    sampling = SamplingParams(
        temperature=temperature, top_k=20, seed=5, max_tokens=24, min_tokens=20,
        presence_penalty=0.5, repetition_penalty=1.2, logit_bias={9: 2.0},
    )  # fmt: skip
    asked = EngineRequest(request_id="r", prompt_token_ids=[5, 6, 7, 8], sampling=sampling)
    first, second = (build_engine(config, files, SystemClock()) for _ in range(2))
    tokens, _, reason = serve(first, [asked])["r"]
    assert len(tokens) >= 20
    for k in (1, 7, 15, 16, len(tokens) - 1):
        rest = serve(second, [resume(asked, tokens[:k])])["r"]
        assert (rest.tokens, rest.reason) == (tokens[k:], reason), k
    first.close()
    second.close()


@pytest.mark.parametrize(
    ("resumed", "prefill_only", "error"),
    [
        (-1, False, "resumed must be in"),
        (6, False, "resumed must be in"),
        (4, False, "the answer is complete"),
        (1, True, "no answer"),
    ],
)
def test_what_cannot_be_resumed_is_refused(resumed: int, prefill_only: bool, error: str) -> None:
    asked = dataclasses.replace(
        request("r", 6, max_tokens=4), resumed=resumed, prefill_only=prefill_only
    )
    with pytest.raises(InvalidRequestError, match=error) as caught:
        make_engine(blocks=20).submit(asked)
    assert caught.value.param == "resumed"


def test_what_was_given_counts_for_the_context_length() -> None:
    engine = make_engine(blocks=4)
    with pytest.raises(PromptTooLongError):
        engine.submit(dataclasses.replace(request("r", 16, max_tokens=9), resumed=8))
    engine.submit(dataclasses.replace(request("r", 15, max_tokens=9), resumed=8))


def trace_of(asked: EngineRequest, engine: Engine | None = None) -> RequestTrace:
    engine = engine or make_engine(blocks=40)
    serve(engine, [asked])
    trace = engine.trace(asked.request_id)
    assert trace is not None
    return trace


@pytest.mark.parametrize("arrival_s", [10.0, 9.0, 2.0])
def test_it_has_no_first_token_and_the_gap_counts_for_its_pace(arrival_s: float) -> None:
    """But not the time before: whatever that was, nothing is known of it."""
    clock, slo = ManualClock(10.0), Slo(ttft_s=0.1, tpot_s=0.1)
    slow = make_scheduler(blocks=40)
    executor = LateExecutor(ToyModel(), clock, lambda plan: 0.15)
    engine = Engine(slow, executor, clock, engine_info(blocks=40), async_scheduling="off")
    asked = request("r", 12, max_tokens=8, arrival_s=arrival_s, slo=slo, ignore_eos=True)
    trace = trace_of(dataclasses.replace(asked, resumed=5), engine)
    assert (trace.prompt_tokens, trace.output_tokens) == (7, 8)
    assert trace.ttft_s is None and trace.tpot_s == pytest.approx(0.15)
    assert [what for _, what in trace.events][1:3] == ["scheduled", "resumed"]
    assert trace.late_tokens == 3
    counts = engine.stats().by_class[ServiceClass.RT]
    # Four intervals that were kept, and three steps: 0.85 s for seven.
    assert (counts.ttft_met, counts.tpot_met, counts.finished) == (1, 0, 1)
    assert counts.slack.total == pytest.approx(3 * (0.1 - 0.15))
    assert trace.events[0] == (pytest.approx(10.0 - arrival_s), "queued as rt")


def test_who_reads_already_is_neither_refused_nor_put_behind() -> None:
    for mode in ("reject", "relegate"):
        engine = make_engine(blocks=40, overload=mode)
        hopeless = request("r", 30, slo=Slo(ttft_s=0.001), max_tokens=8)
        if mode == "relegate":
            assert engine.submit(hopeless) is ServiceClass.BE
        else:
            with pytest.raises(OverloadedError):
                engine.submit(hopeless)
        goes_on = dataclasses.replace(hopeless, request_id="goes on", resumed=3)
        assert engine.submit(goes_on) is ServiceClass.RT


@given(
    arrival_s=st.integers(40, 80),
    before_s=st.integers(0, 20),
    deadline_s=st.integers(1, 40),
    most=st.integers(1, 20),
    resumed=st.integers(0, 19),
    tpot_s=st.sampled_from([0.25, 1.0]),
)
def test_the_rest_has_what_is_left_of_the_time(
    arrival_s: int, before_s: int, deadline_s: int, most: int, resumed: int, tpot_s: float
) -> None:
    resumed = min(resumed, most - 1)
    asked = request(
        "r", 20, max_tokens=most, slo=Slo(0.5, tpot_s, deadline_s), arrival_s=float(arrival_s)
    )
    now, due_s = arrival_s + before_s, arrival_s + deadline_s
    found = objectives(dataclasses.replace(asked, resumed=resumed), ServiceClass.RT, Slo(), now)
    assert found.ttft_s is not None and found.tpot_s is not None
    assert found.ttft_s == pytest.approx(0.5 * found.tpot_s / tpot_s), "one factor for both"
    assert found.deadline_s == deadline_s, "since its arrival"
    from_s = now if resumed else arrival_s
    ends_s = from_s + 0.5 + (most - resumed - 1) * tpot_s
    if from_s >= due_s or ends_s <= due_s:
        assert found.tpot_s == tpot_s, "lost already, or in time as it is"
    else:
        assert from_s + found.ttft_s + (most - resumed - 1) * found.tpot_s == pytest.approx(due_s)


@pytest.mark.parametrize(("rows", "tpot_s", "step_s"), [(10, 0.04, 0.026), (16, 0.035, 0.020)])
@pytest.mark.parametrize("count", [1, 3])
def test_answers_go_on_beside_others_that_cannot_keep_their_pace(
    rows: int, tpot_s: float, step_s: float, count: int
) -> None:
    """A request whose pace is lost is always due before requests that compute a prompt."""
    clock, slo = ManualClock(10.0), Slo(0.4, tpot_s)
    scheduler = make_scheduler(blocks=4000, max_num_seqs=32, max_batch_tokens=256)
    executor = LateExecutor(
        ToyModel(), clock,
        lambda plan: step_s * (1 + sum(len(chunk.token_ids) for chunk in plan.chunks) / 20),
    )  # fmt: skip
    engine = Engine(scheduler, executor, clock, engine_info(blocks=4000), async_scheduling="off")
    for number in range(rows):
        row = request(f"row{number}", 8, arrival_s=10.0, slo=slo, max_tokens=300, ignore_eos=True)
        engine.submit(row)
    for _ in range(60):
        engine.step()
    began, went_on = clock.now(), dict[str, float]()
    for number in range(count):
        asked = request(f"x{number}", 60, arrival_s=began, slo=slo, max_tokens=100)
        engine.submit(dataclasses.replace(asked, resumed=20))
    while len(went_on) < count:
        outputs = [*map(expanded, engine.step())]
        assert not any(output.finish_reason and output.request_id == "row0" for output in outputs)
        for output in outputs:
            if output.request_id.startswith("x"):
                went_on.setdefault(output.request_id, clock.now() - began)
    assert max(went_on.values()) <= 0.4 + count * 8 * 0.08
