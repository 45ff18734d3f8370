"""Figures 10 and 11: latency, attainment and best-effort throughput of hybrid loads, simulated.

Three models, two kinds of chats, five rates; all policies get the same requests.
Step times come from analytic profiles (analytic_profiles.py): nothing here is measured on a GPU.

Rates are not chosen by hand. For each model and kind of chats, the highest rate is the highest
multiple of RATE_STEP, up to the paper's 15 requests per second, at which `bros` still has 99 % TTFT
attainment under the full best-effort load; beyond it, real-time requests alone nearly saturate the
device. The other rates divide it evenly.

The load is constant, so a policy that defers real-time requests has to run them in the end. In the
first minutes deferring them still looks like a gain, which is why the warm-up is not measured.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import paper_tables
from paper_common import (
    BE_IN_FLIGHT,
    POLICIES,
    Case,
    Options,
    Part,
    Rendering,
    Results,
    Setting,
    Span,
    even_rates,
    provenance,
    settings,
    simulate,
    stored_profile,
)
from paper_drawing import BE_RATE, LATENCY, TPOT, TTFT, model_grids, share

from bros.workload.arrivals import RT_SIZES, BeLoad

RATE_STEP, HIGHEST_RATE = 0.5, 15.0
TTFT_ASKED = 0.99
FULL, QUICK = Span(900.0, 300.0), Span(60.0, 15.0)


def highest_passing(verdicts: Mapping[int, bool], count: int) -> tuple[int, int | None]:
    """Bisection on 1..count: (highest passing one or 0, next one to try or None at the end)."""
    passed = max((n for n, good in verdicts.items() if good), default=0)
    failed = min((n for n, good in verdicts.items() if not good), default=count + 1)
    if failed <= passed + 1:
        return passed, None
    return passed, count if not verdicts else (passed + failed) // 2


def find_highest(
    wanted: Sequence[Setting], span: Span, options: Options
) -> tuple[dict[Setting, float], list[dict[str, Any]]]:
    """The highest rate of each setting, and the runs of the search.

    Raises RuntimeError if a setting fails at the lowest rate.
    """
    count = round(HIGHEST_RATE / RATE_STEP)
    verdicts: dict[Setting, dict[int, bool]] = {setting: {} for setting in wanted}
    tried: list[dict[str, Any]] = []
    while True:
        rounds = [
            (setting, step)
            for setting, known in verdicts.items()
            if (step := highest_passing(known, count)[1]) is not None
        ]
        if not rounds:
            break
        cases = [Case(setting, "bros", step * RATE_STEP) for setting, step in rounds]
        records = simulate("finding rates", cases, span, options)
        tried += records
        for (setting, step), record in zip(rounds, records, strict=True):
            verdicts[setting][step] = share(record["ttft_met"]) >= TTFT_ASKED
    found = {s: highest_passing(known, count)[0] * RATE_STEP for s, known in verdicts.items()}
    for setting, rate in found.items():
        if not rate:
            raise RuntimeError(f"{setting} fails at {RATE_STEP} requests per second")
    return found, tried


def measure(options: Options) -> dict[str, Any]:
    """All runs, and everything that determines them."""
    began = time.perf_counter()
    span = QUICK if options.quick else FULL
    highest, tried = find_highest(settings(options), span, options)
    cases = [
        Case(setting, policy, rate)
        for setting, top in highest.items()
        for policy in POLICIES
        for rate in even_rates(top)
    ]
    runs = simulate("simulating", cases, span, options)
    alone = [Case(setting, "bros", top, be_in_flight=0) for setting, top in highest.items()]
    return {
        **provenance(span, options),
        "best_effort": dataclasses.asdict(BeLoad(BE_IN_FLIGHT, batches=True)),
        "real_time": {name: dataclasses.asdict(sizes) for name, sizes in RT_SIZES.items()},
        "policies": {label: dataclasses.asdict(config) for label, config in POLICIES.items()},
        "profiles": {name: _described(name) for name in options.models},
        "runs": runs,
        "real_time_alone": simulate("real-time work alone", alone, span, options),
        "finding_rates": tried,
        "wall_s": round(time.perf_counter() - began, 1),
    }


def _described(name: str) -> dict[str, Any]:
    profile = stored_profile(name)
    return {"kind": profile.kind, "kv_capacity_tokens": profile.kv_capacity_tokens}


def render(results: Results) -> Rendering:
    metrics = (LATENCY, TTFT, TPOT, BE_RATE)
    plots = model_grids(results["runs"], metrics, "beside best-effort batches")
    return Rendering(paper_tables.blocks(results), plots)


PART = Part("settings", "10 and 11", "65 min", measure, render)
