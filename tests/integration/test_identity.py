"""Greedy output is the output of transformers, however the work is cut up and packed.

The embedded model in fp32: forty prompts, 64 tokens each, and more that begin alike for whatever
the KV cache may do to them. Different row counts sum in a different order, so a position where
the best two logits of transformers are closer than MARGIN may go either way; such a position
ends the comparison of its prompt, and there may be only few.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import pytest
import torch

from bros.core.clock import ManualClock, SystemClock
from bros.core.config import KV_FIND, KV_LAYOUTS, POLICIES, PREFIX_CACHE, EngineConfig
from bros.core.interfaces import EngineStats, Executor
from bros.core.plan import SEGMENT_WIDTH, StepPlan, StepResult
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.engine.tokenizer import Tokenizer
from bros.executor.grouping import grouping_for
from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir
from bros.executor.transformers_model import load_in_transformers
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.profiles import profile_folders
from support.prompts import FAMILIES, PROMPTS

# Some take two minutes on an idle machine, and more than the usual limit beside other work.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

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


Judge = Callable[[list[list[int]], int], list[Expected]]
"""transformers' answers of so many tokens to prompts."""


@pytest.fixture(scope="module")
def judge(embedded_model: ModelFiles) -> Judge:
    model = load_in_transformers(embedded_model)

    def answers(prompts: list[list[int]], num_tokens: int) -> list[Expected]:
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, Expected] = {}
        for first in range(0, len(by_length), BATCH):
            group = by_length[first : first + BATCH]
            cases = _generate(model, [prompts[number] for number in group], num_tokens)
            found.update(zip(group, cases, strict=True))
        return [found[number] for number in range(len(prompts))]

    return answers


@pytest.fixture(scope="module")
def expected(embedded_model: ModelFiles, judge: Judge) -> list[Expected]:
    tokenizer = Tokenizer.load(embedded_model.folder)
    return judge([tokenizer.encode(prompt) for prompt in PROMPTS], NEW_TOKENS)


@torch.inference_mode()
def _generate(model: torch.nn.Module, prompts: list[list[int]], num_tokens: int) -> list[Expected]:
    """One call of generate for prompts of similar length, padded on the left."""
    width = max(map(len, prompts))
    out = model.generate(  # type: ignore[operator]
        torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
        do_sample=False,
        max_new_tokens=num_tokens,
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


def submit(
    engine: Engine,
    name: str,
    prompt: Sequence[int],
    service_class: ServiceClass,
    num_tokens: int = NEW_TOKENS,
) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
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


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "bros"])
def test_memory_so_small_that_requests_are_preempted(
    embedded_model: ModelFiles, expected: list[Expected], policy: str
) -> None:
    """Policy `bros` lets in only what has room to grow; what it does in little memory is below."""
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


FEW_TOKENS = 20
BURST = 16
WORK_PER_BURST = 900
"""Tokens that steps compute before the next BURST real-time requests arrive: more than these
need, so that best-effort requests hold memory again whenever some come."""


