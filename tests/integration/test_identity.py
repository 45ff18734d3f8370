"""Greedy output is the output of transformers, however the work is cut up and packed.

The fast tier tries everything on a small model with random weights, and on the embedded model one
run of a few prompts. The long tier tries everything on the embedded model too, in fp32: forty
prompts, 64 tokens each, and more that begin alike for whatever the KV cache may do to them.

Different row counts sum in a different order, so a position where the best two logits of
transformers are closer than the margin of a model may go either way; such a position ends the
comparison of its prompt, and there may be only few.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from zlib import crc32

import pytest
import torch
from transformers import LlamaConfig
from transformers_reference import load_in_transformers

from bros.core.clock import ManualClock, SystemClock
from bros.core.config import KV_FIND, KV_LAYOUTS, POLICIES, PREFIX_CACHE, EngineConfig
from bros.core.interfaces import EngineStats, Executor
from bros.core.plan import SEGMENT_WIDTH, StepPlan, StepResult, SuspendedStep
from bros.core.request import EngineRequest, SamplingParams, ServiceClass, expanded
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model
from bros.executor.target import grouping_for
from bros.profiling.profiles import profile_folders
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.text.tokenizer import Tokenizer
from support.checkpoints import save_checkpoint
from support.prompts import FAMILIES, PROMPTS
from support.tier import by_tier, seed

# Some take two minutes with the embedded model on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

NEW_TOKENS = 64
FEW_TOKENS = 20
SOME_PROMPTS = (*PROMPTS[: by_tier(fast=3, long=7)], PROMPTS[38])
MOST_NEAR_TIES = 3
BATCH = 8
"""Prompts that transformers answers in one call, and how much longer the longest of them may be
than the shortest: padding costs as much as tokens."""
MOST_PADDED = 2


@dataclass(frozen=True)
class Subject:
    """A model, and how its prompts are made of text. margin: what rounding may do to logits."""

    files: ModelFiles
    encode: Callable[[str], list[int]]
    layers: int
    margin: float


TINY = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    eos_token_id=0,
)


def tiny(folder: Path) -> Subject:
    """Random weights, so that every token depends on all before it, and a word is a token."""

    def encode(text: str) -> list[int]:
        return [1 + crc32(word.encode()) % 511 for word in re.findall(r" ?\w{1,4}|\W", text)]

    save_checkpoint(folder, TINY)
    return Subject(ModelFiles(folder, "tiny"), encode, TINY.num_hidden_layers, margin=1e-4)


def embedded() -> Subject:
    files = resolve_model(None, default_cache_dir())
    return Subject(files, Tokenizer.load(files.folder).encode, layers=30, margin=1e-3)


@pytest.fixture(scope="module", params=["tiny", pytest.param("embedded", marks=pytest.mark.long)])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return tiny(tmp_path_factory.mktemp("tiny")) if request.param == "tiny" else embedded()


@dataclass(frozen=True)
class Expected:
    """transformers' tokens for one prompt, as far as they are beyond doubt."""

    prompt: list[int]
    tokens: list[int]
    ends_at_near_tie: bool


Judge = Callable[[list[list[int]], int], list[Expected]]
"""transformers' answers of so many tokens to prompts."""


@pytest.fixture(scope="module")
def judge(subject: Subject) -> Judge:
    return judge_of(subject)


def judge_of(subject: Subject) -> Judge:
    model = load_in_transformers(subject.files)

    def answers(prompts: list[list[int]], num_tokens: int) -> list[Expected]:
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        found: dict[int, Expected] = {}
        while by_length:
            longest = MOST_PADDED * len(prompts[by_length[0]])
            group = [n for n in by_length[:BATCH] if len(prompts[n]) <= longest]
            by_length = by_length[len(group) :]
            wanted = [prompts[number] for number in group]
            cases = _generate(model, wanted, num_tokens, subject.margin)
            found.update(zip(group, cases, strict=True))
        return [found[number] for number in range(len(prompts))]

    return answers


@pytest.fixture(scope="module")
def expected(subject: Subject, judge: Judge) -> list[Expected]:
    return judge([subject.encode(prompt) for prompt in PROMPTS], NEW_TOKENS)


@torch.inference_mode()
def _generate(
    model: torch.nn.Module, prompts: list[list[int]], num_tokens: int, margin: float
) -> list[Expected]:
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
        close = (best_two[row, :, 0] - best_two[row, :, 1] < margin).nonzero().flatten().tolist()
        cases.append(Expected(prompt, tokens[: close[0]] if close else tokens, bool(close)))
    return cases


STEPS = CostModel(constant_s=0.03, token_s=0.001, sample_s=2e-4, pair_s=4e-7, context_s=2e-6)
"""What the scheduler is told; about what the embedded model takes on two cores."""
STEP_S = 0.05


