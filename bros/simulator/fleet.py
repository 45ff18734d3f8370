"""Several engines on one virtual clock, and a router before them.

    a request comes -> Fleet.route -> an engine's queue -> steps -> its tokens -> Fleet is told

Events happen in the order of their times, and of those at one time, first what ended, then what is
told, then what comes, then the steps that begin. So nothing is known before it has happened:
the outputs of a step wait for its end, although the engine has computed them at its beginning.
Steps are not aborted for new requests here: which ones arrive is not known yet when a step is run.
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
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
)
from bros.engine.engine import Engine
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import ReplicaFacts, RouterSettings
from bros.scheduler.build import build_scheduler
from bros.simulator import REPLICA_ROWS, REPLICA_STEP_TOKENS
from bros.simulator.prefix_workloads import VOCAB, PrefixLoad, PrefixRequest, prompt_of
from bros.simulator.simulation import BLOCK_SIZE, TOKEN, Device, SimExecutor, engine_info, slo_of
from bros.workload.arrivals import generator
from bros.workload.attainment import Attainment, Summary

_PROGRESS_REQUESTS = 200
NO_SLO = Slo()


class _Event(enum.IntEnum):
    """What happens first at one time."""

    STEP_ENDS = 0
    TOLD = 1
    COMES = 2
    DECIDED = 3
    STEP_BEGINS = 4


@dataclass(slots=True, eq=False)
class SimReplica:
    """An engine with an executor and a clock of its own.

    number: the router's.

    clock: ahead of the simulation's while a step runs.
    waiting: come during that step.
    due: the next step is about to begin.
    """

    engine: Engine
    executor: SimExecutor
    clock: ManualClock
    number: int = -1
    stepping: bool = False
    due: bool = False
    waiting: deque[EngineRequest] = field(default_factory=deque)
    outputs: Sequence[RequestOutput] = ()


@dataclass(slots=True)
class FleetRecord:
    """What became of one request; times in seconds after the start.

    arrival_s: when it came, which in a closed loop is found out on the way.
    cached: tokens of its prompt that were there when it began.
    matched: as many as the router thought.
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
    refused: bool = False

    @property
    def finished(self) -> bool:
        """It got all its tokens."""
        return self.finish is not None and self.finish.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """records by number of the request; all of them have ended.

    busy_s, steps: by replica.
    """

    records: Sequence[FleetRecord]
    end_s: float
    busy_s: Sequence[float]
    steps: Sequence[int]
    preemptions: int

    def digest(self) -> str:
        """A hash of every time and place: equal only if two runs were the same to the bit."""
        hashed = hashlib.sha256()
        for r in self.records:
            what = f"{r.replica} {r.reason} {r.matched} {r.cached} {r.tokens} {r.finish}\n"
            hashed.update(what.encode())
            times = (r.arrival_s, r.first_s or -1.0, r.last_s or -1.0)
            hashed.update(struct.pack("<3d", *times))
        return hashed.hexdigest()