@pytest.fixture(scope="module")
def mixed(embedded_model: ModelFiles, judge: Judge, expected: list[Expected]) -> list[Expected]:
    """Sixty-four requests; the last two go on from the answers to two others."""
    tokenizer = Tokenizer.load(embedded_model.folder)
    alike = [tokenizer.encode(prompt) for family in FAMILIES for prompt in family]
    # Nothing is left to compute of a prompt that ends with a block, but for its last token.
    whole = alike[0][: len(alike[0]) // KV_BLOCK_SIZE * KV_BLOCK_SIZE]
    cases = judge([*alike, whole, whole], FEW_TOKENS)
    more = tokenizer.encode("\nUser: Go on.\nAssistant:")
    next_turns = judge([[*case.prompt, *case.tokens, *more] for case in cases[:2]], FEW_TOKENS)
    for case in expected:
        in_doubt = case.ends_at_near_tie and len(case.tokens) < FEW_TOKENS
        cases.append(Expected(case.prompt, case.tokens[:FEW_TOKENS], in_doubt))
    random.Random(3).shuffle(cases)
    return cases + next_turns


@dataclass(frozen=True)
class Switches:
    """Options of the KV cache; `host` is the room for copies, of which "little" is not enough."""

    prefix: str
    chunk: int
    pressure: str
    layout: str
    find: str
    host: str = "ample"
    memory: str = "fifth"

    @property
    def copies(self) -> bool:
        return self.pressure == "checkpoint" and self.memory == "fifth"


COMBINATIONS = [
    Switches("class-aware", 16, "checkpoint", "plain", "paper"),
    Switches("class-aware", 64, "checkpoint", "bidirectional", "final", host="little"),
    Switches("class-aware", 256, "recompute", "bidirectional", "paper"),
    Switches("lru", 16, "checkpoint", "plain", "final", host="little"),
    Switches("lru", 64, "recompute", "plain", "paper"),
    Switches("lru", 256, "checkpoint", "bidirectional", "final"),
    Switches("off", 16, "recompute", "bidirectional", "final"),
    Switches("off", 64, "checkpoint", "plain", "paper"),
    Switches("off", 256, "checkpoint", "plain", "paper", host="little"),
    Switches("class-aware", 64, "checkpoint", "bidirectional", "final", memory="ample"),
    Switches("off", 256, "recompute", "plain", "final", memory="ample"),
]
ALWAYS = (1, 4, 5, 6, 9)
"""Of these combinations, the ones that have every value of every switch; others are --long."""

LITTLE = 2
"""Blocks of host memory: too little for one request, as a rule."""


def test_every_two_values_of_two_switches_meet_in_little_memory() -> None:
    tight = [(*_values(case),) for case in COMBINATIONS if case.memory == "fifth"]
    values = [
        PREFIX_CACHE,
        (16, 64, 256),
        [("checkpoint", "ample"), ("checkpoint", "little"), ("recompute", "ample")],
        KV_LAYOUTS,
        KV_FIND,
    ]
    for (i, some), (j, others) in itertools.combinations(enumerate(values), 2):
        met = {(case[i], case[j]) for case in tight}
        assert met == set(itertools.product(some, others))


def test_every_value_of_a_switch_is_tried_in_any_run() -> None:
    tried = [_values(COMBINATIONS[number]) for number in ALWAYS]
    for position, values in enumerate(zip(*map(_values, COMBINATIONS), strict=True)):
        assert {case[position] for case in tried} == set(values)


def _cases() -> list[object]:
    return [
        pytest.param(
            case,
            id="-".join(map(str, astuple(case))),
            marks=() if number in ALWAYS else pytest.mark.long,
        )
        for number, case in enumerate(COMBINATIONS)
    ]


def _values(case: Switches) -> tuple[object, ...]:
    return case.prefix, case.chunk, (case.pressure, case.host), case.layout, case.find


class Watched:
    """Lets time pass by STEP_S a step, and keeps what the plans have been like.

    most_tokens: of a step. work: tokens computed. twice: how many of them not for the first
    time. two_owners: blocks of a step of which two requests read different slots.
    grew_left: chunks that are written from right to left.
    """

    def __init__(self, executor: Executor, clock: ManualClock) -> None:
        self._executor = executor
        self._clock = clock
        self._times: Counter[tuple[str, int]] = Counter()
        self.most_tokens = self.work = self.two_owners = self.grew_left = 0

    @property
    def twice(self) -> int:
        return self.work - len(self._times)

    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        self._clock.advance(STEP_S)
        self.most_tokens = max(self.most_tokens, plan.num_tokens)
        self.work += plan.num_tokens
        ranges: dict[int, set[tuple[int, int]]] = {}
        for chunk in plan.chunks:
            positions = range(chunk.start, chunk.start + len(chunk.token_ids))
            self._times.update((chunk.request_id, position) for position in positions)
            slots = list(chunk.slots)
            self.grew_left += len(slots) > 1 and slots[0] == slots[1] + 1
            for i in range(0, len(chunk.segments), SEGMENT_WIDTH):
                block, low, high = chunk.segments[i : i + SEGMENT_WIDTH]
                ranges.setdefault(block, set()).add((low, high))
        self.two_owners += sum(len(found) > 1 for found in ranges.values())
        return self._executor.execute(plan, abandon)

    def close(self) -> None:
        self._executor.close()


def run_mixed(
    files: ModelFiles, mixed: list[Expected], case: Switches
) -> tuple[dict[str, list[int]], EngineStats, Watched]:
    """Best-effort requests first, bursts of real-time ones after that; next turns come last."""
    blocks = [-(-(len(each.prompt) + FEW_TOKENS) // KV_BLOCK_SIZE) for each in mixed]
    config = EngineConfig(
        weights="fp32",
        max_model_len=512,
        rt_wait=1.0,
        max_batch_tokens=case.chunk,
        kv_blocks=sum(blocks) // (5 if case.memory == "fifth" else 1),
        host_kv_blocks=LITTLE if case.host == "little" else sum(blocks),
        kv_layout=case.layout,
        kv_find=case.find,
        on_pressure=case.pressure,
        prefix_cache=case.prefix,
    )
    executor, info = load_executor(config, files)
    clock = ManualClock()
    watched = Watched(executor, clock)
    scheduler = build_scheduler(config, info, STEPS)
    engine = Engine(scheduler, watched, clock, info)
    got: dict[str, list[int]] = {str(number): [] for number in range(len(mixed))}
    real_time = list(range(1, len(mixed) - 2, 2))
    last = [len(mixed) - 2, len(mixed) - 1]

    def arrive(number: int, service_class: ServiceClass) -> None:
        submit(engine, str(number), mixed[number].prompt, service_class, FEW_TOKENS)

    for number in range(0, len(mixed) - 2, 2):
        arrive(number, ServiceClass.BE)
    for arrived, number in enumerate(real_time):
        while watched.work < (1 + arrived // BURST) * WORK_PER_BURST and engine.has_work:
            _step(engine, got)
        arrive(number, ServiceClass.RT)
    while engine.has_work:
        _step(engine, got)
    for number, service_class in zip(last, ServiceClass, strict=True):
        arrive(number, service_class)
    while engine.has_work:
        _step(engine, got)
    scheduler.check_integrity()
    stats = engine.stats()
    engine.close()
    return got, stats, watched


def test_near_ties_are_rare_among_mixed(mixed: list[Expected]) -> None:
    assert len(mixed) >= 60
    assert sum(case.ends_at_near_tie for case in mixed) <= MOST_NEAR_TIES
    assert sum(len(case.tokens) for case in mixed) > 0.95 * len(mixed) * FEW_TOKENS


@pytest.mark.parametrize("case", _cases())
def test_whatever_the_kv_cache_does(
    embedded_model: ModelFiles, mixed: list[Expected], case: Switches
) -> None:
    got, stats, watched = run_mixed(embedded_model, mixed, case)
    for number, each in enumerate(mixed):
        assert len(got[str(number)]) == FEW_TOKENS
        assert got[str(number)][: len(each.tokens)] == each.tokens, (number, each.prompt)
    check_it_happened(case, stats, watched)
    assert stats.kv_blocks_used == 0


class Alike:
    """Counts the rows of a step that begin with enough of the same blocks to be read once."""

    def __init__(self, executor: Executor, kernels: str) -> None:
        self._executor = executor
        rule = grouping_for(kernels, KV_BLOCK_SIZE)
        assert rule is not None, "these kernels read nothing once"
        self._least = rule.min_blocks * SEGMENT_WIDTH
        self.min_rows = rule.min_rows
        self.most_rows = 0

    def execute(
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        found = [tuple(chunk.segments[: self._least]) for chunk in plan.chunks]
        counts = Counter(segments for segments in found if len(segments) == self._least)
        self.most_rows = max(self.most_rows, *counts.values(), 0)
        return self._executor.execute(plan, abandon)

    def close(self) -> None:
        self._executor.close()


def test_what_many_rows_begin_with_is_read_once(embedded_model: ModelFiles, judge: Judge) -> None:
    tokenizer = Tokenizer.load(embedded_model.folder)
    longest = max((prompt for family in FAMILIES for prompt in family), key=len)
    common = tokenizer.encode(longest) * 2
    prompts = [[*common, *tokenizer.encode(prompt)] for prompt in PROMPTS[:6]]
    cases = judge(prompts, FEW_TOKENS)
    assert sum(len(case.tokens) for case in cases) > 0.8 * len(cases) * FEW_TOKENS
    config = EngineConfig(weights="fp32", max_model_len=1024)
    executor, info = load_executor(config, embedded_model)
    alike, clock = Alike(executor, info.kernels), ManualClock()
    engine = Engine(build_scheduler(config, info, STEPS), alike, clock, info)
    got: dict[str, list[int]] = {str(number): [] for number in range(-1, len(cases))}
    submit(engine, "-1", common, ServiceClass.RT, 1)
    while engine.has_work:  # the others come when what they begin with is there
        _step(engine, got)
    for number, case in enumerate(cases):
        submit(engine, str(number), case.prompt, ServiceClass.RT, FEW_TOKENS)
    while engine.has_work:
        _step(engine, got)
    engine.close()
    assert alike.most_rows == len(cases) >= alike.min_rows
    for number, case in enumerate(cases):
        assert got[str(number)][: len(case.tokens)] == case.tokens, PROMPTS[number]


def check_it_happened(case: Switches, stats: EngineStats, watched: Watched) -> None:
    """The switches had their effect, and there was the pressure they are for."""
    by_class = stats.by_class.values()
    tight = case.memory == "fifth"
    assert (sum(counted.preemptions for counted in by_class) > 0) == tight
    assert (sum(counted.kv_taken for counted in by_class) > 0) == tight
    assert (sum(counted.kv_copied for counted in by_class) > 0) == case.copies
    assert (sum(counted.kv_restored for counted in by_class) > 0) == case.copies
    assert (sum(counted.prefix_tokens for counted in by_class) > 0) == (case.prefix != "off")
    # Copies are for not computing twice; only what is shared is lost all the same.
    if tight and (case.pressure == "recompute" or case.host == "little"):
        assert watched.twice > 0
    elif case.prefix == "off":
        assert watched.twice == 0
    assert (watched.grew_left > 0) == (case.layout == "bidirectional")
    if case.layout == "plain":
        assert watched.two_owners == 0
    elif tight and case.copies:  # else who is robbed may be gone before both are in one step
        assert watched.two_owners > 0
    assert watched.most_tokens == case.chunk