def engine_for(files: ModelFiles, **options: object) -> Engine:
    """Of which every run decides the same, however fast the machine is."""
    config = EngineConfig(weights="fp32", max_model_len=1024, **options)  # type: ignore[arg-type]
    executor, info = load_executor(config, files)
    clock = ManualClock()
    scheduler = build_scheduler(config, info, STEPS)
    return Engine(scheduler, Watched(executor, clock), clock, info)


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


def check(
    engine: Engine, expected: list[Expected], *, at_once: bool, num_tokens: int = NEW_TOKENS
) -> None:
    """Run every prompt and compare; `at_once` submits all before the first step."""
    got: dict[str, list[int]] = {}
    for number, case in enumerate(expected):
        got[str(number)] = []
        service_class = random.Random(number).choice(list(ServiceClass))
        submit(engine, str(number), case.prompt, service_class, num_tokens)
        while not at_once and engine.has_work:
            _step(engine, got)
    while engine.has_work:
        _step(engine, got)
    engine.close()
    for number, case in enumerate(expected):
        answer = got[str(number)]
        assert len(answer) == num_tokens
        assert answer[: len(case.tokens)] == case.tokens, PROMPTS[number]


def _step(engine: Engine, got: dict[str, list[int]]) -> None:
    # It may be suspended, though nothing arrives.
    for output in map(expanded, engine.step(arrivals=tuple)):
        got[output.request_id] += output.token_ids


def test_near_ties_are_rare(expected: list[Expected]) -> None:
    """Else the other tests would compare next to nothing."""
    assert sum(case.ends_at_near_tie for case in expected) <= MOST_NEAR_TIES
    assert sum(len(case.tokens) for case in expected) > 0.9 * len(expected) * NEW_TOKENS


def test_answers_differ(expected: list[Expected]) -> None:
    """Else what belongs to another request would not show."""
    assert len({tuple(case.tokens[:8]) for case in expected}) > 0.9 * len(expected)


def test_the_embedded_model_as_it_is_served() -> None:
    """With what this machine takes for a step, and by its own clock."""
    subject, num_tokens = embedded(), by_tier(fast=8, long=FEW_TOKENS)
    prompts = [subject.encode(prompt) for prompt in SOME_PROMPTS]
    expected = judge_of(subject)(prompts, num_tokens)
    assert sum(len(case.tokens) for case in expected) > 0.8 * len(expected) * num_tokens
    config = EngineConfig(weights="fp32", max_model_len=1024)
    folders = profile_folders(default_cache_dir())
    engine = build_engine(config, subject.files, SystemClock(), profiles=folders)
    check(engine, expected, at_once=True, num_tokens=num_tokens)


def test_one_at_a_time(subject: Subject, expected: list[Expected]) -> None:
    check(engine_for(subject.files), expected[: by_tier(fast=8, long=40)], at_once=False)


@pytest.mark.parametrize("chunk", [16, 256])
def test_all_at_once(subject: Subject, expected: list[Expected], chunk: int) -> None:
    check(engine_for(subject.files, max_batch_tokens=chunk), expected, at_once=True)


def test_reference_kernels(subject: Subject, expected: list[Expected]) -> None:
    engine = engine_for(subject.files, kernels="reference")
    check(engine, expected[: by_tier(fast=6, long=20)], at_once=True)


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "bros"])
def test_memory_so_small_that_requests_are_preempted(
    subject: Subject, expected: list[Expected], policy: str
) -> None:
    """Policy `bros` lets in only what has room to grow; what it does in little memory is below."""
    engine = engine_for(subject.files, kv_blocks=64, policy=policy)
    check(engine, expected[:24], at_once=True)
    stats = engine.stats()
    assert sum(counted.preemptions for counted in stats.by_class.values()) > 0
    assert stats.kv_blocks_used == 0


class Fickle:
    """Suspends steps before a layer drawn for each, if they may yield at all. The one drawn is
    below `patience`; three times the layers suspend about a third of the steps.

    Time passes by STEP_S a step, so that every run of a test decides the same.
    """

    def __init__(self, executor: Executor, clock: ManualClock, patience: int) -> None:
        self._executor = executor
        self._clock = clock
        self._patience = patience
        self._rng = random.Random(seed(1))
        self.steps = 0
        self.suspended: list[int] = []

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        self.steps += 1
        self._clock.advance(STEP_S)
        if should_abort is None:
            return self._executor.execute(plan)
        last, asked = self._rng.randrange(self._patience), 0

        def stops() -> bool:
            nonlocal asked
            asked += 1
            return asked > last or should_abort()

        result = self._executor.execute(plan, stops)
        if isinstance(result, SuspendedStep):
            self.suspended.append(result.layer)
        return result

    def close(self) -> None:
        self._executor.close()


