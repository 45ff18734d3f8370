"""A comparison as one page that needs nothing else: no scripts, no fonts, pictures inside."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from matplotlib.figure import Figure

from bros.bench.metrics import ClassMetrics, Summary
from bros.bench.report.plots import DARK, LIGHT, figures
from bros.bench.report.terminal import COLUMNS, cells
from bros.bench.report.words import (
    CLASS_NAMES,
    NOTHING,
    all_objectives,
    capacity,
    counts,
    likely_percent,
    ms,
    name_of,
    objectives,
    ordered,
    percent,
    ratio,
    server_name,
    short_name,
    verdict,
    warnings,
)
from bros.bench.results import BenchResult, Command, Scenario, ScenarioResult

# ---- How the page looks, on light and dark screens, wide and narrow ones.


STYLE = """
:root{--ink:#1c2024;--dim:#5a626b;--paper:#fff;--line:#d9dde2;--soft:#f4f6f8;--warn:#fff4e0;
--edge:#e69f00}
@media (prefers-color-scheme:dark){:root{--ink:#e6e8eb;--dim:#a0a8b1;--paper:#16191d;
--line:#34393f;--soft:#1f242a;--warn:#33290f;--edge:#e69f00}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1150px;margin:0 auto;padding:1.2rem}
h1{font-size:clamp(1.2rem,3.2vw,1.7rem);line-height:1.35;margin:.4rem 0 .8rem}
h2{font-size:1.15rem;margin:2rem 0 .5rem}
h4{margin:1rem 0 .2rem}
p,ul{margin:.3rem 0;max-width:54rem}
ul{padding-left:1.2rem}
.lead{font-size:1.05rem}
.warnings{background:var(--warn);border-left:4px solid var(--edge);padding:.6rem 1rem;
margin:1rem 0;border-radius:4px;overflow-wrap:anywhere}
.warnings h2{margin:0 0 .2rem;font-size:1rem}
.wide{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .7rem;text-align:right;border-bottom:1px solid var(--line);
vertical-align:bottom}
thead th{color:var(--dim);font-weight:600;min-width:4.2rem}
tbody th{font-weight:500;white-space:nowrap}
th:first-child{text-align:left;position:sticky;left:0;background:var(--paper)}
.start th,.start td{border-top:2px solid var(--dim)}
.figures td{white-space:nowrap}
.settings td,.settings th{text-align:left;vertical-align:top}
.settings td{max-width:22rem;overflow-wrap:anywhere}
.marked td,.marked th{background:var(--soft)}
.marked td{font-weight:600}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,24rem),1fr));
gap:1rem;align-items:start}
.plots img{width:100%;height:auto;border:1px solid var(--line);border-radius:6px;display:block}
details{border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem;margin:.4rem 0}
summary{cursor:pointer;font-weight:600}
"""


# ---- How the runs of a report were made: a table with a column for each command.


class Row(NamedTuple):
    """values: one for each command, in their order."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        return len(set(self.values)) > 1


def rows_of_commands(bench: BenchResult) -> list[Row]:
    """Runs first, then where and with what, then the options; nothing is a dash."""
    columns = [dict(_column(bench, command)) for command in bench.commands]
    names = dict.fromkeys(name for column in columns for name in column)
    return [Row(name, tuple(column.get(name, NOTHING) for column in columns)) for name in names]


def _column(bench: BenchResult, command: Command) -> Iterator[tuple[str, str]]:
    environment = command.environment
    memory = environment.memory_bytes
    runs = [run for run in ordered(bench) if run.command == command]
    versions = {f"{run.target} {run.server_version}": None for run in runs if run.server_version}
    yield "runs", _names(bench, runs)
    yield "date", environment.date
    yield "server says", ", ".join(versions) or NOTHING
    yield "client", f"bros {environment.bros}"
    yield "commit", _short(environment.commit)
    yield "Python", environment.python
    yield "packages", ", ".join(" ".join(item) for item in environment.packages.items()) or NOTHING
    yield "processor", environment.cpu
    yield "cores", str(environment.cores)
    yield "memory", NOTHING if memory is None else f"{memory / 2**30:.1f} GiB"
    yield "objectives", objectives(command.slo)
    yield "seed", str(command.seed)
    for name, value in command.settings.items():
        if name != "--seed":
            yield name, NOTHING if value is None else str(value)


