"""Greedy output is the output of transformers, however the work is cut up and packed.

The embedded model in fp32, forty prompts, 64 tokens each. Different row counts sum in a
different order, so a position where the best two logits of transformers are closer than
MARGIN may go either way; such a position ends the comparison of its prompt, and there may be
only few.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch

from bros.core.clock import ManualClock, SystemClock
from bros.core.config import POLICIES, EngineConfig
from bros.core.interfaces import Executor
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.engine.tokenizer import Tokenizer
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir
from bros.executor.transformers_model import load_in_transformers
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.profiles import profile_folders
from support.prompts import PROMPTS

pytestmark = pytest.mark.slow

NEW_TOKENS = 64
MARGIN = 1e-3
MOST_NEAR_TIES = 3
BATCH = 8


@dataclass(frozen=True)
class Expected:
    """transformers' tokens for one prompt, as far as they are beyond doubt."""

    prompt: list[int]
    tokens: list[int]
    ends_at_near_tie: bool


@pytest.fixture(scope="module")
def expected(embedded_model: ModelFiles) -> list[Expected]:
    tokenizer = Tokenizer.load(embedded_model.folder)
    model = load_in_transformers(embedded_model)
    prompts = {number: tokenizer.encode(prompt) for number, prompt in enumerate(PROMPTS)}
    by_length = sorted(prompts, key=lambda number: len(prompts[number]))
    cases: dict[int, Expected] = {}
    for first in range(0, len(by_length), BATCH):
        group = by_length[first : first + BATCH]
        answers = _generate(model, [prompts[number] for number in group])
        cases.update(zip(group, answers, strict=True))
    return [cases[number] for number in range(len(PROMPTS))]


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompts: list[list[int]]) -> list[Expected]:
    """One call of generate for prompts of similar length, padded on the left."""
    width = max(map(len, prompts))
    out = model.generate(  # type: ignore[operator]
        torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=-1,  # never: all prompts run to the full length
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = torch.stack([logits.topk(2).values for logits in out.logits], dim=1)
    cases = []
    for row, prompt in enumerate(prompts):
        tokens = out.sequences[row, width:].tolist()
        close = (best_two[row, :, 0] - best_two[row, :, 1] < MARGIN).nonzero().flatten().tolist()
        cases.append(Expected(prompt, tokens[: close[0]] if close else tokens, bool(close)))
    return cases


def engine_for(files: ModelFiles, **options: object) -> Engine:
    config = EngineConfig(weights="fp32", max_model_len=1024, **options)  # type: ignore[arg-type]
    folders = profile_folders(default_cache_dir())
    return build_engine(config, files, SystemClock(), profiles=folders)


def submit(engine: Engine, name: str, prompt: Sequence[int], service_class: ServiceClass) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine.submit(
        EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            service_class=service_class,
        )
    )


def check(engine: Engine, expected: list[Expected], *, at_once: bool) -> None:
    """Run every prompt and compare; `at_once` submits all before the first step."""
    got: dict[str, list[int]] = {}
    for number, case in enumerate(expected):
        got[str(number)] = []
        submit(engine, str(number), case.prompt, random.Random(number).choice(list(ServiceClass)))
        while not at_once and engine.has_work:
            _step(engine, got)
    while engine.has_work:
        _step(engine, got)
    engine.close()
    for number, case in enumerate(expected):
        answer = got[str(number)]
        assert len(answer) == NEW_TOKENS
        assert answer[: len(case.tokens)] == case.tokens, PROMPTS[number]


def _step(engine: Engine, got: dict[str, list[int]]) -> None:
    for output in engine.step():
        got[output.request_id] += output.token_ids


def test_near_ties_are_rare(expected: list[Expected]) -> None:
    """Else the other tests would compare next to nothing."""
    assert sum(case.ends_at_near_tie for case in expected) <= MOST_NEAR_TIES
    assert sum(len(case.tokens) for case in expected) > 0.9 * len(expected) * NEW_TOKENS


def test_one_at_a_time(embedded_model: ModelFiles, expected: list[Expected]) -> None:
    check(engine_for(embedded_model), expected, at_once=False)


@pytest.mark.parametrize("chunk", [16, 256])
def test_all_at_once(embedded_model: ModelFiles, expected: list[Expected], chunk: int) -> None:
    check(engine_for(embedded_model, max_batch_tokens=chunk), expected, at_once=True)


def test_reference_kernels(embedded_model: ModelFiles, expected: list[Expected]) -> None:
    check(engine_for(embedded_model, kernels="reference"), expected[:20], at_once=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_so_small_that_requests_are_preempted(
    embedded_model: ModelFiles, expected: list[Expected], policy: str
) -> None:
    engine = engine_for(embedded_model, kv_blocks=64, policy=policy)
    check(engine, expected[:24], at_once=True)
    stats = engine.stats()
    assert sum(counted.preemptions for counted in stats.by_class.values()) > 0
    assert stats.kv_blocks_used == 0


STEPS = CostModel(constant_s=0.03, token_s=0.001, sample_s=2e-4, pair_s=4e-7, context_s=2e-6)
"""What the scheduler is told; about what the embedded model takes on two cores."""
STEP_S = 0.05
PATIENCE = 90
"""Three times the layers of the embedded model, so that about a third of the steps is given up."""


class Fickle:
    """Gives up steps before a layer drawn for each, if the engine lets go of them at all.

    Time passes by STEP_S a step, so that every run of a test decides the same.
    """

    def __init__(self, executor: Executor, clock: ManualClock, rng: random.Random) -> None:
        self._executor = executor
        self._clock = clock
        self._rng = rng
        self.steps = 0
        self.given_up: list[int] = []

    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        self.steps += 1
        self._clock.advance(STEP_S)
        if abandon is None:
            return self._executor.execute(plan)
        last, asked = self._rng.randrange(PATIENCE), 0

        def gives_up() -> bool:
            nonlocal asked
            asked += 1
            return asked > last or abandon()

        result = self._executor.execute(plan, gives_up)
        if result is None:
            self.given_up.append(asked)
        return result

    def close(self) -> None:
        self._executor.close()


@pytest.mark.parametrize("kv_blocks", [None, 64])
def test_steps_given_up_at_any_layer(
    embedded_model: ModelFiles, expected: list[Expected], kv_blocks: int | None
) -> None:
    config = EngineConfig(
        weights="fp32", max_model_len=1024, policy="bros", kv_blocks=kv_blocks, rt_wait=1.0
    )
    executor, info = load_executor(config, embedded_model)
    clock = ManualClock()
    fickle = Fickle(executor, clock, random.Random(1))
    engine = Engine(build_scheduler(config, info, STEPS), fickle, clock, info)
    check(engine, expected[:24], at_once=True)
    stats = engine.stats()
    assert stats.abandoned_steps == len(fickle.given_up) >= fickle.steps / 10
    assert len(set(fickle.given_up)) >= 10
    assert stats.kv_blocks_used == 0
