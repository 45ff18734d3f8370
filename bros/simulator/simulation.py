"""Runs one engine through a workload on a virtual clock.

    submit arrived requests -> engine.step() advances the clock -> record the tokens -> ...

Without work the clock jumps to the next arrival. A step that starts before the end of the duration
is completed, so the run may last up to one step longer: busy + idle = end. Requests that are open
at the end stay in the records with the tokens they got.
"""

from __future__ import annotations

import dataclasses
import hashlib
import heapq
import math
import random
import struct
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.config_sources import near_matches
from bros.core.errors import ConfigError, OverloadedError, QueueFullError
from bros.core.files import expand_user
from bros.core.interfaces import EngineInfo, EngineStats
from bros.core.plan import Chunk, SampledToken, StepPlan, StepResult, SuspendedStep
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Output,
    SamplingParams,
    ServiceClass,
    Slo,
    expanded,
)
from bros.engine.engine import Engine
from bros.profiling.profiles import Profile, load_profile
from bros.scheduler.build import best_effort_yields, build_scheduler
from bros.scheduler.cost_model import CostModel, StepLoad
from bros.scheduler.scheduler import Scheduler
from bros.scheduler.suspended import share_done
from bros.workload.arrivals import (
    Arrival,
    BeLoad,
    RtLoad,
    Size,
    TenantLoad,
    generator,
    tenant_seed,
)

# ---- The simulated executor: it advances a virtual clock by the predicted time of each step.


SAFEPOINTS = 32
"""Layers of the simulated model: points of a step at which it may be suspended."""

