"""Outputs with a grammar: forced tokens are not sampled, computed in one chunk, and counted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence

import pytest

from bros.core.clock import ManualClock
from bros.core.grammars import lark
from bros.core.interfaces import GrammarState, StopRule
from bros.core.plan import Chunk, SampledToken, StepResult
from bros.core.request import EngineRequest, FinishReason, Grammar, ServiceClass, expanded
from bros.engine.engine import Engine
from bros.engine.grammars import Grammars
from bros.scheduler.scheduler import Scheduler
from support.grammars import Script, ScriptConstraint
from support.late_executor import LateExecutor
from support.outputs import expand_all
from support.scheduling import EOS, engine_info, make_scheduler, request
from support.tier import by_tier, seed
from support.toy_model import ToyModel

GRAMMAR = lark("start: x")
ANY = tuple(range(1, 999))


class Sampling(ToyModel):
    """Samples as the model would, or what the constraint allows."""

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        assert chunk.sample is not None
        token_id, constraint = self.next_token(tokens), chunk.sample.constraint
        if isinstance(constraint, ScriptConstraint) and not constraint.allows(token_id):
            allowed = constraint.allowed()
            assert allowed is not None
            token_id = allowed[token_id % len(allowed)]
        return SampledToken(chunk.request_id, token_id)


def expected(prompt: Sequence[int], script: Script, most: int) -> tuple[list[int], FinishReason]:
    """Token by token."""
    tokens = list(prompt)
    while True:
        index = len(tokens) - len(prompt)
        allowed = script.positions[index] if index < len(script.positions) else (EOS,)
        token_id = ToyModel.next_token(tokens)
        if token_id not in allowed:
            token_id = allowed[token_id % len(allowed)]
        tokens.append(token_id)
        if token_id == EOS:
            return tokens[len(prompt) :], FinishReason.STOP
        if index + 1 == most:
            return tokens[len(prompt) :], FinishReason.LENGTH


class Run:
    """An engine without llguidance, whose requests follow scripts."""

    def __init__(self, *, overlap: bool = False, blocks: int = 64, **options: object) -> None:
        self.clock, self.plans = ManualClock(1.0), []  # type: tuple[ManualClock, list[StepPlan]]
        self.scheduler: Scheduler = make_scheduler(
            blocks=blocks,
            depth=2 if overlap else 1,
            **options,  # type: ignore[arg-type]
        )
        model = Sampling()
        executor = LateExecutor(model, self.clock, lambda plan: 0.01, self.plans.append)
        self.executor = executor
        self.engine = Engine(
            self.scheduler, executor, self.clock, engine_info(blocks=blocks),
            async_scheduling="on" if overlap else "off",
        )  # fmt: skip
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason | None] = {}

    def submit(self, asked: EngineRequest, script: Script | None = None) -> None:
        start = None if script is None else script.start
        self.tokens[asked.request_id] = []
        self.scheduler.submit(asked, self.clock.now(), start)

    def step(self) -> None:
        for output in expand_all(self.engine.step()):
            self.tokens[output.request_id].extend(output.token_ids)
            self.reasons[output.request_id] = output.finish_reason
        self.scheduler.check_integrity()

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def chunks(self, name: str) -> list[list[int]]:
        return [list(c.token_ids) for p in self.plans for c in p.chunks if c.request_id == name]


def asked(name: str = "a", prompt: int = 3, **params: object) -> EngineRequest:
    return request(name, prompt, grammar=GRAMMAR, **{"max_tokens": 20, **params})


def test_forced_tokens_are_one_chunk_of_the_next_step() -> None:
    run, script = Run(), Script([ANY, (7,), (8,), (9,), ANY, (6,)])
    run.submit(asked(), script)
    run.drain()
    first = ToyModel.next_token([1, 2, 3])
    fifth = ToyModel.next_token([1, 2, 3, first, 7, 8, 9])
    assert run.chunks("a") == [[1, 2, 3], [first, 7, 8, 9]]
    assert run.tokens["a"] == [first, 7, 8, 9, fifth, 6, EOS]
    assert run.reasons["a"] is FinishReason.STOP


def test_tokens_that_are_forced_first_are_computed_with_the_prompt_and_sent_with_a_sample() -> None:
    run, script = Run(), Script([(7,), (8,), ANY])
    run.submit(asked(), script)
    run.step()
    assert run.chunks("a") == [[1, 2, 3, 7, 8]]
    assert run.tokens["a"][:2] == [7, 8] and len(run.tokens["a"]) == 4
    stats, trace = run.scheduler.stats(), run.scheduler.trace("a")
    assert stats.by_class[ServiceClass.RT].output_tokens == 4
    assert trace is not None and trace.output_tokens == 4 and trace.prompt_tokens == 3


def test_an_output_that_is_forced_as_a_whole_takes_one_step() -> None:
    run = Run()
    run.submit(asked(), Script([(7,), (8,)]))
    run.drain()
    assert run.tokens["a"] == [7, 8, EOS] and len(run.plans) == 1
    assert run.reasons["a"] is FinishReason.STOP


@pytest.mark.parametrize("most", range(1, 7))
@pytest.mark.parametrize("overlap", [False, True])
def test_forced_tokens_end_at_max_tokens(most: int, overlap: bool) -> None:
    script = Script([(5,), ANY, (7,), (8,), (9,)])
    run = Run(overlap=overlap)
    run.submit(asked(max_tokens=most), script)
    run.drain()
    assert (run.tokens["a"], run.reasons["a"]) == expected([1, 2, 3], script, most)


def test_with_logprobs_each_token_is_sampled() -> None:
    run, script = Run(), Script([(5,), (6,), ANY, (7,)])
    run.submit(asked(logprobs=0), script)
    run.drain()
    assert [len(chunk) for chunk in run.chunks("a")] == [3, 1, 1, 1, 1]
    assert (run.tokens["a"], run.reasons["a"]) == expected([1, 2, 3], script, 20)


def test_a_sample_that_the_grammar_has_forced_meanwhile_is_ignored() -> None:
    run, script = Run(overlap=True), Script([ANY, (7,), (8,), ANY, ANY])
    run.submit(asked(), script)
    run.drain()
    assert (run.tokens["a"], run.reasons["a"]) == expected([1, 2, 3], script, 20)
    assert run.executor.filled > 0, "steps overlapped"
    assert [7, 8] in run.chunks("a")  # the first of them was sampled for nothing before


def test_the_grammar_may_fail_and_ends_the_request_only() -> None:
    class Failing:
        def advance(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
            if token_ids:
                raise ValueError("it has become too complex")
            return ()

        def constraint(self, ahead: int = 0) -> ScriptConstraint:
            return ScriptConstraint(Script([ANY]).start(None, STOPS), 0)

    STOPS = StopRule(frozenset({EOS}), 0, EOS)

    def start(request: EngineRequest, stops: StopRule) -> GrammarState:
        assert stops == STOPS
        return Failing()

    run = Run()
    run.tokens["a"] = []
    run.scheduler.submit(asked(), 1.0, start)
    run.submit(request("b", 4))
    outputs = [output for _ in range(4) for output in expand_all(run.engine.step())]
    (failed,) = [output for output in outputs if output.finish_reason is FinishReason.ERROR]
    message = "cannot follow the grammar in 'grammar' any further: it has become too complex"
    assert (failed.request_id, failed.param) == ("a", "grammar")
    assert message in (failed.error or "")
    assert sum(len(o.token_ids) for o in outputs if o.request_id == "b") == 4


@pytest.mark.parametrize("of_grammar", [False, True])
def test_only_an_error_of_the_grammar_names_its_field(of_grammar: bool) -> None:
    run = Run()
    run.submit(asked(), Script([ANY]))
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    sample = SampledToken("a", -1, error="no token", of_grammar=of_grammar)
    (output,) = map(expanded, run.scheduler.apply(StepResult(plan.step, (sample,)), now=0.0))
    assert output.finish_reason is FinishReason.ERROR and "no token" in (output.error or "")
    assert output.param == ("grammar" if of_grammar else None)


def test_waiting_for_the_check_and_the_compiler_is_in_the_trace() -> None:
    run = Run()
    run.tokens["a"] = []
    waited = dataclasses.replace(asked(), checked_s=0.5)
    run.scheduler.submit(waited, 1.0, Script([ANY]).start, 0.25)
    trace = run.scheduler.trace("a")
    assert trace is not None and trace.waits == {"grammar": 0.75}


def random_script(rng: random.Random) -> Script:
    positions: list[Sequence[int]] = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.random()
        if kind < 0.5:
            positions.append((rng.randrange(1, 99),))
        elif kind < 0.8:
            positions.append(rng.sample(range(1, 999), 5))
        else:
            positions.append(ANY if rng.random() < 0.7 else (*ANY, EOS))
    return Script(positions)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("blocks", "host_blocks"), [(14, 0), (14, 6), (200, 0)])
def test_outputs_are_the_same_under_pressure_overlapped_and_resumed(
    blocks: int, host_blocks: int, overlap: bool
) -> None:
    """Against an oracle that takes one token after the other."""
    for number in range(by_tier(fast=6, long=150)):
        rng = random.Random(seed(number))
        run = Run(
            overlap=overlap, blocks=blocks, host_blocks=host_blocks, prefix_cache="class-aware",
            max_batch_tokens=16,
        )  # fmt: skip
        answers = {}
        for index in range(8):
            name, script = f"r{index}", random_script(rng)
            prompt = [rng.randrange(1, 99) for _ in range(rng.randint(2, 14))]
            most = rng.randint(1, 14)
            answers[name] = expected(prompt, script, most)
            one = request(
                name, prompt, rng.choice(list(ServiceClass)), grammar=GRAMMAR, max_tokens=most
            )
            whole = answers[name][0]
            if len(whole) > 1 and rng.random() < 0.4:  # another engine has begun it
                given = whole[: rng.randint(1, min(len(whole), most) - 1)]
                one = dataclasses.replace(
                    one, prompt_token_ids=[*prompt, *given], resumed=len(given)
                )
                answers[name] = whole[len(given) :], answers[name][1]
            run.submit(one, script)
            if rng.random() < 0.5:
                run.step()
        run.drain()
        for name, (tokens, reason) in answers.items():
            assert (run.tokens[name], run.reasons[name]) == (tokens, reason), name


class Compiler(Grammars):
    """Compiles when it is told to."""

    compiled = False

    def prepare(self, grammar: Grammar, done: Callable[[], None], tenant: str = "") -> bool:
        return self.compiled

    def state(self, grammar: Grammar, stops: StopRule, tenant: str = "") -> GrammarState:
        return Script([ANY]).start(None, stops)


@pytest.mark.parametrize(("gives_up", "waits"), [(False, {"grammar": 7.0}), (True, {})])
def test_a_request_has_waited_for_its_own_grammar_and_not_for_that_of_an_aborted_one(
    gives_up: bool, waits: dict[str, float]
) -> None:
    clock = ManualClock(1.0)
    compiler = Compiler(None, engine_info(), clock)
    engine = Engine(make_scheduler(), ToyModel(4), clock, engine_info(), grammars=compiler)
    assert not engine.prepare(asked(), lambda: None)
    clock.advance(7.0)
    compiler.compiled = True
    if gives_up:
        engine.abort("a")
        assert engine.prepare(asked(), lambda: None)
    engine.submit(asked())
    trace = engine.trace("a")
    assert trace is not None and trace.waits == waits
