"""Best-effort requests that become real-time on their way."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bros.core.clock import ManualClock
from bros.core.config import KV_LAYOUTS, POLICIES, PREFIX_CACHE
from bros.core.plan import StepPlan, StepResult
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Hints,
    RequestGroup,
    RequestOutput,
    ServiceClass,
    Slo,
    expanded,
)
from bros.engine.engine import Engine
from bros.scheduler.metrics import RequestRecord
from support.late_executor import LateExecutor
from support.scheduling import engine_info, make_scheduler, request
from support.toy_model import ToyModel
from support.virtual_time import BE, RT, VirtualRun, plan_seconds

SOON = Slo(ttft_s=0.4, tpot_s=0.1, gap_s=0.125)


def events(run: VirtualRun, name: str) -> list[str]:
    trace = run.scheduler.trace(name)
    assert trace is not None
    return [what for _, what in trace.events]


def queue_of(count: int, **options: object) -> VirtualRun:
    """Best-effort requests, two of which run at a time, for half a minute."""
    run = VirtualRun(max_num_seqs=2, **options)
    for number in range(count):
        run.submit(f"be{number}", 60, BE, salt=70 * number, max_tokens=100, ignore_eos=True)
    run.steps(5)
    return run


# Waiting requests


def test_who_waits_overtakes_all_best_effort_requests_and_is_on_time() -> None:
    run = queue_of(12)
    began = run.now
    run.scheduler.promote("be11", SOON, run.now)
    run.drain()
    assert list(run.first_run)[:3] == ["be0", "be1", "be11"]
    assert run.token_times["be11"][0] - began <= 0.4
    assert events(run, "be11")[:3] == ["queued as be", "promoted", "scheduled"]
    trace = run.scheduler.trace("be11")
    assert trace is not None
    assert (trace.requested_class, trace.service_class, trace.slo) == (BE, RT, SOON)


@pytest.mark.parametrize("policy", POLICIES)
def test_it_is_counted_as_what_it_is_now(policy: str) -> None:
    run = VirtualRun(policy, max_num_seqs=1)
    for name in ("first", "second"):
        run.submit(name, 30, BE, max_tokens=3, ignore_eos=True)
    run.step()
    run.now += 60.0
    run.scheduler.promote("second", Slo(9.0, 9.0), run.now)
    counted = run.scheduler.stats().by_class
    assert (counted[RT].waiting, counted[BE].waiting, counted[BE].running) == (1, 0, 1)
    assert (counted[RT].promoted, counted[BE].promoted) == (1, 0)
    run.drain()
    counted = run.scheduler.stats().by_class
    assert (counted[RT].finished, counted[BE].finished) == (1, 1)
    assert (counted[RT].output_tokens, counted[RT].prompt_tokens) == (3, 30)
    assert counted[RT].both_met == 1, "it is held to nothing before it was promoted"


def test_without_objectives_it_has_the_usual_ones() -> None:
    run = queue_of(3)
    run.scheduler.promote("be2", Slo(), run.now)
    trace = run.scheduler.trace("be2")
    assert trace is not None and trace.slo == Slo(0.4, 0.2, gap_s=pytest.approx(0.3))


@pytest.mark.parametrize(
    ("asked", "slo"),
    [
        (Slo(0.4, 0.1), Slo(0.4, 0.1, 6.0)),
        (Slo(0.4, 0.1, 50.0, 0.125), Slo(0.4, 0.1, 50.0, 0.125)),
        (Slo(1.0, 1.0, 50.0), Slo(0.5, 0.5, 50.0, 0.75)),  # 100 tokens within 50 s
    ],
)
def test_a_deadline_counts_from_the_promotion_and_an_older_one_still_holds(
    asked: Slo, slo: Slo
) -> None:
    run = VirtualRun(max_num_seqs=1)
    run.submit("runs", 10, BE, max_tokens=100, ignore_eos=True)
    whole = Slo(deadline_s=10.0)
    run.submit("waits", 10, BE, slo=whole, max_tokens=100, ignore_eos=True)
    run.now = 4.0
    run.scheduler.promote("waits", asked, run.now)
    trace = run.scheduler.trace("waits")
    assert trace is not None
    if asked.deadline_s is None:  # 6 s are left for a hundred tokens
        assert trace.slo.deadline_s == pytest.approx(6.0)
        assert trace.slo.ttft_s == pytest.approx(0.4 * 6.0 / 10.3)
        assert trace.slo.tpot_s == pytest.approx(0.1 * 6.0 / 10.3)
    else:
        assert trace.slo == slo


def test_a_deadline_that_pressed_it_as_best_effort_does_not_move_it_any_more() -> None:
    """It is late, and waits behind those that are not, as others do."""
    run = VirtualRun(max_num_seqs=1, max_batch_tokens=64)
    run.submit("first", 10, max_tokens=1)
    run.step()
    run.submit("late", 60, BE, slo=Slo(deadline_s=2.0), max_tokens=1)
    run.scheduler.promote("late", Slo(0.1, 0.1), run.now)
    run.now += 3.0
    run.submit("new", 50, slo=Slo(0.3, 0.1), salt=100, max_tokens=1)
    run.step()
    run.scheduler.check_integrity()
    assert list(run.first_run) == ["first", "new"]
    run.drain()


def test_who_waits_finds_what_is_cached_of_its_prompt() -> None:
    run = VirtualRun(max_num_seqs=1, prefix_cache="class-aware")
    run.submit("first", 40, BE, max_tokens=1)
    run.drain()
    run.submit("runs", 20, BE, salt=300, max_tokens=30)
    run.submit("waits", 50, BE, max_tokens=1)
    run.step()
    run.scheduler.promote("waits", SOON, run.now)
    run.scheduler.check_integrity()
    run.drain()
    cached = {output.request_id: output.cached_tokens for output in run.outputs}
    assert cached["waits"] == 40


def test_what_it_begins_with_is_not_expected_for_ever() -> None:
    """Idle blocks that best-effort requests wait for are kept longer; these have all gone."""
    cached = {}
    for promoted in (False, True):
        run = VirtualRun(blocks=24, prefix_cache="class-aware", max_num_seqs=1)
        run.submit("runs", 4, BE, salt=300, max_tokens=2, ignore_eos=True)
        for number in range(3):
            run.submit(f"waits{number}", 40, BE, salt=0)
            if promoted:
                run.scheduler.promote(f"waits{number}", SOON, run.now)
            run.abort(f"waits{number}")
        run.drain()
        for name, salt in (("old", 0), ("new", 100), ("large", 500), ("again", 100)):
            run.submit(name, 44, BE, salt=salt, max_tokens=1)
            run.drain()
        cached[promoted] = {out.request_id: out.cached_tokens for out in run.outputs}["again"]
    assert cached[True] == cached[False] > 0


def test_its_victims_are_counted_with_its_class() -> None:
    run = VirtualRun(blocks=24, prefix_cache="class-aware", max_num_seqs=1)
    run.submit("old", 70, BE, max_tokens=1)
    run.drain()
    run.submit("runs", 4, BE, salt=300, max_tokens=2, ignore_eos=True)
    run.submit("waits", 70, BE, salt=500, max_tokens=1)
    run.step()
    run.scheduler.promote("waits", SOON, run.now)
    run.drain()
    counted = run.scheduler.stats().by_class
    assert counted[RT].prefix_evicted > 0 == counted[BE].prefix_evicted


# Running requests


def test_a_running_request_keeps_its_pace_beside_any_other_work() -> None:
    """Real-time requests fill the batch; unless it is promoted, it hardly gets a row."""
    longest = {}
    for promoted in (False, True):
        run = VirtualRun(be_share=0.0, max_num_seqs=8, max_batch_tokens=64, rt_wait=0.1)
        run.submit("be", 40, BE, max_tokens=300, ignore_eos=True)
        run.steps(5)
        if promoted:
            run.scheduler.promote("be", Slo(tpot_s=0.2), run.now)
        begun = run.now
        for number in range(40):
            run.submit(f"rt{number}", 200, salt=number, max_tokens=2, slo=Slo(60.0, 0.2))
        run.steps(80)
        times = [begun, *(at for at in run.token_times["be"] if at > begun), run.now]
        longest[promoted] = max(b - a for a, b in zip(times, times[1:], strict=False))
    assert longest[True] <= 0.2 * 1.5 < 1.0 < longest[False]


def test_what_it_has_begun_need_not_begin_again() -> None:
    """Its next token is due after an interval, however long it would have for a first one."""
    run = VirtualRun(be_share=0.0, max_num_seqs=4)
    run.submit("be", 10, BE, max_tokens=300, ignore_eos=True)
    run.steps(3)
    for number in range(4):
        run.submit(f"rt{number}", 10, slo=Slo(1.0, 0.021), max_tokens=300, ignore_eos=True)
    run.steps(20)
    waits_s = run.now - run.token_times["be"][-1]
    assert waits_s > 0.3, "all rows are taken"
    count = len(run.token_times["be"])
    run.scheduler.promote("be", Slo(ttft_s=30.0, tpot_s=0.2), run.now)
    promoted_s = run.now
    while len(run.token_times["be"]) == count:
        run.step()
    assert run.now <= promoted_s + 0.2


@pytest.mark.parametrize("host_blocks", [0, 64])
def test_no_later_request_takes_its_memory(host_blocks: int) -> None:
    preempted = {}
    for promoted in (False, True):
        run = VirtualRun(blocks=24, host_blocks=host_blocks)
        run.submit("be", 40, BE, max_tokens=30, ignore_eos=True)
        run.steps(4)
        if promoted:
            run.scheduler.promote("be", Slo(9.0, 9.0), run.now)
        run.submit("rt", 60, salt=100, max_tokens=3)
        run.drain()
        trace = run.scheduler.trace("be")
        assert trace is not None and len(run.token_times["be"]) == 30
        preempted[promoted] = trace.preemptions
        run.scheduler.check_integrity()
    assert preempted[False] > 0 == preempted[True]


def test_of_its_tokens_those_since_then_are_held_to_the_pace() -> None:
    run = VirtualRun()
    run.submit("be", 10, BE, max_tokens=20, ignore_eos=True)
    run.steps(3)
    run.now += 100.0
    run.scheduler.promote("be", Slo(0.4, 0.05), run.now)
    run.drain()
    counted = run.scheduler.stats().by_class[RT]
    assert (counted.finished, counted.both_met, counted.tokens_on_time) == (1, 1, 17)
    assert counted.output_tokens == 17
    trace = run.scheduler.trace("be")
    assert trace is not None and trace.late_tokens == 0 and trace.tpot_s is not None
    assert trace.tpot_s > 5.0, "as it was, all in all"


times = st.integers(0, 64).map(lambda quarters: quarters / 4)  # exact in binary


@given(
    gaps=st.lists(times, min_size=1, max_size=8),
    at=st.integers(0, 7),
    wait=times,
    ttft=times,
    tpot=times,
)
def test_objectives_since_a_promotion_are_those_of_a_request_that_came_then(
    gaps: list[float], at: int, wait: float, ttft: float, tpot: float
) -> None:
    at = min(at, len(gaps) - 1)
    record, now, promoted_s = RequestRecord(1.0, Slo()), 1.0, 1.0
    slo, slack, came = Slo(ttft, tpot), [], []
    for number, gap in enumerate(gaps):
        if number == at:
            now = promoted_s = now + wait
            record.reset_objectives(now, slo)
        now += gap
        slack.append(record.token(now, slo if number >= at else Slo()))
        came.append(now)
    assert all(s == math.inf for s in slack[:at])
    first_due = promoted_s + (tpot if at else ttft)
    before = came[at:-1]
    due = [first_due if (at or ttft) and first_due > promoted_s else math.inf]
    due += [t + tpot if tpot else math.inf for t in before]
    assert slack[at:] == [d - t for d, t in zip(due, came[at:], strict=True)]
    ttft_met = at > 0 or came[0] - promoted_s <= ttft
    since = promoted_s if at else came[0]
    counted = len(gaps) - (at or 1)
    tpot_met = len(gaps) == 1 or came[-1] - since <= counted * tpot
    assert record.met(slo) == (ttft_met, tpot_met)


# Nothing to promote


@pytest.mark.parametrize("name", ["unknown", "rt", "gone"])
def test_looser_objectives_and_unknown_ids_are_ignored(name: str) -> None:
    run = VirtualRun()
    run.submit("gone", 5, BE, max_tokens=1)
    run.drain()
    run.submit("rt", 5, slo=Slo(0.3, 0.1, gap_s=0.125))
    before = run.scheduler.stats(), run.scheduler.trace(name)
    run.scheduler.promote(name, SOON, run.now)
    assert (run.scheduler.stats(), run.scheduler.trace(name)) == before


def test_a_second_promotion_only_makes_it_stricter() -> None:
    run = queue_of(3)
    for ttft_s in (0.4, 0.7, 0.1):
        run.scheduler.promote("be2", Slo(ttft_s, 0.1, gap_s=0.125), run.now)
        trace = run.scheduler.trace("be2")
        assert trace is not None and trace.slo.ttft_s == pytest.approx(min(ttft_s, 0.4))
    assert run.scheduler.stats().by_class[RT].promoted == 1


# Stricter objectives of real-time requests

times = st.sampled_from([0.1, 0.3, 0.5])
slos = st.builds(Slo, ttft_s=times, tpot_s=times, gap_s=times)


@given(own=slos, asked=slos, later_s=st.sampled_from([0.0, 0.05, 0.25]), tokens=st.integers(0, 3))
def test_each_objective_is_the_stricter_one(
    own: Slo, asked: Slo, later_s: float, tokens: int
) -> None:
    """The first token is due by both times; for later ones, the pace counts from now on."""
    run = VirtualRun()
    run.submit("rt", 5, slo=own, max_tokens=10, ignore_eos=True)
    while len(run.token_times["rt"]) < tokens:
        run.step()
    run.now += later_s
    waited_s = run.now if not tokens else 0.0
    run.scheduler.promote("rt", asked, run.now)
    run.scheduler.check_integrity()
    trace = run.scheduler.trace("rt")
    assert trace is not None
    assert own.ttft_s is not None and asked.ttft_s is not None
    ttft_s = own.ttft_s if tokens else min(own.ttft_s, waited_s + asked.ttft_s)
    assert trace.slo.ttft_s == pytest.approx(ttft_s)
    assert trace.slo.tpot_s == min(own.tpot_s or 0.0, asked.tpot_s or 0.0)
    assert trace.slo.gap_s == min(own.gap_s or 0.0, asked.gap_s or 0.0)
    run.drain()
    assert len(run.token_times["rt"]) == 10


def test_a_deadline_of_a_real_time_request_counts_from_when_it_was_asked_for() -> None:
    run = VirtualRun(max_num_seqs=1)
    run.submit("runs", 10, max_tokens=100, ignore_eos=True)
    run.submit("waits", 10, slo=Slo(0.4, 0.1, deadline_s=30.0), max_tokens=100, ignore_eos=True)
    for asked_s, expected_s in ((50.0, 30.0), (6.0, 8.0)):
        run.now += 1.0
        run.scheduler.promote("waits", Slo(0.4, 0.1, deadline_s=asked_s), run.now)
        trace = run.scheduler.trace("waits")
        assert trace is not None and trace.slo.deadline_s == pytest.approx(expected_s)
    assert trace.slo.tpot_s == pytest.approx(0.1 * 6.0 / 10.3), "100 tokens in 6 s"


def test_who_waits_is_served_in_time_by_stricter_objectives() -> None:
    run = VirtualRun(max_num_seqs=1, max_batch_tokens=64)
    run.submit("first", 10, max_tokens=1)
    run.step()
    for name in ("second", "third"):
        run.submit(name, 50, slo=Slo(2.0, 0.1), salt=ord(name[0]), max_tokens=20, ignore_eos=True)
    run.scheduler.promote("third", Slo(0.2, 0.1), run.now)
    run.scheduler.check_integrity()
    run.drain()
    assert list(run.first_run) == ["first", "third", "second"]


def test_being_late_stays_so_and_an_advance_is_kept() -> None:
    """Ten tokens of a stream came at 0.1 s each, where 0.2 s were asked for; now 0.05 s are."""
    record = RequestRecord(0.0, Slo(0.5, 0.2))
    for n in range(10):
        record.token(0.4 + 0.1 * n, Slo(0.5, 0.2))
    record.tighten_objectives(1.3, Slo(0.5, 0.2), Slo(0.5, 0.05))
    assert record.due_s == pytest.approx(1.35)
    assert record.pace_from_s == pytest.approx(1.3 + 0.9 - 9 * 0.05), "0.9 s ahead"
    late = RequestRecord(0.0, Slo(0.5, 0.2))
    late.tighten_objectives(0.6, Slo(0.5, 0.2), Slo(0.5, 0.05))
    assert late.due_s == 0.5


@pytest.mark.parametrize("service_class", [RT, BE])
@pytest.mark.parametrize("awaited", [False, True])
def test_the_first_token_of_a_member_is_waited_for_once_something_waits_for_it_alone(
    service_class: ServiceClass, awaited: bool
) -> None:
    """A long prompt of a member is cut; one that is waited for is not."""
    run = VirtualRun(max_batch_tokens=512)
    hints = Hints(program="p", group=RequestGroup("g"))
    run.submit("member", 400, service_class, hints=hints, slo=Slo(0.6, 9.0), max_tokens=1)
    run.scheduler.promote("member", Slo(0.6, 9.0), run.now, awaited)
    plan = run.scheduler.schedule(run.now)
    assert plan is not None
    (chunk,) = plan.chunks
    assert (len(chunk.token_ids) == 400) is awaited


# At any time


class SlowModel(ToyModel):
    """Half of a step's time passes before it can be aborted, and half after that."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(4)
        self._clock = clock

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        half_s = plan_seconds(plan) / 2
        self._clock.advance(half_s)
        result = super().execute(plan, should_abort)
        if result is not None:
            self._clock.advance(half_s)
        return result