TOKEN = 0
"""The token that simulated requests sample. It never stops them, as they ignore EOS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """How step times differ from the scheduler's cost model.

    noise: standard deviation of the logarithm of a factor with mean 1, drawn for each step.
    correlation: of the logarithms of two steps in sequence; 0.8 on cores that others use as well.
    slowdown: factor on every step time.
    """

    noise: float = 0.0
    correlation: float = 0.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.noise < math.inf or not 0.0 < self.slowdown < math.inf:
            raise ValueError(f"noise must not be negative and slowdown positive: {self}")
        if not 0.0 <= self.correlation < 1.0:
            raise ValueError(f"correlation must be at least 0 and below 1: {self}")


def load_of(plan: StepPlan) -> StepLoad:
    """The same as StepLoad.add for every chunk, inlined because it is the hot path."""
    tokens = rows = context = samples = 0
    pairs = 0.0
    continuing = plan.chunks[-1].kept is not None
    for chunk in plan.chunks:
        if continuing and chunk.kept is not None:
            continue
        n = len(chunk.token_ids)
        tokens += n
        if n == 1:
            rows += 1
            context += chunk.start + 1
        else:
            pairs += n * chunk.start + n * (n + 1) / 2
            samples += chunk.sample is not None
    load = StepLoad()
    load.tokens = tokens
    load.decode_rows = rows
    load.context = load.unique_context = context
    load.pairs = pairs
    load.samples = samples
    for chunk in plan.chunks if continuing else ():
        if chunk.kept is not None:
            done = share_done(chunk.kept.layer, SAFEPOINTS)
            load.add(len(chunk.token_ids), chunk.start, chunk.sample is not None, done=done)
    if plan.copies is not None:
        load.swap_tokens = len(plan.copies)
        load.swap_out_tokens = len(plan.copies.out_device)
    return load


class SimExecutor:
    """Advances `clock` by the time that `model` predicts for each plan. Implements
    core.interfaces.SuspendingExecutor.

    All layers of a step are predicted to take the same time.
    """

    num_layers = SAFEPOINTS

    def __init__(
        self,
        model: CostModel,
        clock: ManualClock,
        *,
        disturbance: Disturbance | None = None,
        rng: random.Random | None = None,
        observe: Callable[[StepPlan, float], None] | None = None,
        choose: Callable[[Chunk], int] = lambda chunk: TOKEN,
        load: Callable[[StepPlan], StepLoad] = load_of,
    ) -> None:
        """rng: for the noise, one draw per step.
        observe: called with each plan and the seconds it took, also if it was suspended.
        choose: the token that a chunk samples.
        load: the load of a plan, which the model turns into seconds.
        """
        disturbance = disturbance or Disturbance()
        if disturbance.noise and rng is None:
            raise ValueError("noise needs a random generator")
        self._model = model
        self._clock = clock
        self._noise = disturbance.noise
        self._correlation = disturbance.correlation
        self._deviation: float | None = None  # logarithm of the last factor
        self._slowdown = disturbance.slowdown
        self._rng = rng
        self._observe = observe
        self._choose = choose
        self._load = load
        self.steps = 0
        self.busy_s = 0.0

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep:
        """Advance the clock, and return a token for every chunk that samples.

        should_abort: called before each layer that is computed, at equal intervals.
        """
        seconds = self._model.seconds(self._load(plan)) * self._slowdown
        if seconds <= 0.0:
            raise ConfigError("--profile: its steps take no time, so the clock would never advance")
        if self._rng is not None and self._noise:
            seconds *= self._next_factor(self._rng)
        first = min([0 if c.kept is None else c.kept.layer for c in plan.chunks])
        points = SAFEPOINTS - first if should_abort is not None else 1
        for point in range(points):
            if should_abort is not None and should_abort():
                self._notify(plan, seconds * point / points)
                return SuspendedStep(plan.step, first + point, SAFEPOINTS)
            self._clock.advance(seconds / points)
            self.busy_s += seconds / points
        self._notify(plan, seconds)
        self.steps += 1
        choose = self._choose
        samples = [SampledToken(c.request_id, choose(c)) for c in plan.chunks if c.sample]
        return StepResult(plan.step, tuple(samples))

    def _next_factor(self, rng: random.Random) -> float:
        """A first-order autoregressive process with standard deviation `noise`."""
        fresh = rng.gauss(0.0, self._noise)
        if self._deviation is not None:
            fresh *= math.sqrt(1.0 - self._correlation**2)
            fresh += self._correlation * self._deviation
        self._deviation = fresh
        return math.exp(self._deviation - 0.5 * self._noise**2)

    def _notify(self, plan: StepPlan, seconds: float) -> None:
        if self._observe is not None:
            self._observe(plan, seconds)

    def close(self) -> None:
        """There is nothing to release."""


MIN_RETRY_S = 0.1
"""A refused client of a closed loop waits at least this long, so that the clock advances."""
_PROGRESS_STEPS = 200


@dataclass(slots=True)
class SimulatedRequest:
    """The result of one request.

    token_times_s: when the engine committed each token, in seconds after the start.
    finish: None if it was open at the end, or refused.
    refused: the engine refused it on arrival.
    slowdown: of a finished real-time request, see RequestTrace.
    """

    request_id: str
    service_class: ServiceClass
    arrival_s: float
    size: Size
    token_times_s: array[float] = field(default_factory=lambda: array("d"))
    finish: FinishReason | None = None
    refused: bool = False
    tenant: str = ""
    slowdown: float | None = None

    @property
    def finished(self) -> bool:
        """Whether it got all its tokens."""
        return self.finish is not None and self.finish.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals from the start to time_s = busy_s + idle_s.

    busy_s: time of all steps, suspended ones included.
    steps: completed steps.
    """

    time_s: float = 0.0
    busy_s: float = 0.0
    idle_s: float = 0.0
    steps: int = 0
    stats: EngineStats = EngineStats()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """The result of one run. end_s = busy_s + idle_s.

    records: in order of arrival.
    steps: completed steps.
    skipped: requests after the warm-up that were too long to be served.
    warm_up: totals at warm_up_s, or at the end of the step that ran then.
    """

    records: Sequence[SimulatedRequest]
    end_s: float
    busy_s: float
    idle_s: float
    steps: int
    stats: EngineStats
    skipped: int = 0
    warm_up_s: float = 0.0
    warm_up: Totals = Totals()

    def digest(self) -> str:
        """A hash of all records: equal only if two runs are bit-identical."""
        hashed = hashlib.sha256()
        for record in self.records:
            head = f"{record.request_id} {record.finish} {record.refused} {tuple(record.size)}"
            hashed.update(f"{head} {len(record.token_times_s)}\n".encode())
            hashed.update(struct.pack("<d", record.arrival_s))
            hashed.update(struct.pack(f"<{len(record.token_times_s)}d", *record.token_times_s))
        return hashed.hexdigest()


class _ClosedLoop:
    """The best-effort requests of a tenant: how many are open, and the sizes of the next ones."""

    def __init__(self, load: BeLoad, seed: int) -> None:
        self.load = load
        self.open = 0
        self.sizes = load.sizes.stream(generator(seed, "be sizes"))


