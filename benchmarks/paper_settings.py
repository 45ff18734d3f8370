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
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paper_common import (
    BE_IN_FLIGHT,
    LENGTHS,
    MODELS,
    POLICIES,
    Case,
    Options,
    Part,
    Rendering,
    Results,
    Setting,
    Span,
    even_rates,
    settings,
    simulate,
    stored_profile,
)
from paper_drawing import (
    BE_RATE,
    LATENCY,
    STYLES,
    TPOT,
    TTFT,
    Run,
    head,
    mean,
    model_grids,
    row,
    runs_of,
    share,
)

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


def measure(options: Options, span: Span) -> dict[str, Any]:
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
        "best_effort": dataclasses.asdict(BeLoad(BE_IN_FLIGHT, batches=True)),
        "real_time": {name: dataclasses.asdict(sizes) for name, sizes in RT_SIZES.items()},
        "policies": {label: dataclasses.asdict(config) for label, config in POLICIES.items()},
        "profiles": {name: _described(name) for name in options.models},
        "runs": runs,
        "real_time_alone": simulate("real-time work alone", alone, span, options),
        "finding_rates": tried,
    }


def _described(name: str) -> dict[str, Any]:
    profile = stored_profile(name)
    return {"kind": profile.kind, "kv_capacity_tokens": profile.kv_capacity_tokens}


def render(results: Results) -> Rendering:
    metrics = (LATENCY, TTFT, TPOT, BE_RATE)
    plots = model_grids(results["runs"], metrics, "beside best-effort batches")
    return Rendering(blocks(results), plots)


# ---- Tables, compared with the paper's numbers.


Pair = tuple[Run, Run]
"""Two runs of the same load under different policies."""


@dataclass(frozen=True, slots=True)
class Gains:
    """One policy compared with another over some loads.

    latency_cut: mean over the loads of 1 - ours / theirs of normalized latency.
    be_loss: likewise of best-effort requests per second.
    ttft_gain, tpot_gain: our mean attainment over theirs; inf if theirs is 0.
    """

    latency_cut: float
    be_loss: float
    ttft_gain: float
    tpot_gain: float

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Gains:
        """pairs: (ours, theirs), at least one."""
        return cls(
            latency_cut=_mean_loss(pairs, "normalized_latency_s"),
            be_loss=_mean_loss(pairs, "be_requests_per_s"),
            ttft_gain=_gain(pairs, "ttft_met"),
            tpot_gain=_gain(pairs, "tpot_met"),
        )


@dataclass(frozen=True, slots=True)
class Target:
    """A target of `bros`: `field` against `base` is at least (a loss: at most) `asked`.

    published: kind of chats -> the paper's mean over rates and models.
    """

    text: str
    field: str
    base: str
    asked: float
    published: Mapping[str, float]

    @property
    def is_loss(self) -> bool:
        return self.field == "be_loss"

    @property
    def is_ratio(self) -> bool:
        return self.field.endswith("_gain")

    def met(self, value: float) -> bool:
        return value <= self.asked if self.is_loss else value >= self.asked

    def show(self, value: float) -> str:
        if math.isnan(value):
            return "-"
        if not self.is_ratio:
            return f"{100 * value:.1f} %"
        return "infinite" if math.isinf(value) else f"{value:.2f}x"

    @property
    def shown_bound(self) -> str:
        bound = f"{self.asked:g}x" if self.is_ratio else f"{100 * self.asked:g} %"
        return ("at most " if self.is_loss else "at least ") + bound


_TPOT_PUBLISHED = {"sharegpt": 1.47, "lmsys": 2.28}
_RR_CUT_PUBLISHED = {"sharegpt": 0.5431, "lmsys": 0.2577}
TARGETS = (
    Target("normalized latency cut", "latency_cut", "fcfs", 0.70,
           {"sharegpt": 0.742, "lmsys": 0.6961}),
    Target("TTFT attainment", "ttft_gain", "fcfs", 10.0, {"sharegpt": 36.38, "lmsys": 21.42}),
    Target("best-effort loss", "be_loss", "fcfs", 0.10, {"sharegpt": 0.1129, "lmsys": 0.1767}),
    Target("normalized latency cut", "latency_cut", "rr", 0.25, _RR_CUT_PUBLISHED),
    Target("TPOT attainment", "tpot_gain", "rr", 1.4, _TPOT_PUBLISHED),
    Target("normalized latency cut", "latency_cut", "rr (no budget)", 0.25, _RR_CUT_PUBLISHED),
    Target("TPOT attainment", "tpot_gain", "rr (no budget)", 1.4, _TPOT_PUBLISHED),
)  # fmt: skip
# Attainments that the paper states: policy, field, kind of chats (None: mean of both), value
PUBLISHED_ATTAINMENTS = (
    ("fcfs", "ttft_met", None, 0.0128),
    ("rr", "ttft_met", None, 0.1055),
    ("rr", "tpot_met", "sharegpt", 0.4734),
    ("rr", "tpot_met", "lmsys", 0.4281),
    ("bros", "tpot_met", "sharegpt", 0.6549),
    ("bros", "tpot_met", "lmsys", 0.7538),
)