@pytest.mark.parametrize("kv_blocks", [None, 64])
def test_steps_suspended_at_any_layer(
    subject: Subject, expected: list[Expected], kv_blocks: int | None
) -> None:
    config = EngineConfig(
        weights="fp32", max_model_len=1024, policy="bros", kv_blocks=kv_blocks, rt_wait=1.0
    )
    executor, info = load_executor(config, subject.files)
    clock = ManualClock()
    fickle = Fickle(executor, clock, 3 * subject.layers)
    engine = Engine(build_scheduler(config, info, STEPS), fickle, clock, info)
    check(engine, expected[:24], at_once=True)
    stats = engine.stats()
    assert stats.suspended_steps == len(fickle.suspended) >= fickle.steps / 10
    assert len(set(fickle.suspended)) >= subject.layers / 3
    assert stats.kv_blocks_used == 0


BURST = 16
WORK_PER_BURST = 900
"""Tokens that steps compute before the next BURST real-time requests arrive: more than these
need, so that best-effort requests hold memory again whenever some come."""


@pytest.fixture(scope="module")
def mixed(subject: Subject, judge: Judge, expected: list[Expected]) -> list[Expected]:
    """Sixty-four requests; the last two go on from the answers to two others."""
    alike = [subject.encode(prompt) for family in FAMILIES for prompt in family]
    # Nothing is left to compute of a prompt that ends with a block, but for its last token.
    whole = alike[0][: len(alike[0]) // KV_BLOCK_SIZE * KV_BLOCK_SIZE]
    cases = judge([*alike, whole, whole], FEW_TOKENS)
    more = subject.encode("\nUser: Go on.\nAssistant:")
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
    memory: str = "eighth"

    @property
    def copies(self) -> bool:
        return self.pressure == "checkpoint" and self.memory == "eighth"


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
LITTLE = 2
"""Blocks of host memory: too little for one request, as a rule."""


def test_every_two_values_of_two_switches_meet_in_little_memory() -> None:
    tight = [(*_values(case),) for case in COMBINATIONS if case.memory == "eighth"]
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
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
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
        return self._executor.execute(plan, should_abort)

    def close(self) -> None:
        self._executor.close()


def run_mixed(
    files: ModelFiles, mixed: list[Expected], case: Switches, policy: str = "bros"
) -> tuple[dict[str, list[int]], EngineStats, Watched]:
    """Best-effort requests first, bursts of real-time ones after that; next turns come last."""
    blocks = [-(-(len(each.prompt) + FEW_TOKENS) // KV_BLOCK_SIZE) for each in mixed]
    config = EngineConfig(
        weights="fp32",
        max_model_len=512,
        policy=policy,
        rt_wait=1.0,
        max_batch_tokens=case.chunk,
        kv_blocks=sum(blocks) // (8 if case.memory == "eighth" else 1),
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


@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: "-".join(map(str, astuple(case))))
def test_whatever_the_kv_cache_does(
    subject: Subject, mixed: list[Expected], case: Switches
) -> None:
    got, stats, watched = run_mixed(subject.files, mixed, case)
    check_answers(got, mixed)
    check_it_happened(case, stats, watched)
    assert stats.kv_blocks_used == 0


OTHER_POLICIES = [name for name in POLICIES if name != "bros"]


@pytest.mark.parametrize(
    ("policy", "case"), list(zip(OTHER_POLICIES, COMBINATIONS[::2], strict=False)), ids=str
)
def test_whatever_the_kv_cache_does_under_another_policy(
    subject: Subject, mixed: list[Expected], policy: str, case: Switches
) -> None:
    got, stats, _ = run_mixed(subject.files, mixed, case, policy)
    check_answers(got, mixed)
    assert stats.kv_blocks_used == 0


def check_answers(got: dict[str, list[int]], mixed: list[Expected]) -> None:
    for number, each in enumerate(mixed):
        assert len(got[str(number)]) == FEW_TOKENS
        assert got[str(number)][: len(each.tokens)] == each.tokens, (number, each.prompt)


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
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        for piece in plan.shared:
            assert (piece.end - piece.first) * SEGMENT_WIDTH >= self._least
            self.most_rows = max(self.most_rows, len(piece.rows))
        return self._executor.execute(plan, should_abort)

    def close(self) -> None:
        self._executor.close()


def test_what_many_rows_begin_with_is_read_once(subject: Subject, judge: Judge) -> None:
    longest = max((prompt for family in FAMILIES for prompt in family), key=len)
    common = subject.encode(longest) * 2
    prompts = [[*common, *subject.encode(prompt)] for prompt in PROMPTS[:6]]
    cases = judge(prompts, FEW_TOKENS)
    assert sum(len(case.tokens) for case in cases) > 0.8 * len(cases) * FEW_TOKENS
    config = EngineConfig(weights="fp32", max_model_len=1024)
    executor, info = load_executor(config, subject.files)
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
    tight = case.memory == "eighth"
    assert (sum(counted.preemptions for counted in by_class) > 0) == tight
    assert (sum(counted.kv_preempted for counted in by_class) > 0) == tight
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
    elif tight and case.copies:  # else the victim may be gone before both are in one step
        assert watched.two_owners > 0
    assert watched.most_tokens == case.chunk
