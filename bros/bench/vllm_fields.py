"""The names under which `vllm bench serve` saves its figures, and its definitions of them.

They are of completed requests only: a request that failed or was still open is in `failed` or
`open` and in no latency. Our own figures beside them leave nothing out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bros.bench.judging import e2e_s, gaps_s, judge, output_tokens, prompt_tokens
from bros.bench.records import Outcome, Record
from bros.bench.summary import Summary

Fields = dict[str, float | None]

_COUNTS = ("completed", "failed", "open", "total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
_STATISTICS = {
    "mean": "mean",
    "median": "p50",
    "std": "std",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
}
_LATENCIES = ("ttft", "tpot", "itl", "e2el")
NAMES = (
    "duration",
    *_COUNTS,
    *_RATES,
    *(f"{statistic}_{latency}_ms" for latency in _LATENCIES for statistic in _STATISTICS),
)
"""All of them, in their order."""


def vllm_fields(
    records: Sequence[Record],
    *,
    duration_s: float,
    requests_per_s: float,
    goodput_per_s: float | None,
    prompt_tokens_per_s: float,
    output_tokens_per_s: float,
) -> Fields:
    """All NAMES; None where there is nothing. The rates are taken as they are given."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    still_open = sum(record.outcome is Outcome.OPEN for record in records)
    fields: Fields = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(records) - len(completed) - still_open,
        "open": still_open,
        "total_input_tokens": sum(map(prompt_tokens, completed)),
        "total_output_tokens": sum(map(output_tokens, completed)),
        "request_throughput": requests_per_s,
        "request_goodput": goodput_per_s,
        "output_throughput": output_tokens_per_s,
        "total_token_throughput": prompt_tokens_per_s + output_tokens_per_s,
    }
    judged = [judge(record, None, math.inf) for record in completed]
    summaries = (
        Summary.of([j.ttft_s for j in judged if j.ttft_s is not None]),
        Summary.of([j.tpot_s for j in judged if j.tpot_s is not None]),
        Summary.of([gap for record in completed for gap in gaps_s(record)]),
        Summary.of([e2e_s(record) for record in completed]),
    )
    for latency, summary in zip(_LATENCIES, summaries, strict=True):
        for name, statistic in _STATISTICS.items():
            seconds: float | None = getattr(summary, statistic)
            fields[f"{name}_{latency}_ms"] = None if seconds is None else 1e3 * seconds
    return fields
