"""Figure 13 on the real engine: the embedded model in fp32 with little KV memory, in process.

The load is that of hybrid_load.py. KV memory holds a third of what the best-effort requests in
flight would use, so that real-time requests preempt them all the time. Each kind of memory
management runs twice, alternating, because the speed of the machine varies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import hybrid_load
from paper_common import Options, Part, Rendering, Results, Span, rounded
from paper_drawing import Run, head, mean, row
from paper_memory import BASE, KINDS, OURS, bars, table
from rich.console import Console

from bros.core.config import EngineConfig
from bros.executor.model_store import default_cache_dir, resolve_model

RATE, LONGEST_PROMPT = 0.25, 200
KV_BLOCKS, HOST_KV_BLOCKS = 300, 1200
ROUNDS = 2
FULL, QUICK = Span(120.0, 0.0), Span(15.0, 0.0)
_KINDS = (BASE, "plain + checkpoint", OURS)


def measure(options: Options, span: Span) -> dict[str, Any]:
    """All runs, one after the other on the same executor, and everything that determines them."""
    console = Console(stderr=True)
    files = resolve_model(None, default_cache_dir(), console.print)
    config = EngineConfig(
        weights="fp32", max_model_len=2048, kv_blocks=KV_BLOCKS, host_kv_blocks=HOST_KV_BLOCKS,
        prefix_cache="off",
    )  # fmt: skip
    executor, info, model = hybrid_load.load(config, files, console.print)
    found = hybrid_load.arrivals(RATE, span.duration_s, options.seed, LONGEST_PROMPT)
    runs = []
    for number in range(1 if options.quick else ROUNDS):
        for kind in _KINDS:
            console.print(f"{kind}, round {number + 1}: {span.duration_s:g} s", style="dim")
            result = hybrid_load.run(
                executor, info, model, dataclasses.replace(config, **KINDS[kind]), found,
                hybrid_load.IN_FLIGHT, options.seed, span.duration_s,
            )  # fmt: skip
            runs.append({"kind": kind, "round": number + 1, **_kept(result)})
    executor.close()
    return {"kv_blocks": KV_BLOCKS, "runs": runs}


def _kept(result: dict[str, Any]) -> dict[str, Any]:
    """The record of a run, with the field names of simulated runs."""
    rt, be = result["rt"], result["be"]
    kept: dict[str, Any] = {"lengths": "lmsys", "rate": RATE}
    for name in ("ttft_met", "tpot_met", "both_met"):
        kept[name] = [rt[name]["met"], rt[name]["decided"]]
    return {
        **kept,
        "rt_requests": rt["requests"],
        "be_tokens_per_s": rounded(be["tokens_per_s"]),
        "rt_preemptions": rt["preemptions"],
        "be_preemptions": be["preemptions"],
        "kv_tokens": result["kv_tokens"],
        "mean_step_s": rounded(result["mean_step_s"]),
    }


def render(results: Results) -> Rendering:
    machine, blocks = results["environment"], results["kv_blocks"]
    title = f"{blocks} blocks of KV memory, {machine['cores']} cores of {machine['cpu']}"
    runs = _summed(results["runs"])
    moved = "\n".join(_moved(runs))
    return Rendering(
        {"table": "\n".join(table(runs, OURS)), "moved": moved},
        {"bars": (title, bars(runs, title))},
    )


def _summed(runs: Sequence[Run]) -> list[Run]:
    """One run per kind, summed over its rounds."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        total = found.setdefault(run["kind"], {"kind": run["kind"], "rounds": []})
        total["rounds"].append(run)
    return [_one(total["kind"], total["rounds"]) for total in found.values()]


def _one(kind: str, rounds: Sequence[Run]) -> Run:
    one: dict[str, Any] = {"kind": kind, "lengths": "lmsys", "rate": RATE}
    for name in ("ttft_met", "tpot_met", "both_met"):
        one[name] = [sum(run[name][i] for run in rounds) for i in (0, 1)]
    one["be_tokens_per_s"] = mean([run["be_tokens_per_s"] for run in rounds])
    for name in ("rt_preemptions", "be_preemptions"):
        one[name] = sum(run[name] for run in rounds)
    tokens = [run["kv_tokens"] for run in rounds]
    one["kv_tokens"] = {name: sum(counts[name] for counts in tokens) for name in tokens[0]}
    return one


def _moved(runs: Sequence[Run]) -> Iterator[str]:
    yield from head("memory", "tokens taken from best-effort", "copied to the host", "brought back")
    for run in runs:
        yield row(
            run["kind"], *(str(run["kv_tokens"][name]) for name in ("taken", "copied", "restored"))
        )


PART = Part(
    "tight",
    "13, measured",
    "14 min, with nothing else on the machine",
    FULL,
    QUICK,
    measure,
    render,
)
