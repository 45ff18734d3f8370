"""The loads of ablation.py: what arrives, with which objectives, on which simulated device.

Step times are those of the stored profiles. Each step takes longer or shorter than the profile says
by a random factor of 5 %, since margins and corrections would be worth nothing if all predictions
were right. Durations are as short as the intervals between ten seeds allow.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bros.core.clock import ManualClock
from bros.core.config import MAX_RT_SLOWDOWN, EngineConfig
from bros.core.request import EngineRequest, Hints, RequestGroup, ServiceClass, Slo
from bros.engine.engine import Engine
from bros.scheduler.build import build_scheduler
from bros.simulator.simulation import (
    Disturbance,
    SimExecutor,
    Simulation,
    SimulationResult,
    device_of,
    engine_info,
    read_profile,
    with_step_bounds,
)
from bros.workload.arrivals import (
    RT_SIZES,
    Arrival,
    BeLoad,
    RequestSizes,
    Size,
    generator,
    poisson_times,
)
from bros.workload.lengths import ClippedLogNormal, Uniform

PROFILES = Path(__file__).resolve().parents[1] / "profiles"
OPT_13B, OPT_30B = "2x-a100-40g/opt-13b-fp16", "4x-a100-40g/opt-30b-fp16"
LLAMA_7B, CPU = "1x-a100-80g/llama-7b-fp16", "amd-epyc-2-threads/SmolLM2-135M-Instruct-fp32"

CHATS = RequestSizes(ClippedLogNormal(120, 110, 4, 1000), ClippedLogNormal(60, 50, 2, 400))
"""Short chats, so that many requests fit into a short run."""
SHORT = RequestSizes(ClippedLogNormal(60, 60, 4, 200), ClippedLogNormal(60, 50, 2, 200))
"""Even shorter ones, for a model on two cores."""
DOCUMENTS = RequestSizes(ClippedLogNormal(1500, 900, 200, 4000), ClippedLogNormal(40, 30, 2, 200))
CODE = RequestSizes(ClippedLogNormal(2048, 1974, 3, 7437), ClippedLogNormal(28, 60, 1, 1900))
"""The Azure trace of code completions, which QoServe uses."""
FORUM = RequestSizes(RT_SIZES["sharegpt"].prompt, CHATS.output)
LABELS = RequestSizes(Uniform(10, 40), Uniform(1, 8))
JOBS = RequestSizes(Uniform(256, 512), Uniform(16, 64))

_COMMON = EngineConfig(
    max_num_seqs=256,
    max_batch_tokens=2048,
    max_queue=100_000,
    prefix_cache="off",
    rt_slowdown=MAX_RT_SLOWDOWN,  # as if best-effort work had waited for long
)


@dataclass(frozen=True, slots=True)
class Coming:
    """A request that arrives. fields: those of EngineRequest that are not the usual ones."""

    time_s: float
    size: Size
    fields: Mapping[str, Any] = field(default_factory=dict)


Arrivals = Callable[[float, int], Sequence[Coming]]
"""(duration in seconds, seed) -> what arrives, in order of time."""

Fields = Callable[[random.Random, int], Mapping[str, Any]]
"""(generator of one request, its number) -> fields of an EngineRequest that are not the usual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load.

    about: one line for the report.
    options: of the engine, beside the common ones.
    kv_blocks: KV memory; None: all that the device has.
    be_fields: of best-effort requests.
    """

    name: str
    about: str
    rt: Arrivals
    be: BeLoad
    profile: str = OPT_13B
    options: Mapping[str, Any] = field(default_factory=dict)
    kv_blocks: int | None = None
    be_fields: Fields | None = None
    duration_s: float
    disturbance: Disturbance = Disturbance(noise=0.05)

    def config(self, **options: Any) -> EngineConfig:
        return dataclasses.replace(_COMMON, **{**self.options, **options})


class DressedEngine(Engine):
    """Gives requests the fields that the simulator does not know.

    dressed: request id -> the request, also of those that have ended.
    """

    def dress(self, coming: Sequence[Coming], be_fields: Fields | None, seed: int) -> None:
        """coming: of real-time requests, in the order in which they arrive."""
        self._coming = coming
        self._be_fields = be_fields
        self._seed = seed
        self._counts = {service_class: 0 for service_class in ServiceClass}
        self.dressed: dict[str, EngineRequest] = {}

    def _dress(self, request: EngineRequest) -> EngineRequest:
        found = self.dressed.get(request.request_id)
        if found is None:
            kind = request.service_class
            number = self._counts[kind]
            self._counts[kind] += 1
            fields: Mapping[str, Any] = {}
            if kind is ServiceClass.RT:
                fields = self._coming[number].fields
            elif self._be_fields is not None:
                fields = self._be_fields(generator(self._seed, f"be {number}"), number)
            found = dataclasses.replace(request, **fields) if fields else request
            self.dressed[request.request_id] = found
        return found

    def submit(self, request: EngineRequest) -> ServiceClass:
        return super().submit(self._dress(request))

    def step(self, arrivals: Any = None) -> Any:
        if arrivals is None:
            return super().step()
        return super().step(lambda: [self._dress(request) for request in arrivals()])


def simulate(
    load: Load, seed: int, duration_s: float, warm_up_s: float, **options: Any
) -> tuple[SimulationResult, Mapping[str, EngineRequest]]:
    """One run, and the requests that were submitted by their ids. options: of the engine."""
    device = device_of(read_profile(load.profile, [PROFILES]), load.kv_blocks)
    config = with_step_bounds(load.config(**options))
    info = engine_info(config, device)
    clock = ManualClock()
    executor = SimExecutor(
        device.steps, clock, disturbance=load.disturbance, rng=generator(seed, "noise")
    )
    engine = DressedEngine(build_scheduler(config, info, device.steps), executor, clock, info)
    coming = load.rt(duration_s, seed)
    engine.dress(coming, load.be_fields, seed)
    result = Simulation(
        engine,
        executor,
        clock,
        rt={"": [Arrival(each.time_s, each.size) for each in coming]},
        be={"": load.be},
        seed=seed,
        duration_s=duration_s,
        warm_up_s=warm_up_s,
    ).run()
    assert not result.skipped, "every request has to fit"
    return result, engine.dressed


# ---- What arrives.


def poisson(
    rate: float, sizes: RequestSizes, fields: Fields | None = None, together: int = 1
) -> Arrivals:
    """`rate` requests per second, `together` of them at the same time."""

    def arrivals(duration_s: float, seed: int) -> list[Coming]:
        label = f"{rate} {together}"
        drawn = sizes.stream(generator(seed, f"sizes {label}"))
        found: list[Coming] = []
        for time_s in poisson_times(rate / together, generator(seed, f"gaps {label}")):
            if time_s >= duration_s:
                return found
            for _ in range(together):
                rng = generator(seed, f"{label} {len(found)}")
                given = {} if fields is None else fields(rng, len(found))
                found.append(Coming(time_s, next(drawn), given))
        raise AssertionError("arrivals never end")

    return arrivals


def merged(*several: Arrivals) -> Arrivals:
    def arrivals(duration_s: float, seed: int) -> list[Coming]:
        found = [each for one in several for each in one(duration_s, seed)]
        return sorted(found, key=lambda each: each.time_s)

    return arrivals


def objectives(*choices: Slo) -> Fields:
    """Each request has one of these."""
    return lambda rng, number: {"slo": rng.choice(choices)}


def _tokens(*parts: tuple[int, int]) -> array[int]:
    """A prompt of (name, length) parts; equal names have equal tokens."""
    found = array("i")
    for name, length in parts:
        found.extend([name % 32_000, name // 32_000] + [7] * (length - 2))
    return found


def programs(rate: float, members: int, shared: int, own: int, outputs: int) -> Arrivals:
    """`rate` programs per second: an early prefill of the prefix that `members` calls share, which
    come three seconds later as a task group."""

    def arrivals(duration_s: float, seed: int) -> list[Coming]:
        found: list[Coming] = []
        for number, time_s in enumerate(poisson_times(rate, generator(seed, "programs"))):
            if time_s >= duration_s:
                break
            prefix, name = (1_000_000 + number, shared), f"program {number}"
            early = {
                "prompt_token_ids": _tokens(prefix, (0, 2)),
                "service_class": ServiceClass.BE,
                "prefill_only": True,
                "hints": Hints(program=name, early=True),
            }
            found.append(Coming(time_s, Size(shared + 2, 1), early))
            group = RequestGroup(id=name)
            for member in range(members):
                calls = {
                    "prompt_token_ids": _tokens(prefix, (2_000_000 + 100 * number + member, own)),
                    "hints": Hints(program=name, group=group, depth=1),
                }
                found.append(Coming(time_s + 3.0, Size(shared + own, outputs), calls))
        return [each for each in found if each.time_s < duration_s]

    return merged(arrivals)


def _rows_of_programs(rng: random.Random, number: int) -> Mapping[str, Any]:
    """Best-effort calls of programs: a task group of four, then two deeper calls."""
    program, place = divmod(number, 6)
    name = f"best-effort program {program % 8 + 8 * (program // 16)}"
    group = RequestGroup(id=name) if place < 4 else None
    return {
        "prompt_token_ids": _tokens((3_000_000 + program % 40, 256), (4_000_000 + number, 64)),
        "hints": Hints(program=name, group=group, depth=max(0, place - 3)),
    }


def _rows_of_batches(rng: random.Random, number: int) -> Mapping[str, Any]:
    """Each has one of ten system prompts, in no order."""
    return {"prompt_token_ids": _tokens((5_000_000 + rng.randrange(10), 512), (number, 64))}


def _of_tenants(rng: random.Random, number: int) -> Mapping[str, Any]:
    return {"tenant": rng.choice(("ann", "bob", "cid", "dan"))}


def _deadlines(rng: random.Random, number: int) -> Mapping[str, Any]:
    return {"slo": Slo(deadline_s=rng.choice((8.0, 20.0, 60.0)))}


QOSERVE = objectives(Slo(6.0, 0.05), Slo(60.0, 0.4), Slo(180.0, 0.4))
"""QoServe's tiers. The last two, whose whole answers are due after 600 and 1,800 s, are shortened
to a tenth with their run."""
MIXED = objectives(Slo(0.15, 0.05), Slo(0.4, 0.2), Slo(3.0, 0.3), Slo(20.0, 1.0))

_WAVES = Disturbance(noise=0.13, correlation=0.85)
"""Of steps on cores that others use as well."""

_on_two_cores = functools.partial(
    Load,
    be=BeLoad(16),
    profile=CPU,
    options={"max_num_seqs": 64, "max_batch_tokens": 256},
    kv_blocks=1500,
)
"""The embedded model beside 16 best-effort requests."""

_ALL = (
    Load(
        name="paper",
        about="the BROS paper: OPT-13B, LMSYS chats at 10/s, 256 best-effort requests in batches",
        rt=poisson(10.0, RT_SIZES["lmsys"]),
        be=BeLoad(256, batches=True),
        options={"max_num_seqs": 512},
        duration_s=12.0,
    ),
    Load(
        name="full memory",
        about="OPT-30B, ShareGPT's prompts at 15/s, which alone fill 16,000 tokens of KV memory",
        rt=poisson(15.0, FORUM),
        be=BeLoad(48),
        profile=OPT_30B,
        kv_blocks=1000,
        duration_s=15.0,
    ),
    _on_two_cores(
        name="cpu",
        about="the embedded model on two cores: short chats at 0.9/s, 16 best-effort requests",
        rt=poisson(0.9, SHORT),
        duration_s=120.0,
    ),
    _on_two_cores(
        name="cpu, long",
        about="the same with prompts of 100 to 220 tokens, which take up to two thirds of the TTFT",
        rt=poisson(0.4, RequestSizes(Uniform(100, 220), Uniform(2, 40))),
        duration_s=150.0,
    ),
    _on_two_cores(
        name="cpu, documents",
        about="the same beside documents of 400 to 2,000 tokens, which take longer than the TTFT",
        rt=merged(
            poisson(0.4, SHORT),
            poisson(0.05, RequestSizes(Uniform(400, 2000), Uniform(2, 40))),
        ),
        duration_s=150.0,
    ),
    _on_two_cores(
        name="slow machine",
        about="chats at 0.4/s where steps take 1.5 times as long as predicted, and vary by 15 %",
        rt=poisson(0.4, SHORT),
        disturbance=Disturbance(noise=0.15, slowdown=1.5),
        duration_s=150.0,
    ),
    _on_two_cores(
        name="shared cores",
        about="chats at 0.4/s on cores that others use as well: steps vary by 13 %, in long waves",
        rt=poisson(0.4, SHORT),
        disturbance=_WAVES,
        duration_s=300.0,
    ),
    _on_two_cores(
        name="pairs",
        about="the same with two prompts of 50 to 150 tokens at once, which take half of the TTFT",
        rt=poisson(0.4, RequestSizes(Uniform(50, 150), Uniform(2, 40)), together=2),
        disturbance=_WAVES,
        duration_s=300.0,
    ),
    Load(
        name="tight",
        about="short chats at 14/s, objectives of 120 ms and 40 ms",
        rt=poisson(14.0, CHATS),
        be=BeLoad(48),
        options={"slo_ttft": 120.0, "slo_tpot": 40.0},
        duration_s=20.0,
    ),
    Load(
        name="loose",
        about="short chats at 16/s, objectives of 4 s and 1 s",
        rt=poisson(16.0, CHATS),
        be=BeLoad(48),
        options={"slo_ttft": 4000.0, "slo_tpot": 1000.0},
        duration_s=15.0,
    ),
    Load(
        name="bursts",
        about="16 short chats at once, every two seconds on average",
        rt=poisson(8.0, CHATS, together=16),
        be=BeLoad(48),
        duration_s=30.0,
    ),
    Load(
        name="overload",
        about="ShareGPT's prompts at 20/s, more than fit into 14,400 tokens of KV memory in time",
        rt=poisson(20.0, FORUM),
        be=BeLoad(48),
        kv_blocks=900,
        duration_s=10.0,
    ),
    Load(
        name="relegated",
        about="the same at 24/s with 32 rows, an objective of 1 s, and --overload relegate",
        rt=poisson(24.0, FORUM),
        be=BeLoad(48),
        kv_blocks=900,
        options={"overload": "relegate", "max_num_seqs": 32, "slo_ttft": 1000.0},
        duration_s=12.0,
    ),
    Load(
        name="tenants",
        about="OPT-30B, ShareGPT's chats at 4/s beside 64 best-effort requests, of four tenants",
        rt=poisson(4.0, RT_SIZES["sharegpt"], _of_tenants),
        be=BeLoad(64),
        be_fields=_of_tenants,
        profile=OPT_30B,
        options={"rt_slowdown": 1.4},
        duration_s=120.0,
    ),
    Load(
        name="long prompts",
        about="documents of 200 to 4,000 tokens at 6/s beside chats at 6/s, objectives 2 s, 0.2 s",
        rt=merged(
            poisson(5.0, DOCUMENTS, objectives(Slo(2.0, 0.2))),
            poisson(6.0, CHATS, objectives(Slo(0.4, 0.2))),
        ),
        be=BeLoad(32),
        duration_s=20.0,
    ),
    Load(
        name="many small",
        about="requests of 10 to 40 tokens and 1 to 8 answers at 60/s, objectives 200 ms, 80 ms",
        rt=poisson(60.0, LABELS),
        be=BeLoad(128, sizes=LABELS),
        options={"slo_ttft": 200.0, "slo_tpot": 80.0},
        duration_s=4.0,
    ),
    Load(
        name="tight memory",
        about="short chats at 12/s with 11,000 tokens of KV memory",
        rt=poisson(12.0, CHATS),
        be=BeLoad(48),
        kv_blocks=700,
        duration_s=12.0,
    ),
    Load(
        name="deadlines",
        about="best-effort requests due after 8, 20 or 60 s beside short chats at 8/s",
        rt=poisson(8.0, CHATS),
        be=BeLoad(160, sizes=JOBS),
        be_fields=_deadlines,
        options={"max_num_seqs": 64, "rt_slowdown": 1.4},
        duration_s=15.0,
    ),
    Load(
        name="batch",
        about="the embedded model on two cores: rows of a batch with a far window beside chats",
        rt=poisson(0.4, SHORT),
        be=BeLoad(16),
        be_fields=lambda rng, number: {"slo": Slo(schedule_s=36_000.0)},
        profile=CPU,
        options={"max_num_seqs": 64, "max_batch_tokens": 256, "rt_slowdown": 1.4},
        kv_blocks=1500,
        duration_s=150.0,
    ),
    Load(
        name="backlog",
        about="the same with best-effort requests without a deadline, always 16",
        rt=poisson(0.4, SHORT),
        be=BeLoad(16),
        profile=CPU,
        options={"max_num_seqs": 64, "max_batch_tokens": 256, "rt_slowdown": 1.4},
        kv_blocks=1500,
        duration_s=150.0,
    ),
    Load(
        name="mixed",
        about="short chats at 12/s with TTFT objectives from 0.15 to 20 s",
        rt=poisson(12.0, CHATS, MIXED),
        be=BeLoad(48),
        duration_s=15.0,
    ),
    Load(
        name="tiers",
        about="QoServe's three tiers: code completions at 3/s, objectives of 6 s to minutes",
        rt=poisson(3.0, CODE, QOSERVE),
        be=BeLoad(16),
        profile=LLAMA_7B,
        duration_s=30.0,
    ),
    Load(
        name="programs",
        about="task groups with early prefills, best-effort programs, chats at 10/s; prefix cache",
        rt=merged(poisson(10.0, CHATS), programs(1.6, 6, 512, 96, 40)),
        be=BeLoad(96, sizes=RequestSizes(Uniform(320, 320), Uniform(16, 64))),
        be_fields=_rows_of_programs,
        options={"prefix_cache": "class-aware", "max_num_seqs": 64},
        duration_s=12.0,
    ),
    Load(
        name="sessions",
        about="the embedded model on two cores: task groups with early prefills beside chats",
        rt=merged(poisson(0.5, SHORT), programs(0.06, 5, 200, 64, 20)),
        be=BeLoad(3),
        profile=CPU,
        options={"prefix_cache": "class-aware", "max_num_seqs": 64, "max_batch_tokens": 256},
        kv_blocks=1500,
        duration_s=150.0,
    ),
    Load(
        name="agents",
        about="the embedded model on two cores: early prefills of 800 tokens beside chats",
        rt=merged(poisson(0.5, SHORT), programs(0.2, 1, 800, 20, 20)),
        be=BeLoad(1),
        profile=CPU,
        options={"prefix_cache": "class-aware", "max_num_seqs": 64, "max_batch_tokens": 256},
        kv_blocks=1500,
        duration_s=150.0,
    ),
    Load(
        name="batch prefixes",
        about="best-effort rows with ten system prompts of 512 tokens beside chats; prefix cache",
        rt=poisson(8.0, CHATS),
        be=BeLoad(96, sizes=RequestSizes(Uniform(576, 576), Uniform(16, 64))),
        be_fields=_rows_of_batches,
        options={"prefix_cache": "class-aware", "max_num_seqs": 48},
        kv_blocks=700,
        duration_s=12.0,
    ),
    Load(
        name="lost memory",
        about="long answers to short prompts at 15/s in 8,000 tokens of KV memory, no host copies",
        rt=poisson(15.0, RequestSizes(Uniform(8, 40), ClippedLogNormal(150, 100, 20, 500))),
        be=BeLoad(16),
        options={"host_kv_blocks": 0},
        kv_blocks=500,
        duration_s=8.0,
    ),
    Load(
        name="one-token flood",
        about="20 requests per second of one token, due after 60 ms, beside best-effort work",
        rt=poisson(20.0, RequestSizes(Uniform(4, 8), Uniform(1, 1)), objectives(Slo(0.06, 0.2))),
        be=BeLoad(32),
        duration_s=12.0,
    ),
    Load(
        name="no slack",
        about="short chats at 18/s whose rows alone take the interval of 28 ms",
        rt=poisson(18.0, CHATS),
        be=BeLoad(32),
        options={"slo_ttft": 400.0, "slo_tpot": 28.0},
        duration_s=15.0,
    ),
)
LOADS: Mapping[str, Load] = {load.name: load for load in _ALL}
