"""Steps that are suspended between two layers: nothing is computed twice, and no bit changes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.plan import Chunk, Kept, StepPlan, StepResult, SuspendedStep
from bros.core.request import EngineRequest, FinishReason, SamplingParams, ServiceClass, expanded
from bros.engine.engine import Engine
from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.executor.loader import random_executor
from bros.executor.models.decoder import BeforeLayer, DecoderOutputs, Layers, State, Stopped
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from bros.executor.target import grouping_for
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from support.common_prefixes import with_shared
from support.device_runners import OPT, VOCAB, Scripted, tiny_spec
from support.same_bits import needs_one_order, runner_of
from support.tier import by_tier

BLOCKS, LAYERS = 128, 5
LLAMA = tiny_spec(num_hidden_layers=LAYERS)
SPECS = {
    "llama": LLAMA,
    "opt": dataclasses.replace(OPT, num_layers=LAYERS),
    "post-norm": dataclasses.replace(OPT, num_layers=LAYERS, pre_norm=False, final_norm=False),
}
RT, BE = ServiceClass.RT, ServiceClass.BE
OPTIONS = {"kv_blocks": BLOCKS, "threads": 1}


def before(layer: int) -> Callable[[], bool]:
    """Stops a step that begins with the first layer before this one."""
    asked = iter(range(10**6))
    return lambda: next(asked) == layer


class Steps:
    """Plans of known requests on a runner, with what is kept of them."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.number = 0
        self.kept: dict[str, Chunk] = {}
        self.behind: defaultdict[str, list[Chunk]] = defaultdict(list)  # the next one comes last
        self.dropped: list[Kept] = []
        self._grouping = grouping_for("cpu", KV_BLOCK_SIZE)

    def plan(self, chunks: Sequence[Chunk]) -> StepPlan:
        """Those of what is kept come last."""
        self.number += 1
        fresh = tuple(chunk for chunk in chunks if chunk.kept is None)
        continuing = [(chunk.kept.layer, chunk) for chunk in chunks if chunk.kept is not None]
        continuing.sort(key=lambda pair: pair[0])
        assert self._grouping is not None
        shared = with_shared(StepPlan(0, fresh), self._grouping).shared if fresh else ()
        dropped, self.dropped = tuple(self.dropped), []
        rest = tuple(chunk for _, chunk in continuing)
        return StepPlan(self.number, (*fresh, *rest), None, shared, dropped)

    def suspend(self, chunks: Sequence[Chunk], layer: int) -> None:
        """Run a step until before a layer; nothing happens if it begins later."""
        plan = self.plan(chunks)
        starts = [0 if chunk.kept is None else chunk.kept.layer for chunk in plan.chunks]
        stopped = self.runner.execute(plan, before(max(0, layer - min(starts))))
        assert isinstance(stopped, SuspendedStep)
        assert stopped == SuspendedStep(plan.step, max(layer, min(starts)), self.runner.num_layers)
        for row, (chunk, start) in enumerate(zip(plan.chunks, starts, strict=True)):
            if start < stopped.layer:
                kept = Kept(plan.step, row, stopped.layer)
                self.kept[chunk.request_id] = dataclasses.replace(chunk, kept=kept)
            elif chunk.kept is not None:
                self.kept[chunk.request_id] = chunk

    def next_chunk(self, request: Scripted, rng: random.Random) -> Chunk:
        """A new one, or what is kept, or its first tokens; now and then all that is kept is dropped
        instead."""
        pieces = self.behind[request.name]
        if request.name in self.kept:
            pieces.append(self.kept.pop(request.name))
        if pieces and rng.random() < 0.1:
            self.dropped += [piece.kept for piece in pieces if piece.kept is not None]
            request.computed = pieces[-1].start
            pieces.clear()
        if not pieces:
            return request.chunk(min(request.remaining, rng.choice([1, 1, 5, 40])))
        kept = pieces.pop()
        at, size = kept.kept, len(kept.slots)
        assert at is not None
        if size > 1 and rng.random() < 0.4:
            count = rng.randrange(1, size)
            end, request.computed = request.computed, kept.start + count
            rest = request.chunk(size - count)
            request.computed = end
            pieces.append(dataclasses.replace(rest, kept=at._replace(first=at.first + count)))
            tokens, slots = kept.token_ids[:count], kept.slots[:count]
            kept = dataclasses.replace(kept, token_ids=tokens, slots=slots, sample=None)
        return kept

    def logits(self, chunks: Sequence[Chunk]) -> dict[str, Tensor]:
        plan = self.plan(chunks)
        logits = self.runner.logits(plan)
        names = [chunk.request_id for chunk in plan.chunks if chunk.sample is not None]
        return {name: logits[row].clone() for row, name in enumerate(names)}


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found, expected)