def pairs_of(runs: Sequence[Run], ours: str, theirs: str, lengths: str) -> dict[str, list[Pair]]:
    """profile -> pairs of runs of two policies at the same rate, sorted by rate."""
    found = {}
    for profile in dict.fromkeys(run["profile"] for run in runs):
        sides = [
            runs_of(runs, policy=policy, lengths=lengths, profile=profile)
            for policy in (ours, theirs)
        ]
        found[profile] = list(zip(*sides, strict=True))
    return found


def blocks(results: Results) -> dict[str, str]:
    """Name -> Markdown."""
    runs = results["runs"]
    tables = {
        "targets": _target_table(runs, "bros"),
        "targets_paper": _target_table(runs, "bros (paper)"),
        "attainments": _attainment_table(runs),
        "highest": _run_table(runs, highest_only=True),
        "means": _run_table(runs, highest_only=False),
        "alone": _alone_table(results["real_time_alone"]),
    }
    return {name: "\n".join(lines) for name, lines in tables.items()}


def _target_table(runs: Sequence[Run], ours: str) -> Iterator[str]:
    header = ("chats", "asked", "the paper", "mean over rates", "highest rate")
    yield from head(f"{ours} against", "of", *header)
    for target in TARGETS:
        for lengths, name in LENGTHS.items():
            by_model = list(pairs_of(runs, ours, target.base, lengths).values())
            cells = (
                _verdict(target, by_model),
                _verdict(target, [pairs[-1:] for pairs in by_model]),
            )
            published = target.show(target.published[lengths])
            bound = target.shown_bound
            yield row(target.base, target.text, name, bound, published, *cells)


def _verdict(target: Target, by_model: Sequence[Sequence[Pair]]) -> str:
    """The value over all models, whether it meets the target, and how many models do."""
    value = getattr(Gains.of([pair for pairs in by_model for pair in pairs]), target.field)
    each = [target.met(getattr(Gains.of(pairs), target.field)) for pairs in by_model]
    word = "met" if target.met(value) else "**missed**"
    return f"{target.show(value)}, {word} ({sum(each)})"


def _attainment_table(runs: Sequence[Run]) -> Iterator[str]:
    yield from head("policy", "objective", "chats", "the paper", "here")
    for policy, field, lengths, value in PUBLISHED_ATTAINMENTS:
        found = runs_of(runs, policy=policy, **({"lengths": lengths} if lengths else {}))
        here = mean([share(run[field]) for run in found])
        label = "vLLM / fcfs" if policy == "fcfs" else policy
        chats = LENGTHS[lengths] if lengths else "both"
        yield row(
            label, field.removesuffix("_met").upper(), chats, f"{100 * value:.1f} %",
            f"{100 * here:.1f} %",
        )  # fmt: skip


def _run_table(runs: Sequence[Run], *, highest_only: bool) -> Iterator[str]:
    yield from head(
        "model", "chats", "req/s", "policy", "normalized latency s", "TTFT %", "TPOT %",
        "tokens on time %", "RT finished %", "BE req/s", "BE tokens/s", "all tokens/s",
    )  # fmt: skip
    for lengths, chats in LENGTHS.items():
        for profile, model in MODELS.items():
            for policy in STYLES:
                found = runs_of(runs, policy=policy, lengths=lengths, profile=profile)
                if not found:
                    continue
                used = found[-1:] if highest_only else found
                rates = "-".join(
                    f"{r:g}" for r in dict.fromkeys((used[0]["rate"], used[-1]["rate"]))
                )
                yield row(model.split(",")[0], chats, rates, policy, *_figures(used))


def _figures(runs: Sequence[Run]) -> list[str]:
    latencies = [run["normalized_latency_s"] for run in runs]
    shown = [f"{mean(latencies):.4f}" if None not in latencies else "-"]
    for field in ("ttft_met", "tpot_met", "tokens_on_time"):
        shown.append(f"{100 * mean([share(run[field]) for run in runs]):.1f}")
    finished = [run["rt_finished"] / run["rt_requests"] for run in runs]
    shown.append(f"{100 * mean(finished):.1f}")
    shown.append(f"{mean([run['be_requests_per_s'] for run in runs]):.2f}")
    shown.append(f"{mean([run['be_tokens_per_s'] for run in runs]):.0f}")
    everything = [run["rt_tokens_per_s"] + run["be_tokens_per_s"] for run in runs]
    shown.append(f"{mean(everything):.0f}")
    return shown


def _alone_table(runs: Sequence[Run]) -> Iterator[str]:
    yield from head(
        "model", "chats", "req/s", "normalized latency s", "TTFT %", "TPOT %", "step ms"
    )
    for run in runs:
        yield row(
            MODELS[run["profile"]].split(",")[0], LENGTHS[run["lengths"]], f"{run['rate']:g}",
            *_figures([run])[:3], f"{1e3 * run['mean_step_s']:.0f}",
        )  # fmt: skip


def _mean_loss(pairs: Sequence[Pair], field: str) -> float:
    """nan if a run has no such figure because nothing finished."""
    figures = [[run[field] or math.nan for run in pair] for pair in pairs]
    return mean([1 - ours / theirs for ours, theirs in figures])


def _gain(pairs: Sequence[Pair], field: str) -> float:
    ours, theirs = (mean([share(pair[side][field]) for pair in pairs]) for side in (0, 1))
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


PART = Part("settings", "10 and 11", "65 min", FULL, QUICK, measure, render)