class AnyTime(RuleBasedStateMachine):
    """Random submissions, promotions, aborts and steps: everybody gets the right answer."""

    @initialize(
        policy=st.sampled_from(POLICIES),
        overlap=st.booleans(),
        options=st.fixed_dictionaries(
            {
                "blocks": st.sampled_from([10, 14, 40]),
                "host_blocks": st.sampled_from([0, 64]),
                "max_num_seqs": st.integers(1, 5),
                "max_batch_tokens": st.sampled_from([3, 8, 32]),
                "kv_layout": st.sampled_from(KV_LAYOUTS),
                "prefix_cache": st.sampled_from(PREFIX_CACHE),
                "be_max_wait": st.sampled_from([0.05, 30.0]),
            }
        ),
    )
    def start(self, policy: str, overlap: bool, options: dict[str, object]) -> None:
        self.scheduler = make_scheduler(policy, depth=2 if overlap else 1, **options)  # type: ignore[arg-type]
        self.clock = ManualClock()
        model = SlowModel(self.clock)
        self.engine = Engine(
            self.scheduler,
            LateExecutor(ToyModel(4), self.clock, plan_seconds) if overlap else model,
            self.clock,
            engine_info(policy=policy),
            async_scheduling="on" if overlap else "off",
        )
        self.asked: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    @rule(
        length=st.integers(1, 24),
        num_tokens=st.integers(1, 12),
        service_class=st.sampled_from([BE, BE, RT]),
        family=st.integers(0, 1),
        slo=st.sampled_from([Slo(), Slo(0.05, 0.03), Slo(deadline_s=0.5)]),
        hints=st.builds(
            Hints,
            program=st.sampled_from(["", "a", "b"]),
            depth=st.integers(0, 2),
            group=st.none() | st.just(RequestGroup("g")),
        ),
        while_running=st.booleans(),
    )
    def submit(
        self, length: int, num_tokens: int, service_class: object, family: int, slo: Slo,
        hints: Hints, while_running: bool,
    ) -> None:  # fmt: skip
        name = f"r{len(self.asked)}"
        prompt = range(1 + 100 * family, 1 + 100 * family + length)
        asked = request(
            name, prompt, service_class, slo=slo, hints=hints, arrival_s=self.clock.now(),  # type: ignore[arg-type]
            max_tokens=num_tokens, ignore_eos=True,
        )  # fmt: skip
        if while_running:
            self._take(map(expanded, self.engine.step(lambda: [asked])))
        self.engine.submit(asked)
        self.asked[name], self.tokens[name] = asked, []

    def _open(self, data: st.DataObject) -> str:
        still = [name for name in self.asked if name not in self.reasons]
        return data.draw(st.sampled_from(still))

    @precondition(lambda self: len(self.reasons) < len(self.asked))
    @rule(
        data=st.data(),
        slo=st.sampled_from([Slo(), Slo(0.02, 0.02), Slo(deadline_s=0.3)]),
        awaited=st.booleans(),
    )
    def promote(self, data: st.DataObject, slo: Slo, awaited: bool) -> None:
        name = self._open(data)
        self.engine.promote(name, slo, awaited)
        trace = self.engine.trace(name)
        assert trace is not None and trace.service_class is RT
        assert trace.requested_class is self.asked[name].service_class

    @precondition(lambda self: len(self.reasons) < len(self.asked))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = self._open(data)
        output = self.engine.abort(name)
        assert output is not None
        self._take([output])

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.engine.has_work:
                self._take(map(expanded, self.engine.step()))

    @invariant()
    def holds_together(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        steps = 0
        while self.engine.has_work:
            self._take(map(expanded, self.engine.step()))
            self.scheduler.check_integrity()
            steps += 1
            assert steps < 5000, "no progress"
        stats = self.scheduler.stats()
        assert stats.kv_blocks_used == stats.host_kv_blocks_used == 0
        assert sum(each.output_tokens for each in stats.by_class.values()) == sum(
            map(len, self.tokens.values())
        )
        for name, asked in self.asked.items():
            longest = asked.sampling.max_tokens or 0
            right = ToyModel.continuation(asked.prompt_token_ids, longest)
            if self.reasons[name] is FinishReason.ABORT:
                right = right[: len(self.tokens[name])]
            assert self.tokens[name] == right

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.reasons, "an output after the last one"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason


TestAnyTime = AnyTime.TestCase


def test_promotion_sets_the_pace_by_the_number_of_remaining_tokens() -> None:
    """40 of 100 tokens remain, in 20 s."""
    run = VirtualRun()
    run.submit("be", 10, BE, max_tokens=100, ignore_eos=True)
    while len(run.token_times["be"]) < 60:
        run.step()
    run.scheduler.promote("be", Slo(1.0, 1.0, 20.0), run.now)
    trace = run.scheduler.trace("be")
    assert trace is not None and trace.slo == Slo(0.5, 0.5, 20.0, 0.75)