def _names(bench: BenchResult, runs: Sequence[ScenarioResult]) -> str:
    """`S3 bros at 0.1, 0.2/s; S2 fcfs`."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        found = rates.setdefault(short_name(bench, run), [])
        found += [] if run.rt_rate is None else [run.rt_rate]
    return "; ".join(
        f"{name} at {', '.join(f'{rate:g}' for rate in found)}/s" if found else name
        for name, found in rates.items()
    )


def _short(commit: str | None) -> str:
    """As much of it as names it; the plus of a changed tree stays."""
    if commit is None:
        return NOTHING
    return commit.rstrip("+")[:12] + "+" * commit.endswith("+")


_DEFINITIONS = """Objectives count as missed for requests that were refused, failed or cut short,
and for those that were still open and overdue at the end. TTFT: sent to first token. TPOT: mean
time per token after the first. ITL: each gap between pieces of text. Latency per token: sent to
last token, by output tokens. Counts and latencies are of requests that came due in the window,
rates of what happened in it. Percentiles are interpolated linearly. 95 % likely: Wilson's interval
of the share, for requests that are late independently of each other; after a burst the truth is
wider. All times are by the client's clock."""


def page(bench: BenchResult) -> str:
    """Complete HTML with pictures for light and dark screens."""
    return "\n".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(', '.join(['bros bench', *_dates(bench)[-1:]]))}</title>",
            f"<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            *_body(bench),
            "</main>\n</body>\n</html>\n",
        )
    )


def _dates(bench: BenchResult) -> list[str]:
    return sorted(command.environment.date for command in bench.commands)


def _body(bench: BenchResult) -> Iterator[str]:
    yield f"<h1>{escape(verdict(bench))}</h1>"
    for found in bench.capacities:
        yield f'<p class="lead">{escape(capacity(bench, found))}</p>'
    yield f"<p>Objectives of real-time requests: {escape(all_objectives(bench))}.</p>"
    if texts := warnings(bench):
        yield f'<section class="warnings"><h2>Warnings</h2>{_items(texts)}</section>'
    yield from _pictures(bench)
    yield "<h2>Runs</h2>"
    yield _runs(bench)
    yield _items(f"{s}: {s.label}" for s in Scenario if any(r.scenario is s for r in bench.results))
    if bench.capacities:
        yield "<h2>Capacity</h2>"
        yield from _capacities(bench)
    if taxes := _taxes(bench):
        yield "<h2>What company costs</h2>"
        yield "<p>Real-time requests beside best-effort work, minus real-time requests alone.</p>"
        yield taxes
    yield "<h2>Details</h2>"
    for result in ordered(bench):
        yield _details(bench, result)
    yield f"<h2>How it was measured</h2>\n<p>{_DEFINITIONS}</p>"
    yield _commands(bench)


def _runs(bench: BenchResult) -> str:
    """A line between rates."""
    runs = ordered(bench)
    rows = [(name_of(bench, run), *cells(bench, run)) for run in runs]
    rates = [run.rt_rate for run in runs]
    starts = [n for n in range(1, len(runs)) if rates[n] != rates[n - 1]]
    head = ("run", *(column.replace("\n", " ") for column in COLUMNS))
    return _table(head, rows, starts=starts)


def _pictures(bench: BenchResult) -> Iterator[str]:
    """What was measured first, then what servers say of themselves."""
    light, dark = figures(bench, LIGHT), figures(bench, DARK)
    for heading, timelines in (("Plots", False), ("Inside the servers", True)):
        names = [name for name in light if name.startswith("timeline") == timelines]
        if names:
            yield f'<h2>{heading}</h2>\n<div class="plots">'
            yield from (_picture(light[name], dark[name]) for name in names)
            yield "</div>"


def _picture(light: Figure, dark: Figure) -> str:
    return (
        '<picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{_png(dark)}"><img src="{_png(light)}" '
        f'alt="{escape(light.get_suptitle())}; the figures are in the tables"></picture>'
    )


def _png(figure: Figure) -> str:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _capacities(bench: BenchResult) -> Iterator[str]:
    for found in bench.capacities:
        name = server_name(bench, found.target, found.policy)
        yield f"<p>{escape(name)}, asked for {100 * found.asked:g} %:</p>"
        rows = [
            (
                f"{tried.rate:g}",
                percent(tried.both_met),
                likely_percent(tried.both_met),
                str(tried.both_met.decided),
                "yes" if tried.keeps(found.asked) else "no",
            )
            for tried in found.tried
        ]
        head = ("real-time requests/s", "both met %", "95 % likely", "decided", "good enough")
        yield _table(head, rows)