class Simulation:
    """One run. `engine` must use `executor` and `clock`, which starts at 0."""

    def __init__(
        self,
        engine: Engine,
        executor: SimExecutor,
        clock: ManualClock,
        *,
        rt: Mapping[str, Sequence[Arrival]],
        be: Mapping[str, BeLoad],
        seed: int,
        duration_s: float,
        warm_up_s: float = 0.0,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """rt, be: the real-time requests, sorted by time, and the best-effort load of each tenant.
        warm_up_s: less than duration_s; it only affects what the result records.
        progress: called with the share of the duration that is done, now and then.
        """
        self._engine = engine
        self._executor = executor
        self._clock = clock
        self._loops = {
            tenant: _ClosedLoop(load, tenant_seed(tenant, seed)) for tenant, load in be.items()
        }
        self._duration_s = duration_s
        self._warm_up_s = warm_up_s
        self._warm_up = Totals()
        self._progress = progress
        self._records: list[SimulatedRequest] = []
        self._open: dict[str, SimulatedRequest] = {}
        self._idle_s = 0.0
        self._arrived: list[tuple[SimulatedRequest, EngineRequest]] = []
        limit = engine.info.max_model_len
        self._skipped = 0
        # A heap by time, then by the order in which arrivals were scheduled.
        self._future: list[tuple[float, int, str, ServiceClass, Size]] = []
        self._num_scheduled = 0
        for tenant, arrivals in rt.items():
            for time_s, size in arrivals:
                if sum(size) <= limit:
                    self._schedule_arrival(time_s, tenant, ServiceClass.RT, size)
                else:
                    self._skipped += time_s >= warm_up_s

    def run(self) -> SimulationResult:
        """Run to the end of the duration. Call it once."""
        for tenant, loop in self._loops.items():
            self._schedule_best_effort(0.0, tenant, loop.load.in_flight)
        for _ in self._until_end():
            self._submit_arrived()
            if self._engine.has_work:
                outputs = self._engine.step(self._pop_arrivals)
                self._record_outputs(outputs, self._clock.now())
                self._record_warm_up(self._clock.now())
            else:
                self._idle()
                self._record_warm_up(self._warm_up_s)
        self._record_unsubmitted()
        return SimulationResult(
            records=self._records,
            end_s=self._clock.now(),
            busy_s=self._executor.busy_s,
            idle_s=self._idle_s,
            steps=self._executor.steps,
            stats=self._engine.stats(),
            skipped=self._skipped,
            warm_up_s=self._warm_up_s,
            warm_up=self._warm_up,
        )

    def _record_warm_up(self, time_s: float) -> None:
        """Record the totals once the warm-up is over. Nothing has run since time_s."""
        now = self._clock.now()
        if self._warm_up.time_s < self._warm_up_s <= now:
            self._warm_up = Totals(
                time_s=time_s,
                busy_s=self._executor.busy_s,
                idle_s=self._idle_s - (now - time_s),
                steps=self._executor.steps,
                stats=self._engine.stats(),
            )

    def _until_end(self) -> Iterator[None]:
        mark = 0.0
        while self._clock.now() < self._duration_s:
            if self._progress is not None and self._clock.now() >= mark:
                self._progress(self._clock.now() / self._duration_s)
                mark = self._clock.now() + self._duration_s / _PROGRESS_STEPS
            yield

    def _idle(self) -> None:
        """Advance the clock to the next arrival, or to the end."""
        until = self._duration_s
        if self._future:
            until = min(until, self._future[0][0])
        before = self._clock.now()
        self._clock.advance(max(0.0, until - before))
        self._idle_s += self._clock.now() - before

    def _schedule_arrival(
        self, time_s: float, tenant: str, service_class: ServiceClass, size: Size
    ) -> None:
        heapq.heappush(self._future, (time_s, self._num_scheduled, tenant, service_class, size))
        self._num_scheduled += 1

    def _pop_arrivals(self) -> list[EngineRequest]:
        """The requests that have arrived since the last call."""
        before = len(self._arrived)
        until = min(self._clock.now(), self._duration_s)
        while self._future and self._future[0][0] <= until:
            time_s, _, tenant, service_class, size = heapq.heappop(self._future)
            record = self._record(time_s, tenant, service_class, size)
            self._arrived.append((record, self._request(record)))
        return [request for _, request in self._arrived[before:]]

    def _submit_arrived(self) -> None:
        self._pop_arrivals()
        for record, request in self._arrived:
            self._submit(record, request, self._clock.now())
        self._arrived.clear()

    def _record_unsubmitted(self) -> None:
        """Requests that arrived during the last step never reach the engine, and count as open."""
        while self._future and self._future[0][0] < self._duration_s:
            time_s, _, tenant, service_class, size = heapq.heappop(self._future)
            self._record(time_s, tenant, service_class, size)

    def _record(
        self, time_s: float, tenant: str, service_class: ServiceClass, size: Size
    ) -> SimulatedRequest:
        request_id = f"{service_class}-{len(self._records)}"
        record = SimulatedRequest(request_id, service_class, time_s, size, tenant=tenant)
        self._records.append(record)
        return record

    def _request(self, record: SimulatedRequest) -> EngineRequest:
        params = SamplingParams(
            temperature=0.0, max_tokens=record.size.output_tokens, ignore_eos=True
        )
        return EngineRequest(
            request_id=record.request_id,
            prompt_token_ids=_prompt(
                len(self._records), record.size.prompt_tokens, self._engine.info.vocab_size
            ),
            sampling=params,
            service_class=record.service_class,
            arrival_s=record.arrival_s,
            tenant=record.tenant,
        )

    def _submit(self, record: SimulatedRequest, request: EngineRequest, now: float) -> None:
        try:
            self._engine.submit(request)
        except (QueueFullError, OverloadedError) as error:
            record.refused = True
            wait_s = max(error.retry_after_s, MIN_RETRY_S)
            self._on_closed(record, now + wait_s)
        else:
            self._open[record.request_id] = record

    def _record_outputs(self, outputs: Sequence[Output], now: float) -> None:
        for output in map(expanded, outputs):
            record = self._open[output.request_id]
            for _ in output.token_ids:
                record.token_times_s.append(now)
            if output.finish_reason is not None:
                record.finish = output.finish_reason
                trace = self._engine.trace(record.request_id)
                record.slowdown = None if trace is None else trace.slowdown
                del self._open[output.request_id]
                self._on_closed(record, now)

    def _on_closed(self, record: SimulatedRequest, now: float) -> None:
        """A best-effort client in the closed loop sends its next request after each answer."""
        if record.service_class is ServiceClass.RT:
            return
        loop = self._loops[record.tenant]
        loop.open -= 1
        if not loop.load.batches:
            self._schedule_best_effort(now, record.tenant, 1)
        elif loop.open == 0:
            self._schedule_best_effort(now, record.tenant, loop.load.in_flight)

    def _schedule_best_effort(self, time_s: float, tenant: str, count: int) -> None:
        loop = self._loops[tenant]
        loop.open += count
        for _ in range(count):
            self._schedule_arrival(time_s, tenant, ServiceClass.BE, next(loop.sizes))


def _prompt(number: int, length: int, vocab_size: int) -> array[int]:
    """Token ids that share no prefix with other prompts, if these have two tokens or more."""
    tokens = array("i", bytes(length * array("i").itemsize))
    tokens[0] = number % vocab_size
    if length > 1:
        tokens[1] = number // vocab_size % vocab_size
    return tokens


# ---- Builds a simulation from a scenario.


BLOCK_SIZE = 16
_VOCAB = 32_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The simulated device: step times of a model on a machine, and its KV memory in blocks."""

    name: str
    model: str
    weights: str
    steps: CostModel
    kv_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedScenario:
    """Everything that determines a run: runs of equal scenarios are bit-identical.

    rt, be: the load of a server without tenants.
    tenants: the load of tenants, beside that.
    disturbance: how step times differ from the scheduler's cost model.
    warm_up_s: the beginning that reports leave out (metrics.py); less than duration_s.
    """

    config: EngineConfig
    device: Device
    rt: RtLoad
    be: BeLoad
    seed: int
    duration_s: float
    tenants: tuple[TenantLoad, ...] = ()
    disturbance: Disturbance = Disturbance()
    warm_up_s: float = 0.0

    @property
    def loads(self) -> Sequence[TenantLoad]:
        """All loads, by tenant."""
        return (TenantLoad("", self.rt, self.be), *self.tenants)

    @property
    def slo(self) -> Slo:
        """Objectives of real-time requests."""
        return self.config.default_slo


def build_simulation(
    scenario: SimulatedScenario,
    *,
    observe: Callable[[StepPlan, float], None] | None = None,
    progress: Callable[[float], None] | None = None,
    wrap_scheduler: Callable[[Scheduler], Scheduler] = lambda scheduler: scheduler,
) -> Simulation:
    """Build engine, virtual clock and workload.

    observe: see SimExecutor.
    wrap_scheduler: wraps the engine's scheduler, for example to time its calls.
    Raises ConfigError if the scenario cannot be run.
    """
    check_scenario(scenario)
    info = engine_info(scenario.config, scenario.device)
    clock = ManualClock()
    executor = SimExecutor(
        scenario.device.steps,
        clock,
        disturbance=scenario.disturbance,
        rng=generator(scenario.seed, "noise"),
        observe=observe,
    )
    scheduler = build_scheduler(_config(scenario), info, scenario.device.steps)
    engine = Engine(wrap_scheduler(scheduler), executor, clock, info)
    return Simulation(
        engine,
        executor,
        clock,
        rt={
            load.tenant: load.rt.arrivals(
                scenario.duration_s, tenant_seed(load.tenant, scenario.seed)
            )
            for load in scenario.loads
        },
        be={load.tenant: load.be for load in scenario.loads},
        seed=scenario.seed,
        duration_s=scenario.duration_s,
        warm_up_s=scenario.warm_up_s,
        progress=progress,
    )


def check_scenario(scenario: SimulatedScenario) -> None:
    """Raise ConfigError if options contradict each other, or if the requests of the load cannot all
    be in flight."""
    info = engine_info(scenario.config, scenario.device)
    build_scheduler(_config(scenario), info, scenario.device.steps)
    in_flight = sum(load.be.in_flight for load in scenario.loads)
    if in_flight > scenario.config.max_queue:
        raise ConfigError(
            f"--be: {in_flight} requests in flight need --max-queue {in_flight} or more, "
            f"it is {scenario.config.max_queue}"
        )
    for be in (load.be for load in scenario.loads if load.be.in_flight):
        if be.sizes.longest > info.max_model_len:
            raise ConfigError(
                f"--be: requests of up to {be.sizes.longest} tokens do not fit, the longest that "
                f"can be served is {info.max_model_len}; see --kv-blocks and --max-model-len"
            )


def _config(scenario: SimulatedScenario) -> EngineConfig:
    """The engine's options. The prefix cache is off, as no two prompts share a prefix."""
    return dataclasses.replace(with_step_bounds(scenario.config), prefix_cache="off")


def with_step_bounds(config: EngineConfig) -> EngineConfig:
    """The same options with a CPU's default step bounds, which published results depend on."""
    rows, tokens = config.step_bounds("cpu")
    return dataclasses.replace(config, max_num_seqs=rows, max_batch_tokens=tokens)


def engine_info(config: EngineConfig, device: Device) -> EngineInfo:
    """The info of an engine with these options on this device."""
    fits = device.kv_blocks * BLOCK_SIZE
    return EngineInfo(
        model=device.model,
        weights=device.weights,
        kernels="simulated",
        kv_dtype="simulated",
        device=device.name,
        max_model_len=min(config.max_model_len or fits, fits),
        vocab_size=_VOCAB,
        block_size=BLOCK_SIZE,
        num_kv_blocks=device.kv_blocks,
        num_host_kv_blocks=(
            device.kv_blocks if config.host_kv_blocks is None else config.host_kv_blocks
        ),
        policy=config.policy,
        max_queue=config.max_queue,
        default_slo=config.default_slo,
        yields=best_effort_yields(config),
        prices=device.steps.prices(with_step_bounds(config).step_bounds("cpu").tokens),
    )


# ---- Finds the profile of the simulated device by path or name.


def read_profile(text: str, folders: Sequence[Path]) -> Profile:
    """The profile in the file `text`, or with that name: `<device>/<model>-<weights>`.

    folders: searched for names, the first match wins.
    Raises ConfigError, with similar names, if there is none or it cannot be used.
    """
    path = expand_user(text)
    if path.is_file():
        return load_profile(path)
    stored = stored_profiles(folders)
    name = text.removesuffix(".json")
    if name in stored:
        return load_profile(stored[name])
    near = near_matches(name, stored)
    if not near and stored:
        near = f"; there are {', '.join(stored)}" if len(stored) <= 8 else ""
    raise ConfigError(f"--profile: {text} is neither a file nor the name of a profile{near}")


def stored_profiles(folders: Sequence[Path]) -> dict[str, Path]:
    """name -> file of all profiles in the folders, sorted by name."""
    found: dict[str, Path] = {}
    for folder in reversed(folders):
        for path in folder.glob("*/*.json"):
            found[path.relative_to(folder).as_posix().removesuffix(".json")] = path
    return dict(sorted(found.items()))


def device_of(profile: Profile, kv_blocks: int | None) -> Device:
    """The device of a profile. kv_blocks: KV memory; None for all that the profile states.

    Raises ConfigError if the profile does not state it either.
    """
    if kv_blocks is None:
        if profile.kv_capacity_tokens is None:
            raise ConfigError(
                f"--kv-blocks: the profile of {profile.key.model} on {profile.key.device} does "
                f"not say how much KV memory there is; give the number of blocks of {BLOCK_SIZE} "
                "tokens"
            )
        kv_blocks = max(1, profile.kv_capacity_tokens // BLOCK_SIZE)
    key = profile.key
    return Device(
        name=key.device if key.tp == 1 else f"{key.device}, {key.tp} ranks",
        model=key.model,
        weights=key.weights,
        steps=profile.model,
        kv_blocks=kv_blocks,
    )
