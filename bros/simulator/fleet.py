"""Simulates several engines behind a router on one virtual clock.

    arrival -> Fleet.route -> an engine's queue -> steps -> tokens -> Fleet.on_finished
                   ^                 | refused
                   +-----------------+

A request that a replica refuses goes to the others, as in the dispatcher of the router, until all
have refused it.

Events are processed by time, and at equal times by kind: ends of steps, reports, arrivals, routed
requests, starts of steps. The engine computes the outputs of a step when the step starts, but the
simulation uses them only when it ends, so nothing is known before it has happened. Running steps do
not yield to arrivals here, because later arrivals are not known when a step is run.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import heapq
import math
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError, OverloadedError, QueueFullError
from bros.core.interfaces import EngineReport
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Output,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    expanded,
)
from bros.engine.engine import Engine
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import ReplicaFacts, RouterSettings
from bros.scheduler.build import build_scheduler
from bros.simulator import REPLICA_ROWS, REPLICA_STEP_TOKENS
from bros.simulator.prefix_workloads import VOCAB, PrefixLoad, PrefixRequest, prompt_of
from bros.simulator.simulation import BLOCK_SIZE, TOKEN, Device, SimExecutor, engine_info
from bros.workload.arrivals import generator
from bros.workload.attainment import Attainment, Judged, Summary, Timeline, TimelineOutcome, judge

_PROGRESS_REQUESTS = 200
NO_SLO = Slo()


class _Event(enum.IntEnum):
    """Kinds of events, in their order at equal times."""

    STEP_ENDS = 0
    REPORT_ARRIVES = 1
    REQUEST_ARRIVES = 2
    ROUTED = 3
    STEP_BEGINS = 4


@dataclass(slots=True, eq=False)
class SimReplica:
    """An engine with its own executor and clock.

    clock: ahead of the simulation's time while a step runs.
    number: its number in the fleet.
    stepping: a step runs.
    step_queued: the start of the next step is in the event queue.
    waiting: requests that arrived since the last step started.
    outputs: of the running step.
    """

    engine: Engine
    executor: SimExecutor
    clock: ManualClock
    number: int = -1
    stepping: bool = False
    step_queued: bool = False
    waiting: deque[EngineRequest] = field(default_factory=deque)
    outputs: Sequence[Output] = ()


@dataclass(slots=True)
class FleetRecord:
    """The result of one request; times are seconds after the start.

    arrival_s: when it arrived; in a closed loop this depends on the simulation.
    replica, reason, matched: the router's decision (Decision).
    cached: prompt tokens that were cached when it started.
    tokens: output tokens.
    first_s, last_s: times of the first and the last token.
    refused_by: the replicas that refused it, on arrival or before its first token.
    refused: it has ended so.
    """

    request: PrefixRequest
    arrival_s: float
    prompt_tokens: int
    replica: int = -1
    reason: str = ""
    matched: int = 0
    cached: int = 0
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finish: FinishReason | None = None
    refused_by: tuple[int, ...] = ()
    refused: bool = False

    @property
    def finished(self) -> bool:
        """Whether it got all its tokens."""
        return self.finish is not None and self.finish.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """The result of one run.

    records: by request number; all requests have ended.
    busy_s, steps: per replica.
    """

    records: Sequence[FleetRecord]
    end_s: float
    busy_s: Sequence[float]
    steps: Sequence[int]
    preemptions: int

    def digest(self) -> str:
        """A hash of all records: equal only if two runs are bit-identical."""
        hashed = hashlib.sha256()
        for r in self.records:
            line = f"{r.replica} {r.reason} {r.matched} {r.cached} {r.tokens} {r.finish}\n"
            hashed.update(line.encode())
            times = (r.arrival_s, r.first_s or -1.0, r.last_s or -1.0)
            hashed.update(struct.pack("<3d", *times))
        return hashed.hexdigest()


class FleetSimulation:
    """One run, until every request has ended. `fleet` knows `replicas` by their numbers."""

    def __init__(
        self,
        replicas: Sequence[SimReplica],
        fleet: Fleet,
        requests: Sequence[PrefixRequest],
        *,
        seed: int,
        report_delay_s: float = 0.05,
        decision_s: float = 0.0,
        slo: Slo = NO_SLO,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """seed: of the prompts.
        report_delay_s: delay until the router receives a report.
        decision_s: time that the router takes per request; it routes them one after another.
        slo: of the requests.
        progress: called with the share of ended requests, now and then.
        """
        self._replicas = {replica.number: replica for replica in replicas}
        self._fleet = fleet
        self._requests = requests
        self._seed = seed
        self._report_delay_s = report_delay_s
        self._decision_s = decision_s
        self._slo = slo
        self._unrouted: deque[int] = deque()
        self._progress = progress
        self._records: dict[str, FleetRecord] = {}
        self._followers: dict[int, list[int]] = {}
        self._num_ended = 0
        self._sampling: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, _Event, int, object]] = []
        self._num_pushed = 0
        self._now = 0.0
        self._handlers: dict[_Event, Callable[..., None]] = {
            _Event.STEP_ENDS: self._end_step,
            _Event.REPORT_ARRIVES: self._apply_report,
            _Event.REQUEST_ARRIVES: self._on_arrival,
            _Event.ROUTED: self._enqueue,
            _Event.STEP_BEGINS: self._begin_step,
        }

    def run(self) -> FleetResult:
        """Run the simulation. Call it once."""
        for number, request in enumerate(self._requests):
            if request.follows is None:
                self._push_event(request.time_s, _Event.REQUEST_ARRIVES, number)
            else:
                self._followers.setdefault(request.follows, []).append(number)
        while self._events and self._num_ended < len(self._requests):
            self._now, kind, _, payload = heapq.heappop(self._events)
            self._handlers[kind](payload)
        replicas = self._replicas.values()
        stats = [replica.engine.stats() for replica in replicas]
        return FleetResult(
            records=[self._records[request_id(n)] for n in range(len(self._requests))],
            end_s=self._now,
            busy_s=[replica.executor.busy_s for replica in replicas],
            steps=[replica.executor.steps for replica in replicas],
            preemptions=sum(c.preemptions for each in stats for c in each.by_class.values()),
        )

    def _push_event(self, time_s: float, kind: _Event, payload: object) -> None:
        """Add an event; at equal time and kind, events keep the order of these calls."""
        heapq.heappush(self._events, (time_s, kind, self._num_pushed, payload))
        self._num_pushed += 1

    def _on_arrival(self, number: int) -> None:
        """A request arrives; it waits until the router has routed the ones before it."""
        request = self._requests[number]
        record = FleetRecord(request, self._now, request.prompt_tokens)
        self._records[request_id(number)] = record
        self._route_later(number)

    def _route_later(self, number: int) -> None:
        """Route a request as soon as the ones before it are routed."""
        self._unrouted.append(number)
        if len(self._unrouted) == 1:
            self._route_next()

    def _route_next(self) -> None:
        """Route the first waiting request by the present state."""
        request = self._engine_request(self._unrouted[0])
        record = self._records[request.request_id]
        (decision,) = self._fleet.route([request], self._now, frozenset(record.refused_by))
        record.replica, record.reason = decision.replica, decision.reason
        record.matched = decision.matched
        if self._decision_s:
            self._push_event(self._now + self._decision_s, _Event.ROUTED, request)
        else:
            self._enqueue(request)

    def _enqueue(self, request: EngineRequest) -> None:
        """Hand a routed request to its replica, and route the next one."""
        self._unrouted.popleft()
        replica = self._replicas[self._records[request.request_id].replica]
        replica.waiting.append(request)
        self._wake(replica)
        if self._unrouted:
            self._route_next()

    def _engine_request(self, number: int) -> EngineRequest:
        request = self._requests[number]
        sampling = self._sampling.get(request.output_tokens)
        if sampling is None:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
            )
            self._sampling[request.output_tokens] = sampling
        return EngineRequest(
            request_id=request_id(number),
            prompt_token_ids=prompt_of(request, self._seed),
            sampling=sampling,
            service_class=request.service_class,
            slo=self._slo,
            arrival_s=self._records[request_id(number)].arrival_s,
        )

    def _wake(self, replica: SimReplica) -> None:
        if not replica.stepping and not replica.step_queued:
            replica.step_queued = True
            self._push_event(self._now, _Event.STEP_BEGINS, replica)

    def _begin_step(self, replica: SimReplica) -> None:
        replica.step_queued = False
        replica.clock.advance(max(0.0, self._now - replica.clock.now()))
        while replica.waiting:
            self._submit(replica, replica.waiting.popleft())
        if replica.engine.has_work:
            replica.outputs = replica.engine.step()
            replica.stepping = True
            self._push_event(replica.clock.now(), _Event.STEP_ENDS, replica)

    def _submit(self, replica: SimReplica, request: EngineRequest) -> None:
        try:
            replica.engine.submit(request)
        except (QueueFullError, OverloadedError):
            self._on_refused(request.request_id)

    def _on_refused(self, request_id: str) -> None:
        """Its replica has refused a request: it goes to another one, or ends."""
        record = self._records[request_id]
        record.refused_by = (*record.refused_by, record.replica)
        if len(record.refused_by) < len(self._replicas):
            self._fleet.on_finished(request_id, (), self._now, cached=False)
            self._route_later(int(request_id))
        else:
            record.refused = True
            self._on_ended(request_id, cached=False)

    def _end_step(self, replica: SimReplica) -> None:
        replica.stepping = False
        for output in map(expanded, replica.outputs):
            self._record_output(output)
        replica.outputs = ()
        idle = not replica.engine.has_work
        report = replica.engine.due_report()
        if report is not None:
            payload = (replica.number, report)
            self._push_event(self._now + self._report_delay_s, _Event.REPORT_ARRIVES, payload)
        if replica.waiting or not idle:
            self._wake(replica)

    def _record_output(self, output: RequestOutput) -> None:
        record = self._records[output.request_id]
        record.tokens += len(output.token_ids)
        if output.token_ids:
            record.last_s = self._now
            if record.first_s is None:
                record.first_s, record.cached = self._now, output.cached_tokens
                self._fleet.on_first_token(output.request_id, self._now)
        reason = output.finish_reason
        if reason is FinishReason.ERROR and output.retry_after_s is not None and not record.tokens:
            self._on_refused(output.request_id)
        elif reason is not None:
            record.finish = reason
            self._on_ended(output.request_id, cached=record.finished)

    def _on_ended(self, request_id: str, *, cached: bool) -> None:
        """A request has ended; the ones that follow it arrive."""
        output_ids = [TOKEN] * self._records[request_id].tokens
        self._fleet.on_finished(request_id, output_ids, self._now, cached=cached)
        number = int(request_id)
        self._num_ended += 1
        for follower in self._followers.pop(number, ()):
            time_s = max(self._now, self._requests[follower].time_s)
            self._push_event(time_s, _Event.REQUEST_ARRIVES, follower)
        if self._progress is not None and self._num_ended % _PROGRESS_REQUESTS == 0:
            self._progress(self._num_ended / len(self._requests))

    def _apply_report(self, payload: tuple[int, EngineReport]) -> None:
        number, report = payload
        self._fleet.apply_report(number, report, self._now)


def request_id(number: int) -> str:
    """The id of the request with this number."""
    return str(number)


# ---- Metrics of a run on several replicas.
#
# latency    arrival to last token         tpot       (last - first token) / (tokens - 1)
# ttft       arrival to first token        balance    busy time of the busiest replica / mean


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetClassReport:
    """Metrics of one service class.

    both_met: requests that met both objectives; None for a class without objectives.
    """

    requests: int
    latency_s: Summary
    ttft_s: Summary
    tpot_s: Summary
    both_met: Attainment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """Metrics of one run. Latencies and cache hits are those of finished requests.

    end_s: when the last request ended.
    hits: share of prompt tokens that were cached when their request started.
    believed: the share that the router believed to be cached when it routed them.
    busy: share of the time in which a step ran, mean of all replicas.
    reasons: reason of a decision -> requests.
    """

    requests: int
    finished: int
    end_s: float
    requests_per_s: float
    latency_s: Summary
    ttft_s: Summary
    tpot_s: Summary
    hits: float
    believed: float
    busy: float
    balance: float
    steps: int
    preemptions: int
    reasons: Mapping[str, int]
    by_class: Mapping[ServiceClass, FleetClassReport]
    digest: str


def fleet_report(result: FleetResult, slo: Slo) -> FleetReport:
    """slo: objectives of real-time requests."""
    done = [record for record in result.records if record.finished]
    judged = [_judged(record, slo) for record in done]
    prompt_tokens = sum(record.prompt_tokens for record in done) or 1
    mean_busy_s = math.fsum(result.busy_s) / len(result.busy_s)
    return FleetReport(
        requests=len(result.records),
        finished=len(done),
        end_s=result.end_s,
        requests_per_s=len(done) / result.end_s if result.end_s else 0.0,
        latency_s=Summary.of([_latency_s(record) for record in done]),
        ttft_s=Summary.of([j.ttft_s for j in judged if j.ttft_s is not None]),
        tpot_s=Summary.of([j.tpot_s for j in judged if j.tpot_s is not None]),
        hits=sum(record.cached for record in done) / prompt_tokens,
        believed=sum(record.matched for record in done) / prompt_tokens,
        busy=mean_busy_s / result.end_s if result.end_s else 0.0,
        balance=max(result.busy_s) / mean_busy_s if mean_busy_s else 1.0,
        steps=sum(result.steps),
        preemptions=result.preemptions,
        reasons=dict(sorted(Counter(record.reason for record in result.records).items())),
        by_class={
            service_class: _class_report(
                [r for r in result.records if r.request.service_class is service_class],
                slo if service_class is ServiceClass.RT else None,
            )
            for service_class in ServiceClass
        },
        digest=result.digest(),
    )


def _class_report(records: Sequence[FleetRecord], slo: Slo | None) -> FleetClassReport:
    done = [record for record in records if record.finished]
    judged = [_judged(record, slo or Slo()) for record in records]
    return FleetClassReport(
        requests=len(records),
        latency_s=Summary.of([_latency_s(record) for record in done]),
        ttft_s=Summary.of([j.ttft_s for j in judged if j.ttft_s is not None]),
        tpot_s=Summary.of([j.tpot_s for j in judged if j.tpot_s is not None]),
        both_met=None if slo is None else Attainment.of([j.both_met for j in judged]),
    )


def _judged(record: FleetRecord, slo: Slo) -> Judged:
    """The simulation runs until every request has ended, so one that has not finished was lost."""
    times_s: tuple[float, ...] = ()
    if record.finished:
        assert record.first_s is not None and record.last_s is not None, "the request has tokens"
        times_s = record.first_s, record.last_s
    seen = Timeline(
        start_s=record.arrival_s,
        times_s=times_s,
        tokens=record.tokens,
        outcome=TimelineOutcome.COMPLETED if record.finished else TimelineOutcome.LOST,
    )
    return judge(seen, slo, math.inf)


def _latency_s(record: FleetRecord) -> float:
    assert record.last_s is not None, "the request has finished"
    return record.last_s - record.arrival_s


# ---- Builds a simulation from a scenario.


_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetScenario:
    """Everything that determines a run: runs of equal scenarios are bit-identical.

    report_delay_s, decision_s: see FleetSimulation.
    classes: the load has best-effort requests, and requests have objectives.
    """

    config: EngineConfig
    device: Device
    replicas: int
    router: str
    load: PrefixLoad
    seed: int
    settings: RouterSettings = field(default_factory=RouterSettings)
    report_delay_s: float = 0.05
    decision_s: float = 0.0
    classes: bool = False


def fleet_config(engine: EngineConfig) -> EngineConfig:
    """The options of a replica. Defaults are the paper's: its step bounds, and no host KV. The
    queue is unlimited, as every request has to be served."""
    return dataclasses.replace(
        engine,
        max_num_seqs=engine.max_num_seqs or REPLICA_ROWS,
        max_batch_tokens=engine.max_batch_tokens or REPLICA_STEP_TOKENS,
        host_kv_blocks=engine.host_kv_blocks or 0,
        max_queue=_UNLIMITED,
    )


def run_fleet(
    scenario: FleetScenario, progress: Callable[[float], None] | None = None
) -> FleetReport:
    """Simulate one scenario. Raises ConfigError if it cannot be run."""
    result = build_fleet_simulation(scenario, progress=progress).run()
    return fleet_report(result, scenario.config.default_slo)


def build_fleet_simulation(
    scenario: FleetScenario, *, progress: Callable[[float], None] | None = None
) -> FleetSimulation:
    """Build engines, clocks, router and workload. Raises ConfigError if it cannot be run."""
    check_fleet_scenario(scenario)
    requests = _servable(scenario)
    fleet = make_fleet(
        scenario.router,
        scenario.settings,
        block_size=BLOCK_SIZE,
        oracle=oracle_of(requests, scenario.seed),
    )
    bounds = scenario.config.step_bounds(scenario.device.name)
    yields = engine_info(scenario.config, scenario.device).yields
    facts = ReplicaFacts(
        capacity_tokens=scenario.device.kv_blocks * BLOCK_SIZE,
        prices=scenario.device.steps.prices(bounds.tokens),
        yields=yields,
        ttft_s=scenario.config.default_slo.ttft_s if yields else None,
    )
    replicas = [_replica(scenario) for _ in range(scenario.replicas)]
    for replica in replicas:
        replica.number = fleet.add(facts, 0.0)
    return FleetSimulation(
        replicas,
        fleet,
        requests,
        seed=scenario.seed,
        report_delay_s=scenario.report_delay_s,
        decision_s=scenario.decision_s,
        slo=scenario.config.default_slo if scenario.classes else NO_SLO,
        progress=progress,
    )


def check_fleet_scenario(scenario: FleetScenario) -> None:
    """Raise ConfigError if options contradict each other."""
    info = engine_info(scenario.config, scenario.device)
    build_scheduler(scenario.config, info, scenario.device.steps)
    if scenario.config.prefix_cache == "off":
        raise ConfigError("--prefix-cache: off leaves a router nothing to route by")


def oracle_of(requests: Sequence[PrefixRequest], seed: int) -> Callable[[EngineRequest], int]:
    """Request -> number of its part: the index of its family in a shuffled list of families."""
    families = sorted({request.family for request in requests})
    generator(seed, "oracle").shuffle(families)
    parts = {family: part for part, family in enumerate(families)}
    return lambda request: parts[requests[int(request.request_id)].family]


def _replica(scenario: FleetScenario) -> SimReplica:
    info = dataclasses.replace(engine_info(scenario.config, scenario.device), vocab_size=VOCAB)
    clock = ManualClock()
    executor = SimExecutor(scenario.device.steps, clock)
    scheduler = build_scheduler(scenario.config, info, scenario.device.steps)
    engine = Engine(scheduler, executor, clock, info)
    engine.subscribe()
    return SimReplica(engine, executor, clock)


def _servable(scenario: FleetScenario) -> Sequence[PrefixRequest]:
    """Raises ConfigError if a request is too long for a replica."""
    requests = scenario.load.requests(scenario.seed)
    limit = engine_info(scenario.config, scenario.device).max_model_len
    longest = max((r.prompt_tokens + r.output_tokens for r in requests), default=0)
    if longest > limit:
        raise ConfigError(
            f"--workload: it has requests of {longest} tokens, the longest that can be served is "
            f"{limit}; see --kv-blocks and --max-model-len"
        )
    return requests