def _taxes(bench: BenchResult) -> str:
    rows = []
    for result in ordered(bench):
        tax = bench.rt_tax(result) if result.scenario.mixed else None
        if tax is not None:
            points = NOTHING if tax.both_met is None else f"{100 * tax.both_met:+.1f}"
            times = (tax.ttft_p50_s, tax.ttft_p99_s, tax.tpot_p50_s, tax.tpot_p99_s)
            shares = (bench.be_efficiency(result, base) for base in (Scenario.S1, Scenario.S2))
            rows.append((name_of(bench, result), points, *map(ms, times), *map(ratio, shares)))
    head = (
        *("run", "both met, points", "TTFT p50 ms", "TTFT p99 ms", "TPOT p50 ms", "TPOT p99 ms"),
        *("BE of S1 %", "BE of S2 %"),
    )
    return _table(head, rows) if rows else ""


def _details(bench: BenchResult, result: ScenarioResult) -> str:
    client = result.client
    version = f"version {result.server_version}, " if result.server_version else ""
    sent = (("real-time", result.rt_digest), ("best-effort", result.be_digest))
    digests = ", ".join(f"{kind} {digest[:12]}" for kind, digest in sent if digest) or NOTHING
    texts = [
        f"{result.scenario.label}; server {result.target}, {version}spoken to as {result.dialect}",
        f"Requests sent: {digests}",
        f"Client: sent {ms(client.lateness_p50_s)} ms late at the median, "
        f"{ms(client.lateness_p99_s)} ms at p99, {ms(client.lateness_max_s)} ms at most; "
        f"{100 * client.cpu_share:.1f} % of the cores",
    ]
    loads = [load for load in (result.rt_load, result.be_load) if load]
    texts += [f"Load: {'; '.join(loads)}"] if loads else []
    parts = [_items(texts)]
    for service_class, part in result.metrics.by_class.items():
        if part.requests:
            parts.append(f"<h4>{CLASS_NAMES[service_class].capitalize()}</h4>")
            parts.append(_items(_class_texts(part)))
            parts.append(_latencies(part))
    name = escape(name_of(bench, result))
    return f"<details><summary>{name}</summary>\n{''.join(parts)}</details>"


def _class_texts(part: ClassMetrics) -> Iterator[str]:
    yield f"{part.requests} requests in the window: {counts(part)}"
    yield (
        f"{part.requests_per_s:.3g} requests/s, {part.prompt_tokens_per_s:.0f} prompt and "
        f"{part.output_tokens_per_s:.0f} output tokens/s"
    )
    if part.goodput_per_s is not None:
        yield f"Goodput: {part.goodput_per_s:.3g} requests/s within their objectives"
    if part.tokens_on_time.decided:
        yield f"{percent(part.tokens_on_time)} % of tokens within the objective of their own"
    if part.cached_tokens is not None:
        yield f"{part.cached_tokens} of {part.prompt_tokens} prompt tokens were cached"
    if part.tiers:
        found = ", ".join(f"{count} x {tier}" for tier, count in part.tiers.items())
        yield f"Service tiers named by the answers: {found}"


def _latencies(part: ClassMetrics) -> str:
    summaries = (
        ("TTFT", part.ttft_s),
        ("TPOT", part.tpot_s),
        ("ITL", part.itl_s),
        ("latency per token", part.normalized_latency_s),
        ("end to end", part.e2e_s),
    )
    rows = [(name, str(summary.count), *_statistics(summary)) for name, summary in summaries]
    return _table(("ms", "count", "mean", "std", "p50", "p90", "p95", "p99"), rows)


def _statistics(summary: Summary) -> tuple[str, ...]:
    values = (summary.mean, summary.std, summary.p50, summary.p90, summary.p95, summary.p99)
    return tuple(map(ms, values))


def _commands(bench: BenchResult) -> str:
    """What differs between commands stands out."""
    rows = rows_of_commands(bench)
    names = [f"command {number}" for number in range(1, 1 + len(bench.commands))]
    head = ("made by", *(names if len(names) > 1 else ["command"] * len(names)))
    marked = [number for number, row in enumerate(rows) if row.differs]
    return _table(head, [(row.name, *row.values) for row in rows], kind="settings", marked=marked)


def _items(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    kind: str = "figures",
    starts: Sequence[int] = (),
    marked: Sequence[int] = (),
) -> str:
    """The first cell of a row says what the row is about. starts: rows that begin a group."""
    classes = {**dict.fromkeys(marked, " class=marked"), **dict.fromkeys(starts, " class=start")}
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = (
        f"<tr{classes.get(number, '')}>"
        f'<th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for number, (first, *rest) in enumerate(rows)
    )
    return (
        f'<div class="wide"><table class="{kind}"><thead><tr>{names}</tr></thead>\n<tbody>'
        + "\n".join(lines)
        + "</tbody></table></div>"
    )
