"""Copies that take any time they like: nothing is read before it is there, nor overwritten before.

The real scheduler plans for a device whose copies and kernels are delayed at random
(support/device_model.py). With all of its ordering rules kept every read finds what it would find
if everything happened one after the other; with any of them left out there is a load with which
one does not. That the plans are right when everything happens one after the other, a toy model
checks along the way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, find, given, settings

from bros.core.config import KV_FIND, KV_LAYOUTS, POLICIES, PREFIX_CACHE
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, RequestOutput, ServiceClass, Slo, expanded
from bros.scheduler.scheduler import Scheduler
from support.device_model import Device, Hazard, Rule
from support.scheduling import make_scheduler, request
from support.tier import examples
from support.toy_model import ToyModel

BLOCK_SIZE = 4
STEP_S = 0.02


@dataclass(frozen=True)
class Arrival:
    """family: those of one begin alike. steps: until the next one arrives. stays: is not
    withdrawn when that does."""

    length: int
    num_tokens: int
    service_class: ServiceClass
    family: int
    steps: int
    stays: bool


@dataclass(frozen=True)
class Load:
    """blocks: of the device. lead: steps planned ahead of it. seats: most requests that run.
    tpot_s: what real-time requests are held to. aborting: how often a step is aborted, of those
    that may be."""

    blocks: int
    host_blocks: int
    policy: str
    kv_layout: str
    kv_find: str
    prefix_cache: str
    lead: int
    seats: int
    tpot_s: float
    aborting: float
    arrivals: tuple[Arrival, ...]
    seed: int


def loads() -> st.SearchStrategy[Load]:
    """Requests that together want a few times the memory there is, and hold it for long."""
    arrivals = st.builds(
        Arrival,
        length=st.integers(1, 16),
        num_tokens=st.integers(1, 30),
        service_class=st.sampled_from(list(ServiceClass)),
        family=st.integers(0, 2),
        steps=st.integers(0, 4),
        stays=st.sampled_from([True, True, True, False]),
    )
    return st.builds(
        Load,
        blocks=st.integers(12, 14),
        host_blocks=st.sampled_from([0, 2, 4, 8, 64]),
        policy=st.sampled_from(POLICIES),
        kv_layout=st.sampled_from(KV_LAYOUTS),
        kv_find=st.sampled_from(KV_FIND),
        prefix_cache=st.sampled_from(PREFIX_CACHE),
        lead=st.integers(0, 3),
        seats=st.sampled_from([3, 8]),
        tpot_s=st.sampled_from([0.03, 0.2]),
        aborting=st.sampled_from([0.0, 0.0, 0.3]),
        arrivals=st.lists(arrivals, min_size=4, max_size=16).map(tuple),
        seed=st.integers(0, 999),
    )


class Served:
    """A load, a scheduler for it, and what comes of it.

    The toy model says at once what each step produces, so that the scheduler may be ahead of the
    device.
    """

    def __init__(self, load: Load, device: Device) -> None:
        self.load = load
        self.device = device
        self.model = ToyModel(BLOCK_SIZE)
        self.rng = random.Random(load.seed)
        self.now = 0.0
        self.asked: dict[str, EngineRequest] = {}
        self.produced: dict[str, list[int]] = {}
        self.scheduler: Scheduler = make_scheduler(
            load.policy,
            blocks=load.blocks,
            block_size=BLOCK_SIZE,
            host_blocks=load.host_blocks,
            kv_layout=load.kv_layout,
            kv_find=load.kv_find,
            prefix_cache=load.prefix_cache,
            rt_wait=1.0,
            max_num_seqs=load.seats,
        )

    def run(self) -> None:
        """Serve everything to the end."""
        scheduler = self.scheduler
        for number, arrival in enumerate(self.load.arrivals):
            name, first = f"r{number}", 1 + 100 * arrival.family
            prompt = range(first, first + arrival.length)
            self.asked[name] = request(
                name, prompt, arrival.service_class,
                max_tokens=arrival.num_tokens, arrival_s=self.now, ignore_eos=True,
                slo=Slo(tpot_s=self.load.tpot_s),
            )  # fmt: skip
            self.produced[name] = []
            scheduler.submit(self.asked[name], self.now)
            for _ in range(arrival.steps):
                self._step()
            if not arrival.stays and scheduler.abort(name, self.now) is not None:
                del self.asked[name]
        while scheduler.has_work:
            self._step()
            assert self.now < 10_000 * STEP_S, "no progress"
        scheduler.check_integrity()

    def _step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        self._take(self.scheduler.take_ended())
        if plan is None:
            return
        executed, result = self._execute(plan)
        self.device.submit(plan, executed)
        self.now += STEP_S
        if result is None:
            self.scheduler.abort_step(plan, self.now)
        else:
            self._take(map(expanded, self.scheduler.apply(result, self.now)))

    def _execute(self, plan: StepPlan) -> tuple[int, StepResult | None]:
        """How many chunks ran, and what came of them."""
        executed = 0

        def should_abort() -> bool:
            nonlocal executed
            executed += 1
            return self.rng.random() < self.load.aborting

        if not self.scheduler.may_abort:
            return len(plan.chunks), self.model.execute(plan)
        result = self.model.execute(plan, should_abort)
        return executed, result

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            self.produced[output.request_id] += output.token_ids


def hazards(load: Load, *without: Rule) -> list[Hazard]:
    device = Device(BLOCK_SIZE, random.Random(load.seed), lead=load.lead, without=without)
    Served(load, device).run()
    return device.hazards()


@given(load=loads())
@settings(max_examples=examples(20, long=400))
def test_nothing_is_read_too_early_or_too_late(load: Load) -> None:
    device = Device(BLOCK_SIZE, random.Random(load.seed), lead=load.lead)
    served = Served(load, device)
    served.run()
    assert device.hazards() == []
    for name, asked in served.asked.items():
        assert asked.sampling.max_tokens is not None
        expected = ToyModel.continuation(asked.prompt_token_ids, asked.sampling.max_tokens)
        assert served.produced[name] == expected
    assert served.scheduler.stats().kv_blocks_used == 0


@pytest.mark.parametrize(
    ("rule", "reader", "writer", "too_late"),
    [
        (Rule.STEPS_IN_ORDER, "chunk", "chunk", False),
        pytest.param(Rule.STEPS_IN_ORDER, "gather", "chunk", False, marks=pytest.mark.long),
        pytest.param(Rule.STEPS_IN_ORDER, "chunk", "scatter", True, marks=pytest.mark.long),
        (Rule.WRITES_AFTER_GATHER, "gather", "chunk", True),
        pytest.param(Rule.WRITES_AFTER_GATHER, "gather", "scatter", True, marks=pytest.mark.long),
        pytest.param(Rule.READS_AFTER_SCATTER, "chunk", "scatter", False, marks=pytest.mark.long),
        (Rule.OUT_AFTER_GATHER, "out", "gather", False),
        pytest.param(Rule.SCATTER_AFTER_IN, "scatter", "in", False, marks=pytest.mark.long),
        (Rule.IN_AFTER_OUT, "in", "out", False),
        pytest.param(Rule.OUT_AFTER_OUT, "in", "out", False, marks=pytest.mark.long),
        (Rule.BUFFER_OUT_AGAIN, "out", "gather", True),
        pytest.param(Rule.BUFFER_IN_AGAIN, "scatter", "in", True, marks=pytest.mark.long),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else str(value),
)
def test_each_rule_is_needed(rule: Rule, reader: str, writer: str, too_late: bool) -> None:
    """Without it there is a load with which this is read too early, or too late."""
    find(
        loads(),
        lambda load: any(
            hazard[:3] == (reader, writer, too_late) for hazard in hazards(load, rule)
        ),
        settings=settings(max_examples=3000, phases=[Phase.generate], database=None),
        random=random.Random(0),
    )
