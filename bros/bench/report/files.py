"""A comparison as files: JSON, CSV, PNG and HTML."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bros.bench.client import Outcome, Record
from bros.bench.metrics import (
    ATTAINMENTS,
    ClassMetrics,
    Summary,
    Window,
    finish_s,
    judge,
    likely,
    output_tokens,
    prompt_tokens,
)
from bros.bench.report.html import page
from bros.bench.report.plots import LIGHT, figures
from bros.bench.report.words import file_name, ordered
from bros.bench.results import BadResultsError, BenchResult, Scenario, ScenarioResult
from bros.core.request import ServiceClass, Slo

Row = dict[str, Any]

_SUMMARIES = ("ttft", "tpot", "itl", "normalized_latency", "e2e")
_STATISTICS = ("mean", "std", "p50", "p90", "p95", "p99")
_SHARES = (*ATTAINMENTS, "tokens_on_time")
_PLAIN = (
    *("requests", "outside", "unsent", "relegated", "overdue", "goodput_per_s", "requests_per_s"),
    *("prompt_tokens_per_s", "output_tokens_per_s", "tokens_per_s"),
    *("prompt_tokens", "output_tokens", "cached_tokens"),
)
REQUEST_COLUMNS = (
    *("name", "class", "outcome", "status", "tier", "finish_reason", "due_s", "sent_s"),
    *("first_s", "last_s", "end_s", "prompt_tokens", "output_tokens", "cached_tokens", "pieces"),
    *("ttft_s", "tpot_s", "ttft_met", "tpot_met", "both_met", "in_window", "detail"),
)


def write_report(folder: Path, bench: BenchResult) -> list[Path]:
    """result.json, summary.csv, report.html and a PNG for each plot; returns their paths.

    Makes the folder. Files of the same names are replaced. Plots and requests of runs that are
    gone are removed if the result.json that was there lists them. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plots = {f"{name}.png": figure for name, figure in figures(bench, LIGHT).items()}
    files = (*plots, *(requests_file_name(result) for result in bench.results))
    for name in _listed(folder) - set(files):
        (folder / name).unlink(missing_ok=True)
    texts = {"result.json": replace(bench, files=files).to_json(), "report.html": page(bench)}
    paths = []
    for name, text in texts.items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    paths.append(write_summary(folder / "summary.csv", bench))
    for name, figure in plots.items():
        paths.append(folder / name)
        figure.savefig(paths[-1])
    return paths


def read_result(folder: Path) -> BenchResult:
    """Raises OSError, UnicodeDecodeError or BadResultsError."""
    return BenchResult.from_json((folder / "result.json").read_text(encoding="utf-8"))


def _listed(folder: Path) -> set[str]:
    """Files that an earlier report in the folder says are its own."""
    try:
        names = read_result(folder).files
    except (OSError, UnicodeDecodeError, BadResultsError):
        return set()
    return {name for name in names if re.fullmatch(r"[A-Za-z0-9_.-]+\.(png|csv)", name)}


def write_summary(path: Path, bench: BenchResult) -> Path:
    """A line per run and class. Nothing is an empty cell."""
    rows = [
        _summary_row(bench, result, service_class)
        for result in ordered(bench)
        for service_class in ServiceClass
    ]
    return _write(path, rows, list(rows[0]) if rows else [])


def write_requests(path: Path, records: Sequence[Record], slo: Slo, window: Window) -> Path:
    """A line per request of one run, in or outside the window. Nothing is an empty cell."""
    return _write(path, [_request_row(record, slo, window) for record in records], REQUEST_COLUMNS)


def requests_file_name(result: ScenarioResult) -> str:
    """`requests_S3_bros_0.5.csv`: unlike that of any other run of one server."""
    parts = (result.scenario, result.target, result.policy, result.rt_rate)
    text = "_".join(str(part) for part in parts if part is not None)
    return f"requests_{file_name(text)}.csv"


def _summary_row(bench: BenchResult, result: ScenarioResult, service_class: ServiceClass) -> Row:
    part = result.metrics.by_class[service_class]
    best_effort = service_class is ServiceClass.BE
    return {
        "scenario": result.scenario.value,
        "label": result.scenario.label,
        "target": result.target,
        "dialect": result.dialect,
        "policy": result.policy,
        "rt_rate": result.rt_rate,
        "class": service_class.value,
        **_class_cells(part),
        "be_share_of_s1": bench.be_efficiency(result, Scenario.S1) if best_effort else None,
        "be_share_of_s2": bench.be_efficiency(result, Scenario.S2) if best_effort else None,
        "client_fell_behind": result.client.fell_behind,
        "client_cpu_share": result.client.cpu_share,
        "rt_digest": result.rt_digest,
        "be_digest": result.be_digest,
        "slo_ttft_s": result.command.slo.ttft_s,
        "slo_tpot_s": result.command.slo.tpot_s,
        "seed": result.command.seed,
        "date": result.command.environment.date,
        "commit": result.command.environment.commit,
        "server_version": result.server_version,
    }


def _class_cells(part: ClassMetrics) -> Row:
    row: Row = {name: getattr(part, name) for name in _PLAIN}
    row |= {outcome.value: part.outcomes[outcome] for outcome in Outcome}
    for name in _SHARES:
        share = getattr(part, name)
        row |= {name: share.met, f"{name}_of": share.decided}
        if name in ATTAINMENTS:
            low, high = likely(share) or (None, None)
            row |= {f"{name}_low": low, f"{name}_high": high}
    for name in _SUMMARIES:
        summary: Summary = getattr(part, f"{name}_s")
        row |= {f"{name}_{which}_s": getattr(summary, which) for which in _STATISTICS}
    return row


def _request_row(record: Record, slo: Slo, window: Window) -> Row:
    real_time = record.planned.service_class is ServiceClass.RT
    judged = judge(record, slo if real_time else None, window.until_s)
    times = record.chunk_times_s
    return {
        "name": record.planned.name,
        "class": record.planned.service_class.value,
        "outcome": record.outcome.value,
        "status": record.status,
        "tier": record.tier,
        "finish_reason": record.finish_reason,
        "due_s": record.due_s,
        "sent_s": record.sent_s,
        "first_s": times[0] if times else None,
        "last_s": finish_s(record) if times else None,
        "end_s": record.end_s,
        "prompt_tokens": prompt_tokens(record),
        "output_tokens": output_tokens(record),
        "cached_tokens": record.cached_tokens,
        "pieces": len(times),
        "ttft_s": judged.ttft_s,
        "tpot_s": judged.tpot_s,
        "ttft_met": judged.ttft_met,
        "tpot_met": judged.tpot_met,
        "both_met": judged.both_met,
        "in_window": record.due_s in window,
        "detail": record.detail,
    }


def _write(path: Path, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path