class FleetSimulation:
    """One run, until every request has ended. `replicas` are known to `fleet` by their numbers."""

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
        """seed: of the prompts. report_delay_s: after so long the router hears what a replica says.
        decision_s: what the router takes for one request; it decides one after the other. slo: of
        the requests.
        progress: told the share that is done, now and then.
        """
        self._replicas = {replica.number: replica for replica in replicas}
        self._fleet = fleet
        self._requests = requests
        self._seed = seed
        self._report_delay_s = report_delay_s
        self._decision_s = decision_s
        self._slo = slo
        self._undecided: deque[int] = deque()
        self._progress = progress
        self._records: dict[str, FleetRecord] = {}
        self._followers: dict[int, list[int]] = {}
        self._num_ended = 0
        self._sampling: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, _Event, int, object]] = []
        self._happened = 0
        self._now = 0.0
        self._handlers: dict[_Event, Callable[..., None]] = {
            _Event.STEP_ENDS: self._end_step,
            _Event.TOLD: self._tell,
            _Event.COMES: self._come,
            _Event.DECIDED: self._deliver,
            _Event.STEP_BEGINS: self._begin_step,
        }

    def run(self) -> FleetResult:
        """Call it once."""
        for number, request in enumerate(self._requests):
            if request.follows is None:
                self._expect(request.time_s, _Event.COMES, number)
            else:
                self._followers.setdefault(request.follows, []).append(number)
        while self._events and self._num_ended < len(self._requests):
            self._now, kind, _, what = heapq.heappop(self._events)
            self._handlers[kind](what)
        replicas = self._replicas.values()
        stats = [replica.engine.stats() for replica in replicas]
        return FleetResult(
            records=[self._records[request_id(n)] for n in range(len(self._requests))],
            end_s=self._now,
            busy_s=[replica.executor.busy_s for replica in replicas],
            steps=[replica.executor.steps for replica in replicas],
            preemptions=sum(c.preemptions for each in stats for c in each.by_class.values()),
        )

    def _expect(self, time_s: float, kind: _Event, what: object) -> None:
        """In the order in which they were thought of, if time and kind are the same."""
        heapq.heappush(self._events, (time_s, kind, self._happened, what))
        self._happened += 1

    def _come(self, number: int) -> None:
        """A request has come; it waits until the router has decided for those before it."""
        request = self._requests[number]
        record = FleetRecord(request, self._now, request.prompt_tokens)
        self._records[request_id(number)] = record
        self._undecided.append(number)
        if len(self._undecided) == 1:
            self._decide()

    def _decide(self) -> None:
        """The first one is routed, with what is known now."""
        request = self._engine_request(self._undecided[0])
        (decision,) = self._fleet.route([request], self._now)
        record = self._records[request.request_id]
        record.replica, record.reason = decision.replica, decision.reason
        record.matched = decision.matched
        if self._decision_s:
            self._expect(self._now + self._decision_s, _Event.DECIDED, request)
        else:
            self._deliver(request)

    def _deliver(self, request: EngineRequest) -> None:
        """It has come to its replica."""
        self._undecided.popleft()
        replica = self._replicas[self._records[request.request_id].replica]
        replica.waiting.append(request)
        self._wake(replica)
        if self._undecided:
            self._decide()

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
        if not replica.stepping and not replica.due:
            replica.due = True
            self._expect(self._now, _Event.STEP_BEGINS, replica)

    def _begin_step(self, replica: SimReplica) -> None:
        replica.due = False
        replica.clock.advance(max(0.0, self._now - replica.clock.now()))
        while replica.waiting:
            self._submit(replica, replica.waiting.popleft())
        if replica.engine.has_work:
            replica.outputs = replica.engine.step()
            replica.stepping = True
            self._expect(replica.clock.now(), _Event.STEP_ENDS, replica)

    def _submit(self, replica: SimReplica, request: EngineRequest) -> None:
        try:
            replica.engine.submit(request)
        except (QueueFullError, OverloadedError):
            self._records[request.request_id].refused = True
            self._gone(request.request_id, cached=False)

    def _end_step(self, replica: SimReplica) -> None:
        replica.stepping = False
        for output in replica.outputs:
            self._take(output)
        replica.outputs = ()
        idle = not replica.engine.has_work
        report = replica.engine.due_report()
        if report is not None:
            told = (replica.number, report)
            self._expect(self._now + self._report_delay_s, _Event.TOLD, told)
        if replica.waiting or not idle:
            self._wake(replica)

    def _take(self, output: RequestOutput) -> None:
        record = self._records[output.request_id]
        record.tokens += len(output.token_ids)
        if output.token_ids:
            record.last_s = self._now
            if record.first_s is None:
                record.first_s, record.cached = self._now, output.cached_tokens
                self._fleet.begun(output.request_id, output.cached_tokens, self._now)
        if output.finish_reason is not None:
            record.finish = output.finish_reason
            self._gone(output.request_id, cached=record.finished)

    def _gone(self, name: str, *, cached: bool) -> None:
        """It is over; who waited for its end comes."""
        answer = [TOKEN] * self._records[name].tokens
        self._fleet.ended(name, answer, self._now, cached=cached)
        number = int(name)
        self._num_ended += 1
        for follower in self._followers.pop(number, ()):
            time_s = max(self._now, self._requests[follower].time_s)
            self._expect(time_s, _Event.COMES, follower)
        if self._progress is not None and self._num_ended % _PROGRESS_REQUESTS == 0:
            self._progress(self._num_ended / len(self._requests))

    def _tell(self, told: tuple[int, EngineReport]) -> None:
        number, report = told
        self._fleet.take(number, report, self._now)


def request_id(number: int) -> str:
    """The name of the request with this number."""
    return str(number)


# ---- What a run on several replicas was like, in numbers that can be compared.
#
# latency    arrival to last token         tpot    (last - first token) / (tokens - 1)
# ttft       arrival to first token        balance    time that the busiest replica's steps took
#                                                     / mean of all replicas


