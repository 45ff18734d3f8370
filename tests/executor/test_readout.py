"""Log-probabilities of prompts equal those of transformers, however the work is cut."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.core.config import EngineConfig
from bros.core.interfaces import Executor
from bros.core.plan import PENDING, Readout, StepPlan, StepResult, SuspendedStep
from bros.core.request import PromptLogprobs
from bros.executor import readout as readout_module
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from bros.executor.models.layers import PlainLinear
from bros.executor.readout import ReadRequest, score_hidden
from bros.executor.runner import LaunchingRunner
from support.checkpoints import (
    VOCAB,
    ScatteredRequest,
    all_logits,
    family_configs,
    family_specs,
    save_checkpoint,
)
from support.device_runners import assemble
from support.thread_ranks import ThreadRanks, team
from support.tier import examples

TOLERANCE = 1e-4
KV_BLOCKS = 32

Model = tuple[torch.nn.Module, Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    models: dict[str, Model] = {}

    def save(family: str) -> Model:
        if family not in models:
            folder = tmp_path_factory.mktemp(family)
            models[family] = save_checkpoint(folder, family_configs()[family]), folder
        return models[family]

    return save


def reading_plans(
    lengths: Sequence[int], tops: Sequence[int | None], rng: random.Random
) -> Iterator[StepPlan]:
    """Prompts in random chunks, packed at random; tops: of their readouts, None for no readout."""
    blocks = rng.sample(range(KV_BLOCKS), KV_BLOCKS)
    requests = []
    for index, length in enumerate(lengths):
        tokens = [rng.randrange(VOCAB) for _ in range(length)]
        own = [blocks.pop() for _ in range(-(-length // 16))]
        requests.append(ScatteredRequest(str(index), tokens, own))
    step = 0
    while waiting := [request for request in requests if request.remaining]:
        step += 1
        chunks = []
        for request in rng.sample(waiting, rng.randint(1, len(waiting))):
            size = 1 if rng.random() < 0.3 else rng.randint(1, request.remaining)
            chunk = request.next_chunk(size, rng)
            top = tops[int(request.name)]
            first, end = 0, min(size, len(request.token_ids) - 1 - chunk.start)
            if top is not None and first < end:
                targets = request.token_ids[chunk.start + first + 1 : chunk.start + end + 1]
                chunk = dataclasses.replace(chunk, readout=Readout(first, end, targets, top))
            if request.remaining or rng.random() < 0.3:
                chunk = dataclasses.replace(chunk, sample=None)
            chunks.append(chunk)
        yield StepPlan(step, tuple(chunks))


def run_all(executor: Executor, plans: Sequence[StepPlan]) -> dict[str, list[PromptLogprobs]]:
    found: dict[str, list[PromptLogprobs]] = {}
    for plan in plans:
        result = executor.execute(plan)
        assert result is not None
        expected = [c.request_id for c in plan.chunks if c.readout is not None]
        assert [read.request_id for read in result.readouts] == expected
        for read in result.readouts:
            assert read.error is None and read.prompt_logprobs is not None
            assert read.end == read.prompt_logprobs.first - 1 + len(read.prompt_logprobs)
            found.setdefault(read.request_id, []).append(read.prompt_logprobs)
    return found


def prompts_of(plans: Sequence[StepPlan]) -> dict[str, list[int]]:
    prompts: dict[str, list[int]] = {}
    for plan in plans:
        for chunk in plan.chunks:
            prompts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return prompts


def check(
    pieces: Sequence[PromptLogprobs], top: int, prompt: Sequence[int], logits: Tensor
) -> None:
    """logits: after every token of the prompt."""
    expected = torch.log_softmax(logits.double(), dim=1)
    entries = [entry for piece in pieces for entry in piece]
    assert [piece.first for piece in pieces][:1] == [1]
    assert [entry.token_id for entry in entries] == list(prompt[1:])
    for position, entry in enumerate(entries):
        row = expected[position]
        assert abs(entry.logprob - row[entry.token_id]) < TOLERANCE
        above = int((row > row[entry.token_id] + TOLERANCE).sum())
        at_least = int((row > row[entry.token_id] - TOLERANCE).sum())
        assert above + 1 <= entry.rank <= at_least
        assert len(entry.top) == top
        values = torch.tensor([value for _, value in entry.top])
        torch.testing.assert_close(values, row.topk(top).values.float(), atol=TOLERANCE, rtol=0)
        for token, value in entry.top:
            assert abs(row[token] - value) < TOLERANCE


@settings(max_examples=examples(12), deadline=None)
@given(
    family=st.sampled_from(["llama-tied", "opt-post-norm", "qwen3"]),
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=5),
    seed=st.integers(0, 2**16),
)
def test_any_cut_into_chunks_matches_transformers(
    saved: Callable[[str], Model], family: str, lengths: list[int], seed: int
) -> None:
    model, folder = saved(family)
    config = EngineConfig(kv_blocks=KV_BLOCKS, weights="fp32", threads=1)
    runner = load_executor(config, ModelFiles(folder, "tiny"))[0]
    rng = random.Random(seed)
    tops = [rng.choice([None, 0, 1, 5, 20]) for _ in lengths]
    plans = list(reading_plans(lengths, tops, rng))
    found, prompts = run_all(runner, plans), prompts_of(plans)
    asked = {str(i) for i, top in enumerate(tops) if top is not None and lengths[i] > 1}
    assert found.keys() == asked
    for name, pieces in found.items():
        top = tops[int(name)]
        assert top is not None
        check(pieces, top, prompts[name], all_logits(model, prompts[name]))


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_shards_read_what_one_rank_reads(size: int) -> None:
    spec = family_specs()["llama"]
    plans = list(reading_plans([40, 17, 90], [3, None, 0], random.Random(size)))
    expected = run_all(assemble(spec).runner, plans)
    ranks = ThreadRanks.of(size)
    runners = [assemble(spec, ranks=rank).runner for rank in ranks]
    with team(runners, ranks) as group:
        found = run_all(group.executor, plans)
    assert not group.errors
    assert found.keys() == expected.keys()
    for name, pieces in found.items():
        entries = [entry for piece in pieces for entry in piece]
        wanted = [entry for piece in expected[name] for entry in piece]
        for entry, want in zip(entries, wanted, strict=True):
            assert entry.token_id == want.token_id
            assert abs(entry.logprob - want.logprob) < TOLERANCE
            assert [t for t, _ in entry.top] == [t for t, _ in want.top]


def test_launched_steps_read_while_tokens_are_pending() -> None:
    """A readout beside a row whose token only the device knows."""
    assembled = assemble()
    runner = assembled.runner
    assert isinstance(runner, LaunchingRunner)
    rng = random.Random(0)
    growing = ScatteredRequest("grows", list(range(17)), [0, 1])
    reading = ScatteredRequest("reads", [5, 7, 9, 11, 13, 15], [2])
    first = runner.launch(StepPlan(1, (growing.next_chunk(16, rng),)))
    row = dataclasses.replace(growing.next_chunk(1, rng), token_ids=[PENDING])
    chunk = dataclasses.replace(
        reading.next_chunk(6, rng), readout=Readout(1, 5, reading.token_ids[2:6], 2)
    )
    second = runner.launch(StepPlan(2, (row, chunk)))
    assert first.result().readouts == ()
    result = second.result()
    (read,) = result.readouts
    alone = assemble().runner.execute(StepPlan(1, (chunk,)))
    assert alone is not None
    assert len(result.samples) == 2 and read.end == 5
    expected = alone.readouts[0].prompt_logprobs
    assert read.prompt_logprobs is not None and expected is not None
    assert read.prompt_logprobs.first == 2 and len(read.prompt_logprobs) == 4
    for one, other in zip(read.prompt_logprobs, expected, strict=True):
        assert abs(one.logprob - other.logprob) < TOLERANCE


def test_a_step_is_aborted_between_two_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readout_module, "_SLICE_BYTES", 0)
    monkeypatch.setattr(readout_module, "_MIN_ROWS", 4)
    hidden, head, asked = torch.randn(10, 8), PlainLinear(torch.randn(6, 8)), []
    request = ReadRequest("a", 0, Readout(0, 10, [1] * 10, 0))

    def second() -> bool:
        asked.append(len(asked))
        return len(asked) == 2

    assert score_hidden(hidden, head, [request], 6, second) is None
    assert len(asked) == 2
    whole = score_hidden(hidden, head, [request], 6, lambda: False)
    assert whole is not None and len(whole.ranks) == 10


def test_slices_score_what_is_scored_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head = torch.randn(10, 8), PlainLinear(torch.randn(6, 8))
    requests = [
        ReadRequest("a", 0, Readout(0, 7, [0, 1, 2, 3, 4, 5, 0], 2)),
        ReadRequest("b", 3, Readout(1, 4, [5, 4, 3], 0)),
    ]
    at_once = score_hidden(hidden, head, requests, 6)
    monkeypatch.setattr(readout_module, "_SLICE_BYTES", 0)
    monkeypatch.setattr(readout_module, "_MIN_ROWS", 4)
    in_slices = score_hidden(hidden, head, requests, 6)
    assert at_once is not None and in_slices is not None
    assert torch.equal(in_slices.tokens, at_once.tokens)
    assert torch.equal(in_slices.ranks, at_once.ranks)
    torch.testing.assert_close(in_slices.logprobs, at_once.logprobs)


def test_a_step_that_yields_at_any_time_has_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is suspended before a layer, and aborted before a slice of what it reads."""
    monkeypatch.setattr(readout_module, "_SLICE_BYTES", 0)
    monkeypatch.setattr(readout_module, "_MIN_ROWS", 4)
    runner, prompt = assemble().runner, list(range(10))
    chunk = ScatteredRequest("a", prompt, [0]).next_chunk(10, random.Random(0))
    plan = StepPlan(1, (dataclasses.replace(chunk, readout=Readout(0, 9, prompt[1:], 0)),))
    for count in range(runner.num_layers + 3):
        answers = iter([False] * count + [True])
        result = runner.execute(plan, lambda answers=answers: next(answers))
        assert isinstance(result, SuspendedStep) == (count < runner.num_layers)
        assert isinstance(result, SuspendedStep) or result is None
    result = runner.execute(plan, lambda: False)
    assert isinstance(result, StepResult) and len(result.readouts) == 1


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    head = PlainLinear(torch.eye(4))
    hidden = torch.tensor([[1.0, 2.0, 3.0, 4.0], [float("nan")] * 4, [0.0] * 4])
    requests = [
        ReadRequest("fine", 3, Readout(0, 1, [2], 1)),
        ReadRequest("broken", 0, Readout(0, 1, [0], 0)),
        ReadRequest("last", 7, Readout(0, 1, [1], 0)),
    ]
    pending = score_hidden(hidden, head, requests, 4)
    assert pending is not None
    fine, broken, last = pending.finish()
    assert broken.error is not None and broken.prompt_logprobs is None
    assert fine.error is None and fine.end == 4 and fine.prompt_logprobs is not None
    (entry,) = fine.prompt_logprobs
    assert (entry.rank, entry.top[0][0]) == (2, 3)
    assert last.error is None and last.end == 8