def check(
    runner: ModelRunner,
    vocab: int,
    seed: int,
    same: Callable[[Tensor, Tensor], bool] = same_bits,
) -> None:
    """Requests with a common beginning, in random chunks, in steps of which most are suspended.

    same: compares logits with those of the same prompt computed in one step.
    """
    rng = random.Random(seed)
    common = [rng.randrange(vocab) for _ in range(4 * KV_BLOCK_SIZE)]
    tokens = [
        [*common, *(rng.randrange(vocab) for _ in range(rng.randint(1, 60)))] for _ in range(6)
    ]
    alone = []
    for each in tokens:
        whole = Scripted("alone", each, range(-(-len(each) // KV_BLOCK_SIZE)), 0)
        alone.append(runner.logits(StepPlan(0, (whole.chunk(len(each)),)))[0].clone())
    free = iter(rng.sample(range(BLOCKS), BLOCKS))
    cached = [next(free) for _ in range(4)]
    requests = {}
    for number, each in enumerate(tokens):
        own = [next(free) for _ in range(-(-len(each) // KV_BLOCK_SIZE) - 4)]
        requests[str(number)] = Scripted(str(number), each, [*cached, *own], 4 * KV_BLOCK_SIZE)
    first = requests["0"]
    first.computed = 0
    runner.logits(StepPlan(0, (first.chunk(len(common)),)))
    steps, found = Steps(runner), {}
    while live := [
        r for r in requests.values() if r.remaining or r.name in steps.kept or steps.behind[r.name]
    ]:
        chunks = [steps.next_chunk(r, rng) for r in rng.sample(live, rng.randint(1, len(live)))]
        if rng.random() < 0.6:
            steps.suspend(chunks, rng.randrange(runner.num_layers))
            for chunk in chunks:  # those that had not begun are planned again
                if chunk.request_id not in steps.kept:
                    requests[chunk.request_id].computed = chunk.start
        else:
            found |= steps.logits(chunks)
    for number, expected in enumerate(alone):
        assert same(found[str(number)], expected), number
    assert not runner._kept, "nothing is left"


@needs_one_order
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_suspensions_change_no_bit(spec: ModelSpec, weights: str) -> None:
    runner = runner_of(spec, weights, **OPTIONS)
    for seed in range(by_tier(fast=3, long=40)):
        check(runner, VOCAB, seed)


@needs_one_order
@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_suspensions_change_no_bit_of_the_embedded_model(weights: str) -> None:
    runner = runner_of(None, weights, **OPTIONS)
    for seed in range(by_tier(fast=1, long=8)):
        check(runner, 49152, seed)


@pytest.mark.gpu
@pytest.mark.parametrize(("weights", "atol"), [("fp32", 1e-4), ("bf16", 0.15)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_suspensions_on_a_gpu(spec: ModelSpec, weights: str, atol: float) -> None:
    """Products of other numbers of rows may round otherwise there."""
    config = EngineConfig(
        device="cuda", weights=weights, on_pressure="recompute", cuda_graphs="off", **OPTIONS
    )
    runner, _ = random_executor(spec, config)
    for seed in range(by_tier(fast=2, long=20)):
        check(runner, VOCAB, seed, lambda a, b: torch.allclose(a, b, atol=atol, rtol=0))


def test_what_is_not_kept_cannot_be_continued_or_dropped() -> None:
    runner = runner_of(LLAMA, "fp32", **OPTIONS)
    steps, request = Steps(runner), Scripted("a", [3, 1, 4, 1, 5], [0], 0)
    steps.suspend([request.chunk(5)], 2)
    assert len(runner._kept) == 1
    chunk = steps.kept["a"]
    assert isinstance(runner.execute(steps.plan([chunk])), StepResult)
    with pytest.raises(KeyError):
        runner.execute(steps.plan([chunk]))
    assert chunk.kept is not None
    steps.dropped = [chunk.kept]
    with pytest.raises(KeyError):
        runner.execute(steps.plan([]))


def test_what_is_kept_does_not_hold_the_other_rows_in_memory() -> None:
    runner = runner_of(LLAMA, "fp32", **OPTIONS)
    steps = Steps(runner)
    row = Scripted("row", [1] * 4, [0], 0)
    runner.logits(StepPlan(0, (row.chunk(3),)))
    prompt = Scripted("prompt", [2] * 100, range(1, 8), 0)
    steps.suspend([row.chunk(1), prompt.chunk(100)], 3)
    kept = runner._kept._states[steps.kept["row"].kept]  # type: ignore[index]
    assert all(t is not None and t.untyped_storage().nbytes() == 4 * 64 for t in kept)
    runner.close()
    assert not runner._kept


# Whole engines

MODEL = CostModel(constant_s=0.020, token_s=0.001, sample_s=0.0002, pair_s=4e-7, context_s=2e-6)


class CountingLayers:
    """Counts the tokens for which each layer is computed."""

    def __init__(self, layers: Layers, tokens: Counter[int]) -> None:
        self._layers, self._tokens = layers, tokens
        self.has_ends = layers.has_ends

    def __call__(
        self, layers: range, state: Any, inputs: Any, caches: Any, before_layer: BeforeLayer
    ) -> State | Stopped | DecoderOutputs:
        def counted(layer: int) -> bool:
            if before_layer is not None and before_layer(layer):
                return True
            self._tokens[layer] += len(inputs.positions)
            return False

        return self._layers(layers, state, inputs, caches, counted)


class Newcomers:
    """Requests that arrive before a layer of a step, counted over all steps."""

    def __init__(self, clock: ManualClock, arrive: dict[int, EngineRequest]) -> None:
        self._clock, self._arrive = clock, arrive
        self.asked = 0
        self.waiting: list[EngineRequest] = []

    def __call__(self) -> list[EngineRequest]:
        self._clock.advance(0.005)
        self.asked += 1
        new = self._arrive.pop(self.asked, None)
        if new is None:
            return []
        self.waiting.append(dataclasses.replace(new, arrival_s=self._clock.now()))
        return self.waiting[-1:]


def asked(name: str, length: int, service_class: ServiceClass, tokens: int = 4) -> EngineRequest:
    rng = random.Random(name)
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[rng.randrange(VOCAB) for _ in range(length)],
        sampling=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
        service_class=service_class,
    )


def engine_of(
    wrap: Callable[[ModelRunner], Any] = lambda runner: runner,
) -> tuple[Engine, ManualClock, Counter[int], Any]:
    """The engine, its clock, tokens computed by layer, and the wrapped runner."""
    config = EngineConfig(
        device="cpu", weights="fp32", kv_blocks=BLOCKS, threads=1, max_batch_tokens=400
    )
    spec = tiny_spec(num_hidden_layers=LAYERS, max_position_embeddings=1024)
    runner, info = random_executor(spec, config)
    tokens: Counter[int] = Counter()
    decoder = runner._decoder
    assert decoder is not None
    layers = CountingLayers(decoder.layers, tokens)
    runner._decoder = dataclasses.replace(decoder, layers=layers)
    clock, executor = ManualClock(), wrap(runner)
    return (
        Engine(build_scheduler(config, info, MODEL), executor, clock, info),
        clock,
        tokens,
        runner,
    )


def serve(engine: Engine, newcomers: Newcomers) -> dict[str, list[int]]:
    answers: dict[str, list[int]] = {}
    while engine.has_work or newcomers.waiting:
        for request in newcomers.waiting:
            engine.submit(request)
        newcomers.waiting.clear()
        for output in map(expanded, engine.step(newcomers)):
            assert output.finish_reason in (None, FinishReason.LENGTH), output.error
            answers.setdefault(output.request_id, []).extend(output.token_ids)
    return answers


def test_a_newcomer_suspends_a_step_which_then_continues() -> None:
    """No layer of any token is computed twice, and all texts stay the same."""
    old = [asked("be", 700, BE), asked("other", 40, BE)]
    new = asked("rt", 300, RT)
    engine, clock, calm, _ = engine_of()
    for request in (*old, new):
        engine.submit(request)
    expected = serve(engine, Newcomers(clock, {}))
    engine, clock, tokens, runner = engine_of()
    for request in old:
        engine.submit(request)
    newcomers = Newcomers(clock, {4: new})
    assert engine.step(newcomers) == [] and len(runner._kept) >= 1
    assert engine.stats().suspended_steps == 1 and tokens[2] > tokens[3] == 0
    assert serve(engine, newcomers) == expected
    stats = engine.stats()
    assert (stats.suspended_steps, stats.aborted_steps, stats.lost_s) == (1, 0, 0.0)
    assert sum(stats.yielding.counts) == 1 and stats.yielding.total <= 0.006
    assert not runner._kept
    wanted = sum(len(r.prompt_token_ids) + 4 - 1 for r in (*old, new))
    assert set(tokens.values()) == {wanted} == set(calm.values())


class Broken:
    """Fails in the step after a suspended one."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._fails = False

    @property
    def num_layers(self) -> int:
        return self._runner.num_layers

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        if self._fails:
            raise RuntimeError("out of memory")
        result = self._runner.execute(plan, should_abort)
        self._fails = isinstance(result, SuspendedStep)
        return result

    def close(self) -> None:
        self._runner.close()


def test_an_executor_that_fails_while_something_is_kept_ends_the_engine_only() -> None:
    """The error passes through as any other, and closing releases what was kept."""
    engine, clock, _, runner = engine_of(Broken)
    engine.submit(asked("be", 700, BE))
    newcomers = Newcomers(clock, {3: asked("rt", 300, RT)})
    assert engine.step(newcomers) == []
    engine.submit(newcomers.waiting.pop())
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(newcomers)
    assert runner._kept
    engine.close()
    assert not runner._kept