_TOLERANCE_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetClassReport:
    """One service class.

    both_met: requests whose first token and pace met the objectives; None for a class that has
        none.
    """

    requests: int
    latency_s: Summary
    ttft_s: Summary
    tpot_s: Summary
    both_met: Attainment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """One run; all figures are of requests that got all their tokens.

    hits: share of prompt tokens that were cached when their request began.
    believed: as many as the router thought when it decided.
    requests_per_s: from the start to the last end.
    busy: share of the time in which steps ran, mean of all replicas.
    reasons: of decisions.
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
    """slo: what real-time requests are held to."""
    done = [record for record in result.records if record.finished]
    prompt_tokens = sum(record.prompt_tokens for record in done) or 1
    mean_busy_s = math.fsum(result.busy_s) / len(result.busy_s)
    return FleetReport(
        requests=len(result.records),
        finished=len(done),
        end_s=result.end_s,
        requests_per_s=len(done) / result.end_s if result.end_s else 0.0,
        latency_s=Summary.of([_latency_s(record) for record in done]),
        ttft_s=Summary.of([_ttft_s(record) for record in done]),
        tpot_s=Summary.of([s for s in map(_tpot_s, done) if s is not None]),
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
    return FleetClassReport(
        requests=len(records),
        latency_s=Summary.of([_latency_s(record) for record in done]),
        ttft_s=Summary.of([_ttft_s(record) for record in done]),
        tpot_s=Summary.of([s for s in map(_tpot_s, done) if s is not None]),
        both_met=None if slo is None else Attainment.of([_met(record, slo) for record in records]),
    )


def _met(record: FleetRecord, slo: Slo) -> bool:
    if not record.finished:
        return False
    tpot_s = _tpot_s(record)
    return _within(_ttft_s(record), slo.ttft_s) and (tpot_s is None or _within(tpot_s, slo.tpot_s))


def _within(seconds: float, limit_s: float | None) -> bool:
    return limit_s is None or seconds <= limit_s + _TOLERANCE_S


def _latency_s(record: FleetRecord) -> float:
    assert record.last_s is not None, "it has finished"
    return record.last_s - record.arrival_s


def _ttft_s(record: FleetRecord) -> float:
    assert record.first_s is not None, "it has finished"
    return record.first_s - record.arrival_s


def _tpot_s(record: FleetRecord) -> float | None:
    if record.tokens < 2:
        return None
    assert record.last_s is not None and record.first_s is not None, "it has tokens"
    return (record.last_s - record.first_s) / (record.tokens - 1)


# ---- Everything that determines a run on several replicas, and how it is put together from that.


_MANY = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetScenario:
    """One run. Two runs of equal scenarios give the same records to the bit.

    report_delay_s, decision_s: see FleetSimulation.
    classes: there are best-effort requests, and real-time ones bring their objectives.
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
    """The options, with what the paper's engines had where nothing is said: their steps, and no
    copies of KV on the host. No limit to the queue: every request is to be served."""
    return dataclasses.replace(
        engine,
        max_num_seqs=engine.max_num_seqs or REPLICA_ROWS,
        max_batch_tokens=engine.max_batch_tokens or REPLICA_STEP_TOKENS,
        host_kv_blocks=engine.host_kv_blocks or 0,
        max_queue=_MANY,
    )


def run_fleet(
    scenario: FleetScenario, progress: Callable[[float], None] | None = None
) -> FleetReport:
    """Simulate one scenario. Raises ConfigError if it cannot be run."""
    result = build_fleet_simulation(scenario, progress=progress).run()
    return fleet_report(result, slo_of(scenario.config))


def build_fleet_simulation(
    scenario: FleetScenario, *, progress: Callable[[float], None] | None = None
) -> FleetSimulation:
    """Engines, their clocks, router and workload. Raises ConfigError if it cannot be run."""
    check_fleet_scenario(scenario)
    requests = _servable(scenario)
    fleet = make_fleet(
        scenario.router,
        scenario.settings,
        block_size=BLOCK_SIZE,
        oracle=oracle_of(requests, scenario.seed),
    )
    bounds = scenario.config.step_bounds(scenario.device.name)
    yields = scenario.config.policy == "bros"
    facts = ReplicaFacts(
        capacity_tokens=scenario.device.kv_blocks * BLOCK_SIZE,
        prices=scenario.device.steps.prices(bounds.tokens),
        yields=yields,
        ttft_s=slo_of(scenario.config).ttft_s if yields else None,
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
        slo=slo_of(scenario.config) if scenario.classes else NO_SLO,
        progress=progress,
    )


def check_fleet_scenario(scenario: FleetScenario) -> None:
    """Raise ConfigError if options do not go together."""
    info = engine_info(scenario.config, scenario.device)
    build_scheduler(scenario.config, info, scenario.device.steps)
    if scenario.config.prefix_cache == "off":
        raise ConfigError("--prefix-cache: off leaves a router nothing to route by")


def oracle_of(requests: Sequence[PrefixRequest], seed: int) -> Callable[[EngineRequest], int]:
    """The part of each request: families in a drawn order, dealt out like cards."""
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
