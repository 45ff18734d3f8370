"""Requests as a load generator would have seen them, and whole comparisons made of them."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from bros.bench.client import Outcome, Record
from bros.bench.metrics import Window, measure
from bros.bench.plan import Piece, Planned
from bros.bench.results import (
    BenchResult,
    CapacityResult,
    CapacityTrial,
    ClientHealth,
    Command,
    Environment,
    Scenario,
    ScenarioResult,
    ServerSample,
)
from bros.core.request import ServiceClass, Slo

RT, BE = ServiceClass.RT, ServiceClass.BE
SLO = Slo(ttft_s=0.4, tpot_s=0.2)
ENVIRONMENT = Environment(
    cpu="Example 9000", cores=8, memory_bytes=64 << 30, python="3.12.1", bros="0.1.0",
    date="2026-11-21", commit="0123abc", packages={"torch": "2.13.0"},
)  # fmt: skip
COMMAND = Command(
    environment=ENVIRONMENT, settings={"--duration": "60", "--kv-blocks": "90", "--capacity": None},
    seed=1, slo=SLO,
)  # fmt: skip
HEALTHY = ClientHealth(
    lateness_p50_s=0.0004, lateness_p99_s=0.003, lateness_max_s=0.006, cpu_share=0.012,
    fell_behind=False,
)  # fmt: skip


def make_record(
    service_class: ServiceClass = RT,
    *,
    name: str = "r",
    due_s: float = 0.0,
    sent_s: float | None = None,
    gaps_s: Sequence[float] = (),
    outcome: Outcome = Outcome.COMPLETED,
    output_tokens: int | None = None,
    planned_tokens: int | None = None,
    prompt_tokens: int = 8,
    own: Slo | None = None,
    never_sent: bool = False,
    end_s: float | None = None,
    **answer: int | str | None,
) -> Record:
    """gaps_s: sent to the first piece of text, then from each piece to the next.

    sent_s: when it came due unless given. end_s: at the last piece unless given or open.
    planned_tokens: one for each piece unless given.
    """
    start = due_s if sent_s is None else sent_s
    times = array("d")
    at = start
    for gap in gaps_s:
        at += gap
        times.append(at)
    planned = Planned(
        name=name, service_class=service_class, prompt=(Piece("p", prompt_tokens),),
        output_tokens=planned_tokens or max(1, len(gaps_s)), slo=own or Slo(),
    )  # fmt: skip
    record = Record(
        planned, due_s, sent_s=None if never_sent else start, chunk_times_s=times, outcome=outcome,
        end_s=None if outcome is Outcome.OPEN else (at if end_s is None else end_s),
        output_tokens=output_tokens,
    )  # fmt: skip
    for field, value in answer.items():
        setattr(record, field, value)
    return record


def make_load(
    rng: random.Random,
    *,
    duration_s: float,
    rt_rate: float = 0.0,
    be_in_flight: int = 0,
    ttft_s: float = 0.15,
    gap_s: float = 0.05,
    spread: float = 0.3,
    be_gap_s: float = 0.08,
) -> list[Record]:
    """Times around the given ones (log-normal), cut off at the end of the run."""
    records = []
    due = rng.expovariate(rt_rate) if rt_rate else duration_s
    while due < duration_s:
        gaps = [ttft_s, *[gap_s] * rng.randint(5, 60)]
        records.append(_jittered(rng, RT, len(records), due, gaps, spread, duration_s))
        due += rng.expovariate(rt_rate)
    for _ in range(be_in_flight):
        at = 0.0
        while at < duration_s:
            gaps = [0.6, *[be_gap_s] * rng.randint(32, 128)]
            records.append(_jittered(rng, BE, len(records), at, gaps, spread, duration_s))
            at = records[-1].chunk_times_s[-1] if records[-1].chunk_times_s else duration_s
            at = duration_s if records[-1].outcome is Outcome.OPEN else at
    return records


def _jittered(
    rng: random.Random,
    service_class: ServiceClass,
    number: int,
    due_s: float,
    gaps_s: Sequence[float],
    spread: float,
    until_s: float,
) -> Record:
    drawn = [gap * rng.lognormvariate(0.0, spread) for gap in gaps_s]
    kept = []
    at = due_s
    for gap in drawn:
        at += gap
        if at <= until_s:
            kept.append(gap)
    done = len(kept) == len(drawn)
    return make_record(
        service_class, name=f"{service_class}-{number}", due_s=due_s, gaps_s=kept,
        outcome=Outcome.COMPLETED if done else Outcome.OPEN,
        output_tokens=len(kept) if done else None,
        prompt_tokens=700 if service_class is BE else 180,
    )  # fmt: skip


def make_result(
    scenario: Scenario,
    records: Sequence[Record],
    *,
    window: Window,
    policy: str | None = "bros",
    target: str = "bros",
    rt_rate: float | None = None,
    client: ClientHealth = HEALTHY,
    timeline: Sequence[ServerSample] = (),
    command: Command = COMMAND,
) -> ScenarioResult:
    return ScenarioResult(
        command=command, scenario=scenario, target=target, dialect="plain", policy=policy,
        rt_rate=rt_rate, rt_digest=f"{rt_rate or 0:064f}" if scenario is not Scenario.S2 else "",
        be_digest="b" * 64 if scenario is not Scenario.S0 else "",
        metrics=measure(records, SLO, window), client=client, timeline=tuple(timeline),
        rt_load="chats" if rt_rate else "", be_load="summaries", server_version="1.2.3",
    )  # fmt: skip


def make_bench(
    results: Sequence[ScenarioResult], capacities: Sequence[CapacityResult] = ()
) -> BenchResult:
    return BenchResult(results=tuple(results), capacities=tuple(capacities))


def make_timeline(rng: random.Random, seconds: int) -> list[ServerSample]:
    """As scrape.py samples a bros server: a burst in the middle."""
    samples = []
    for at in range(seconds):
        running = 2 + 6 * (seconds // 3 < at < seconds // 2) + rng.randint(0, 2)
        values = {
            "rt_running": float(running), "be_running": float(max(1, 15 - running)),
            "rt_waiting": float(rng.randint(0, 1)), "be_waiting": float(rng.randint(20, 25)),
            "batch_size": 16.0, "rt_kv": 0.03 * running, "be_kv": 0.3, "step_ms": 38 + 3 * running,
            "slack_ms": 160.0 - 9 * running + rng.random() * 20,
        }  # fmt: skip
        samples.append(ServerSample(float(at), values))
    return samples


def typical_bench(rates: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5), seed: int = 7) -> BenchResult:
    """Two policies and both bounds, with figures like those of a small machine."""
    rng = random.Random(seed)
    window = Window(60.0, 300.0)

    def load(**how: float) -> list[Record]:
        return make_load(rng, duration_s=300.0, **how)  # type: ignore[arg-type]

    results = [
        make_result(Scenario.S2, load(be_in_flight=16, be_gap_s=0.07), window=window),
    ]
    for rate in rates:
        slow = 1 + 3 * rate
        results += [
            make_result(Scenario.S0, load(rt_rate=rate), window=window, rt_rate=rate),
            make_result(
                Scenario.S1,
                load(rt_rate=rate, be_in_flight=16, ttft_s=0.25 * slow, gap_s=0.1 * slow,
                     spread=0.6, be_gap_s=0.072 + 0.01 * rate),
                window=window, policy="fcfs", rt_rate=rate, timeline=make_timeline(rng, 300),
            ),
            make_result(
                Scenario.S3,
                load(rt_rate=rate, be_in_flight=16, ttft_s=0.18, gap_s=0.06,
                     be_gap_s=0.075 + 0.02 * rate),
                window=window, rt_rate=rate, timeline=make_timeline(rng, 300),
            ),
        ]  # fmt: skip
    tried = tuple(
        CapacityTrial(rate=result.rt_rate, both_met=result.rt.both_met)
        for result in results
        if result.scenario is Scenario.S3 and result.rt_rate is not None
    )
    capacity = CapacityResult(
        command=COMMAND, target="bros", policy="bros", asked=0.99, rate=0.4, tried=tried
    )
    return make_bench(results, [capacity])
