"""Steps that are planned while others run: the same tokens, nothing lost, nothing wrong shared.

Every load is served twice, the plain way and with steps that overlap, on a device whose copies
and kernels take any time they like (support/device_model.py).
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.config import KV_FIND, KV_LAYOUTS, POLICIES, PREFIX_CACHE
from bros.core.plan import PENDING, Chunk, SampledToken, StepPlan
from bros.core.request import EngineRequest, FinishReason, Hints, RequestOutput, Slo, expanded
from bros.engine.engine import Engine
from bros.scheduler.state import RequestState
from support.device_model import Device
from support.late_executor import LateExecutor
from support.scheduling import engine_info, make_scheduler, request
from support.tier import examples
from support.toy_model import VOCAB, ToyModel
from support.virtual_time import BE, RT, plan_seconds

SIZE = 4


class ChoosingModel(ToyModel):
    """Heeds what SampleSpec says, and checks it. fails: (request, output) that cannot be chosen."""

    def __init__(self, fails: Collection[tuple[str, int]] = ()) -> None:
        super().__init__(SIZE)
        self._fails = fails

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        spec = chunk.sample
        assert spec is not None
        index = len(tokens) - spec.prompt_len
        assert list(spec.token_ids) == (list(tokens) if spec.params.needs_history else [])
        if (chunk.request_id, index) in self._fails:
            return SampledToken(chunk.request_id, -1, error="broken")
        return SampledToken(chunk.request_id, self.choice(tokens, spec.forbidden))

    @classmethod
    def choice(cls, tokens: Sequence[int], forbidden: Collection[int]) -> int:
        token = cls.next_token(tokens)
        while token in forbidden:
            token = token % (VOCAB - 1) + 1
        return token


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    reason: FinishReason | None


def right_answer(asked: EngineRequest, fails: Collection[tuple[str, int]]) -> Answer:
    """Computed the plain way."""
    params, tokens = asked.sampling, list(asked.prompt_token_ids)
    if asked.prefill_only:
        return Answer((), FinishReason.LENGTH)
    assert params.max_tokens is not None
    for index in range(params.max_tokens):
        if (asked.request_id, index) in fails:
            return Answer(tuple(tokens[len(asked.prompt_token_ids) :]), FinishReason.ERROR)
        early = index < params.min_tokens
        tokens.append(ChoosingModel.choice(tokens, params.stop_token_ids if early else ()))
        if tokens[-1] in params.stop_token_ids:
            reason = FinishReason.STOP
            break
    else:
        reason = FinishReason.LENGTH
    return Answer(tuple(tokens[len(asked.prompt_token_ids) :]), reason)


class Run:
    """An engine on a clock that moves by what steps cost, times `slowness`.

    answers: by request, in the order of submission. calls: of Engine.step; came: in which of them
    each token of a request came. plans: as they were made.
    """

    def __init__(
        self,
        policy: str = "bros",
        *,
        overlap: bool = True,
        fails: Collection[tuple[str, int]] = (),
        slowness: float = 1.0,
        device: Device | None = None,
        blocks: int = 400,
        host_blocks: int = 0,
        **options: object,
    ) -> None:
        chosen = {"prefix_cache": "class-aware", **options}
        self._finds_prefixes = chosen["prefix_cache"] != "off"
        self.scheduler = make_scheduler(
            policy, blocks=blocks, block_size=SIZE, host_blocks=host_blocks,
            depth=2 if overlap else 1, **chosen,  # type: ignore[arg-type]
        )  # fmt: skip
        self.clock = ManualClock()
        self.plans: list[StepPlan] = []
        self._device = device
        self.executor = LateExecutor(
            ChoosingModel(fails), self.clock, lambda plan: slowness * plan_seconds(plan), self._saw
        )
        self.engine = Engine(
            self.scheduler,
            self.executor,
            self.clock,
            engine_info(blocks=blocks, block_size=SIZE, policy=policy),
            async_scheduling="on" if overlap else "off",
        )
        self.calls = 0
        self.answers: list[Answer] = []
        self.asked: list[EngineRequest] = []
        self.came: dict[str, list[int]] = {}
        self.times: dict[str, list[float]] = {}
        self._serving: dict[str, int] = {}

    def submit(
        self,
        name: str,
        prompt: int | Sequence[int],
        service_class: object = RT,
        *,
        prefill_only: bool = False,
        **options: object,
    ) -> None:
        asked = request(name, prompt, service_class, arrival_s=self.clock.now(), **options)  # type: ignore[arg-type]
        self.submit_as_it_is(dataclasses.replace(asked, prefill_only=prefill_only))

    def submit_as_it_is(self, asked: EngineRequest) -> None:
        self.engine.submit(asked)
        self._serving[asked.request_id] = len(self.asked)
        self.asked.append(asked)
        self.answers.append(Answer((), None))
        self.came[asked.request_id] = []
        self.times[asked.request_id] = []

    def abort(self, name: str) -> bool:
        output = self.engine.abort(name)
        self._take([output] if output else [])
        return output is not None

    def step(self) -> dict[str, Chunk]:
        """One call; the chunks that began with it."""
        before = len(self.plans)
        self.calls += 1
        outputs = [*map(expanded, self.engine.step())]
        self._take(outputs)
        self.scheduler.check_integrity()
        return {chunk.request_id: chunk for plan in self.plans[before:] for chunk in plan.chunks}

    def steps(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self.step()

    def drain(self) -> None:
        """To the end; nothing may be left then."""
        while self.engine.has_work:
            self.step()
            assert self.calls < 20_000, "no progress"
        stats = self.scheduler.stats()
        assert (stats.kv_blocks_used, stats.host_kv_blocks_used) == (0, 0)
        counted = stats.by_class.values()
        begun = [a for a, answer in zip(self.asked, self.answers, strict=True) if answer.tokens]
        prompts = sum(len(asked.prompt_token_ids) for asked in begun) + self._filled_tokens()
        assert sum(each.prompt_tokens for each in counted) == prompts
        outputs = sum(len(answer.tokens) for answer in self.answers)
        assert sum(each.output_tokens for each in counted) == outputs

    def _filled_tokens(self) -> int:
        """Of fills that were done, as far as they fill blocks that can be cached."""
        pairs = zip(self.asked, self.answers, strict=True)
        done = [a for a, answer in pairs if a.prefill_only and answer.reason is FinishReason.LENGTH]
        whole = sum(len(asked.prompt_token_ids) // SIZE * SIZE for asked in done)
        return whole if self._finds_prefixes else 0

    def answer(self, name: str) -> Answer:
        return self.answers[self._serving[name]]

    def _saw(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        if self._device is not None:
            self._device.submit(plan, len(plan.chunks))

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            number = self._serving[output.request_id]
            before = self.answers[number]
            assert before.reason is None, "an output after the last one"
            self.answers[number] = Answer(before.tokens + output.token_ids, output.finish_reason)
            self.came[output.request_id] += [self.calls] * len(output.token_ids)
            self.times[output.request_id] += [self.clock.now()] * len(output.token_ids)


# Any load


@dataclass(frozen=True)
class Arrival:
    """family: those of one begin alike. stop_at: its token of that index is a stop token; fails_at:
    cannot be chosen. penalty: tokens depend on those before. fill: no tokens are asked for.
    hints: how long what is left of it is kept, and for whom. steps: until the next one arrives.
    stays: else it is withdrawn then, and the next one has its name."""

    length: int
    num_tokens: int
    service_class: str
    family: int
    slo: Slo
    stop_at: int
    min_tokens: int
    fails_at: int
    penalty: bool
    prefill_only: bool
    hints: Hints
    steps: int
    stays: bool


@dataclass(frozen=True)
class Load:
    arrivals: tuple[Arrival, ...]
    policy: str
    options: dict[str, object]
    slowness: float
    seed: int


RARELY = st.sampled_from([-1] * 5 + [0, 1, 2, 3])


def loads() -> st.SearchStrategy[Load]:
    arrivals = st.builds(
        Arrival,
        length=st.integers(1, 20),
        num_tokens=st.integers(1, 20),
        service_class=st.sampled_from(["rt", "be"]),
        family=st.integers(0, 1),
        slo=st.sampled_from([Slo(), Slo(0.05, 0.03), Slo(deadline_s=1.0)]),
        stop_at=RARELY,
        min_tokens=st.sampled_from([0, 0, 2]),
        fails_at=RARELY,
        penalty=st.sampled_from([False] * 7 + [True]),
        prefill_only=st.sampled_from([False] * 3 + [True]),
        hints=st.sampled_from([Hints(), Hints(), Hints(keep_s=1e6), Hints(private_from=9)]),
        steps=st.integers(0, 5),
        stays=st.sampled_from([True, True, True, False]),
    )
    options = st.fixed_dictionaries(
        {
            "blocks": st.sampled_from([10, 12, 40]),
            "host_blocks": st.sampled_from([0, 2, 64]),
            "max_num_seqs": st.integers(1, 6),
            "max_batch_tokens": st.sampled_from([3, 8, 32]),
            "late": st.sampled_from(["renew", "edf", "shed"]),
            "overload": st.just("late"),
            "kv_layout": st.sampled_from(KV_LAYOUTS),
            "kv_find": st.sampled_from(KV_FIND),
            "prefix_cache": st.sampled_from(PREFIX_CACHE),
            "be_share": st.sampled_from([0.0, 0.1]),
        }
    )
    return st.builds(
        Load,
        arrivals=st.lists(arrivals, min_size=1, max_size=10).map(tuple),
        policy=st.sampled_from(POLICIES),
        options=options,
        slowness=st.sampled_from([0.0, 1.0, 5.0]),
        seed=st.integers(0, 999),
    )


def ask(arrival: Arrival, name: str, now: float) -> EngineRequest:
    prompt = range(1 + 100 * arrival.family, 1 + 100 * arrival.family + arrival.length)
    params = {
        "max_tokens": arrival.num_tokens,
        "min_tokens": min(arrival.min_tokens, arrival.num_tokens),
        "repetition_penalty": 1.5 if arrival.penalty else 1.0,
    }
    service_class = RT if arrival.service_class == "rt" else BE
    asked = request(name, prompt, service_class, arrival_s=now, slo=arrival.slo, **params)
    asked = dataclasses.replace(asked, prefill_only=arrival.prefill_only, hints=arrival.hints)
    if arrival.stop_at < 0:
        return asked
    token = ToyModel.continuation(prompt, arrival.stop_at + 1)[-1]
    sampling = dataclasses.replace(asked.sampling, stop_token_ids=(token,))
    return dataclasses.replace(asked, sampling=sampling)


def serve(load: Load, *, overlap: bool) -> tuple[Run, list[Answer]]:
    """Serve a load; the run, and the right answers."""
    names, stayed = [], 0
    for arrival in load.arrivals:
        names.append(f"r{stayed}")
        stayed += arrival.stays
    fails = {
        (name, arrival.fails_at)
        for name, arrival in zip(names, load.arrivals, strict=True)
        if arrival.fails_at >= 0
    }
    device = Device(SIZE, random.Random(load.seed), lead=1)
    run = Run(
        load.policy, overlap=overlap, fails=fails, slowness=load.slowness, device=device,
        **load.options,  # type: ignore[arg-type]
    )  # fmt: skip
    for arrival, name in zip(load.arrivals, names, strict=True):
        if name in run.came:
            run.abort(name)
        run.submit_as_it_is(ask(arrival, name, run.clock.now()))
        run.steps(arrival.steps)
    run.drain()
    assert device.hazards() == []
    return run, [right_answer(asked, fails) for asked in run.asked]


@given(load=loads())
@settings(max_examples=examples(40, long=800))
def test_any_load_gets_the_same_answers_as_without_overlap(load: Load) -> None:
    for overlap in (False, True):
        run, right = serve(load, overlap=overlap)
        for found, expected in zip(run.answers, right, strict=True):
            if found.reason is FinishReason.ABORT or (
                found.reason is FinishReason.ERROR and load.options["late"] == "shed"
            ):
                assert found.tokens == expected.tokens[: len(found.tokens)]
            else:
                assert found == expected
        assert run.executor.most_in_flight <= 2 * overlap


@pytest.mark.parametrize("policy", POLICIES)
def test_random_loads_do_overlap(policy: str) -> None:
    """Else the test above would say little."""
    rng = random.Random(policy)
    run = Run(policy, blocks=14, host_blocks=64)
    for number in range(40):
        service_class = rng.choice([RT, BE])
        run.submit(f"r{number}", rng.randint(1, 24), service_class, max_tokens=rng.randint(1, 30))
        run.steps(rng.randint(0, 4))
    run.drain()
    stats = run.scheduler.stats()
    assert run.executor.most_in_flight == 2
    assert run.executor.filled > 50
    assert sum(counted.preemptions for counted in stats.by_class.values()) > 0
    for asked, answer in zip(run.asked, run.answers, strict=True):
        assert answer == right_answer(asked, ())


# When tokens come


@pytest.mark.parametrize("policy", ["fcfs", "bros"])
def test_a_token_comes_with_the_call_that_begins_the_next_step(policy: str) -> None:
    """With overlap the same steps run, and each is reported one call later."""
    runs = [Run(policy, overlap=overlap, max_batch_tokens=8) for overlap in (False, True)]
    for run in runs:
        for number in range(6):
            run.submit(f"r{number}", 1 + 5 * number, max_tokens=10, slo=Slo(9.0, 9.0))
        run.drain()
    plain, late = runs
    shapes = [
        [[(c.request_id, c.start, len(c.token_ids)) for c in plan.chunks] for plan in run.plans]
        for run in runs
    ]
    assert shapes[0] == shapes[1]
    for name, calls in plain.came.items():
        assert late.came[name] == [call + 1 for call in calls]
    assert late.calls == plain.calls + 1


def test_the_first_call_does_not_wait_for_its_step() -> None:
    run = Run()
    run.submit("a", 5)
    assert run.step().keys() == {"a"}
    assert (run.executor.finished, run.clock.now()) == (0, 0.0)
    assert list(run.step()["a"].token_ids) == [PENDING]
    assert run.executor.finished == 1 and run.answer("a").tokens
    run.drain()


def test_a_request_whose_tokens_are_all_pending_is_not_in_the_next_step() -> None:
    run = Run()
    run.submit("a", 5, max_tokens=2)
    run.submit("b", [900, 901], max_tokens=9)
    assert [run.step().keys() for _ in range(3)] == [{"a", "b"}, {"a", "b"}, {"b"}]
    run.drain()
    trace = run.engine.trace("a")
    assert trace is not None and trace.waits == {}, "it had nothing to wait for"


def test_a_request_that_stops_is_in_one_more_step_whose_result_is_dropped() -> None:
    stop = ToyModel.continuation(range(1, 6), 2)[-1]
    run = Run()
    run.submit("a", 5, max_tokens=9, stop_token_ids=(stop,))
    ran = 0
    while run.engine.has_work:
        ran += "a" in run.step()
        if run.answer("a").reason is not None:
            assert run.scheduler.stats().kv_blocks_used == 0, "its memory is free at once"
    assert ran == 3 and len(run.answer("a").tokens) == 2
    assert run.answer("a").reason is FinishReason.STOP


@pytest.mark.parametrize("policy", ["bros", "fcfs"])
def test_a_finished_prefill_only_request_is_not_in_the_next_step(policy: str) -> None:
    run = Run(policy, max_batch_tokens=8)
    run.submit("a", [900, 901], max_tokens=9, slo=Slo(9.0, 9.0))
    run.submit("fill", 15, prefill_only=True, slo=Slo(9.0, 9.0))
    ran = []
    while run.answer("fill").reason is None:
        ran.append("fill" in run.step())
    assert ran == [True, True, False], "6 tokens, 6 that make 12, and one more call to be told"
    assert run.executor.most_in_flight == 2
    run.drain()
    trace = run.engine.trace("fill")
    assert trace is not None and trace.waits == {}, "it had nothing to wait for"
    run.submit("chat", 15)
    assert run.step()["chat"].start == 12


def test_a_prefill_only_request_aborted_while_it_runs_does_not_end_its_namesake() -> None:
    run = Run()
    run.submit("a", 16, prefill_only=True)
    run.step()
    assert run.abort("a")
    run.submit("a", [900, 901], max_tokens=3)
    run.drain()
    assert run.answer("a") == right_answer(run.asked[-1], ())


def test_whose_tokens_depend_on_those_before_waits_for_them_and_so_do_others_with_it() -> None:
    run = Run()
    run.submit("plain", 5, max_tokens=12)
    run.steps(2)
    run.submit("penalty", 6, max_tokens=3, frequency_penalty=1.0)
    overlapped = []
    while run.engine.has_work:
        chunks = run.step()
        overlapped.append(any(PENDING in c.token_ids for c in chunks.values()))
        assert chunks.get("penalty") is None or PENDING not in chunks["penalty"].token_ids
        assert run.engine.has_work or run.answer("plain").reason is not None
    # With the step that begins its prompt, and from the one after its last token on.
    assert overlapped[0] and not any(overlapped[1:4]) and all(overlapped[4:-2])
    for asked, answer in zip(run.asked, run.answers, strict=True):
        assert answer == right_answer(asked, ())


def test_a_prompt_that_is_not_done_does_not_hold_up_others_by_its_penalty() -> None:
    run = Run("fcfs", max_batch_tokens=8)
    run.submit("plain", 1, max_tokens=12)
    run.submit("penalty", 40, max_tokens=1, frequency_penalty=1.0)
    run.step()
    for _ in range(4):
        chunks = run.step()
        assert list(chunks["plain"].token_ids) == [PENDING]
        assert chunks["penalty"].sample is None
    run.drain()


# Requests that end while a step of theirs runs


def test_a_new_request_does_not_get_a_token_of_one_that_had_its_name() -> None:
    run = Run()
    run.submit("a", 5, max_tokens=20)
    run.steps(3)
    assert run.abort("a")
    run.submit("a", [900, 901, 902], max_tokens=5)
    run.drain()
    assert run.answers[1] == right_answer(run.asked[1], ())


def test_a_token_that_cannot_be_chosen_ends_its_request_and_its_next_step_counts_for_nothing() -> (
    None
):
    run = Run(fails={("a", 2)})
    run.submit("a", 5, max_tokens=20)
    run.submit("b", 5, max_tokens=20)
    run.drain()
    assert len(run.answer("a").tokens) == 2 and run.answer("a").reason is FinishReason.ERROR
    assert run.answer("b") == right_answer(run.asked[1], ())


def test_engine_waits_for_a_step_whose_requests_have_ended() -> None:
    run = Run()
    run.submit("a", 5, max_tokens=20)
    run.steps(2)
    run.abort("a")
    assert run.engine.has_work and not run.scheduler.has_work
    assert run.step() == {}
    assert not run.engine.has_work and run.executor.finished == len(run.plans)


# Memory


def test_a_request_preempted_while_its_step_runs_still_gets_its_token() -> None:
    """18 tokens of "be" and 24 of "rt" in 8 blocks of 4."""
    for host_blocks in (0, 64):
        run = Run(blocks=8, host_blocks=host_blocks, prefix_cache="off")
        run.submit("be", 18, BE, max_tokens=4)
        run.step()
        run.submit("rt", range(900, 924), max_tokens=2)
        chunks = run.step()
        assert chunks.keys() == {"rt"}
        assert len(run.answer("be").tokens) == 1, "of the step in which it ran"
        trace = run.engine.trace("be")
        assert trace is not None and trace.preemptions == 1
        run.drain()
        for asked, answer in zip(run.asked, run.answers, strict=True):
            assert answer == right_answer(asked, ())


def test_a_request_that_has_to_start_over_may_turn_out_to_be_done() -> None:
    """Its stop token comes out of the step in which it ran before it lost everything."""
    stop = ToyModel.continuation(range(1, 25), 1)[0]
    run = Run(blocks=8, prefix_cache="off")
    run.submit("be", 24, BE, max_tokens=4, stop_token_ids=(stop,))
    run.step()
    run.submit("rt", range(900, 929), max_tokens=2)
    assert run.step().keys() == {"rt"}
    assert run.answer("be") == Answer((stop,), FinishReason.STOP)
    run.drain()


def test_a_request_that_has_to_start_over_keeps_its_deadline_for_that() -> None:
    state = RequestState(
        request("a", 5, slo=Slo(1.0, 0.1)), service_class=RT, slo=Slo(1.0, 0.1), now=0.0,
        arrival_index=0, seed=0, max_length=99, eos_token_ids=frozenset(),
    )  # fmt: skip
    state.expect_output(0.5)
    assert state.deadline_s == pytest.approx(0.6)
    state.deadline_s = 7.0
    assert not state.running
    state.record.token(0.5, state.slo)
    assert state.add_output(8) is None
    assert (state.deadline_s, state.token_ids[-1]) == (7.0, 8)


# Prefixes


def test_requests_with_a_common_prefix_continue_as_early_as_without_overlap() -> None:
    """The second one waits for the first and is in the next step, with what that computes."""
    run = Run(max_batch_tokens=64)
    run.submit("first", 40, slo=Slo(2.0))
    run.submit("second", [*range(1, 41), 900, 901], slo=Slo(2.0))
    assert run.step().keys() == {"first"}
    second = run.step()["second"]
    assert (second.start, list(second.token_ids)) == (40, [900, 901])
    run.drain()


def test_what_is_found_later_is_what_was_computed() -> None:
    """Also where tokens of a block were not known when it was planned, and after a stop token."""
    turns = list(range(1, 11))
    stop = ToyModel.continuation(turns, 9)[-1]
    run = Run()
    run.submit("first", turns, max_tokens=20, stop_token_ids=(stop,))
    run.drain()
    history = [*turns, *run.answer("first").tokens]
    assert len(history) == 19
    # 18 tokens were computed before it stopped, and one for nothing.
    run.submit("second", [*history, 500, 501, 502])
    chunk = run.step()["second"]
    assert chunk.start == 16
    run.submit("other", [*history[:18], 7, 8, 9])
    assert run.step()["other"].start == 16
    run.drain()
    for asked, answer in zip(run.asked, run.answers, strict=True):
        assert answer == right_answer(asked, ())


def test_what_a_request_that_failed_has_computed_is_not_found() -> None:
    run = Run(fails={("fails", 0)})
    run.submit("fails", 40)
    run.drain()
    run.submit("again", 40)
    assert run.step()["again"].start == 0
    run.drain()


# Time


def mixed(run: Run) -> None:
    """Answers that are read, with best-effort work in what is left."""
    for number in range(4):
        first = 1 + 40 * number
        prompt = range(first, first + 30)
        run.submit(f"rt{number}", prompt, max_tokens=30, slo=Slo(1.0, 0.08))
    for number in range(8):
        first = 1 + 30 * number
        run.submit(f"be{number}", range(first, first + 100), BE, max_tokens=10)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_has_taken_what_the_device_took_for_it(overlap: bool) -> None:
    run = Run(overlap=overlap, max_batch_tokens=64)
    mixed(run)
    run.drain()
    stats = run.scheduler.stats()
    assert stats.step_s == pytest.approx(sum(map(plan_seconds, run.plans)))
    assert stats.step_s == pytest.approx(run.clock.now()), "the device was never idle"
    assert stats.step_error_s < 0.01 * stats.step_s
    assert stats.predicted_s == pytest.approx(stats.step_s, rel=0.01)


def test_the_time_between_steps_is_charged_to_no_step() -> None:
    run = Run()
    run.submit("a", 5)
    run.drain()
    busy_s = run.scheduler.stats().step_s
    run.clock.advance(100.0)
    run.submit("b", [900, 901])
    run.drain()
    assert run.scheduler.stats().step_s < busy_s + 1.0


def test_best_effort_work_fills_steps_as_it_does_without_overlap_and_no_token_is_late() -> None:
    """Deadlines are those of the tokens after the ones on their way, as of when the step begins."""
    plain, late = Run(overlap=False, max_batch_tokens=64), Run(max_batch_tokens=64)
    for run in (plain, late):
        mixed(run)
        run.drain()
        by_class = run.scheduler.stats().by_class
        assert by_class[RT].both_met == 4
    assert late.clock.now() < 1.1 * plain.clock.now()
    assert len(late.plans) < 1.1 * len(plain.plans)


def test_who_comes_waits_no_longer_for_two_steps_than_for_one_otherwise() -> None:
    """A step with best-effort work in it may take half of the 0.4 s to a first token."""
    for overlap in (False, True):
        run = Run(overlap=overlap, blocks=4000, max_batch_tokens=400)
        run.submit("be", 900, BE, max_tokens=1)
        run.submit("more", [7] * 900, BE, max_tokens=1)
        run.steps(4)
        longest_s = max(map(plan_seconds, run.plans))
        assert (1 + overlap) * longest_s == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_classes_take_turns_under_rr(overlap: bool) -> None:
    run = Run("rr", overlap=overlap)
    run.submit("rt", 3, RT, max_tokens=10)
    run.submit("be", 3, BE, max_tokens=10)
    run.drain()
    served = [plan.chunks[0].request_id for plan in run.plans]
    assert served == ["rt", "be"] * 10


def test_who_cannot_be_on_time_after_the_step_that_runs_is_relegated() -> None:
    """A prompt of 300 tokens takes 0.32 s, and is due after 0.4 s."""
    for overlap, used in ((False, RT), (True, BE)):
        run = Run("bros", overlap=overlap, overload="relegate", max_batch_tokens=400, blocks=2000)
        run.submit("be", [7] * 4000, BE, max_tokens=2)
        run.step()
        arrival = request("rt", 300, RT, arrival_s=run.clock.now(), max_tokens=2)
        assert run.engine.submit(arrival) == used


def test_who_starts_in_the_next_step_has_waited_for_the_running_one() -> None:
    waits = {}
    for overlap in (False, True):
        run = Run("bros", overlap=overlap, max_batch_tokens=8, prefix_cache="off")
        for index in range(4):
            run.submit(f"r{index}", range(100 * index + 1, 100 * index + 9), RT, max_tokens=1)
        run.drain()
        traces = [run.engine.trace(f"r{index}") for index in range(4)]
        waits[overlap] = [trace.waits.get("tokens", 0.0) for trace in traces if trace is not None]
    assert waits[True] == pytest.approx(waits[False])
    assert waits[True][0] == 0.0 and waits[True][3] == pytest.approx(3 * waits[True][1])


def test_an_overdue_step_is_expected_to_end_now_rather_than_in_the_past() -> None:
    """A prompt of 300 tokens takes 0.32 s, too long for a deadline 0.3 s from now."""
    run = Run("bros", overload="relegate", max_batch_tokens=400, blocks=2000)
    run.submit("be", [7] * 40, BE, max_tokens=20)
    run.step()
    run.clock.advance(10.0)
    slo = Slo(ttft_s=0.3, tpot_s=0.2)
    arrival = request("rt", 300, RT, slo=slo, arrival_s=run.clock.now(), max_tokens=2)
    assert run.engine.submit(arrival) is BE
