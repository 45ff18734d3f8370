"""One request: how long it took, and whether it met its objectives."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from bros.bench.records import Outcome, Record
from bros.core.request import Slo

_TOLERANCE_S = 1e-9
"""Rounding of differences between times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One request against its objectives; None where there is none, or nothing is decided.

    overdue: ttft_s or tpot_s is the time so far of an open request.
    """

    ttft_s: float | None
    tpot_s: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    both_met: bool | None
    overdue: bool


def judge(record: Record, slo: Slo | None, until_s: float) -> Judged:
    """slo: objectives where the request names none; None judges nothing but gives the times.

    until_s: when the client stopped looking.
    """
    held = held_to(record, slo)
    ttft_s, ttft_met = _first_piece(record, held.ttft_s, until_s)
    tpot_s, tpot_met = _later_pieces(record, held.tpot_s, until_s)
    both_met: bool | None = None
    if ttft_met is False or tpot_met is False:
        both_met = False
    elif record.outcome is Outcome.COMPLETED and held != Slo():
        both_met = True
    is_open = record.outcome is Outcome.OPEN
    no_text = not record.chunk_times_s
    overdue = is_open and ((no_text and ttft_met is False) or tpot_met is False)
    return Judged(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ttft_met=ttft_met,
        tpot_met=tpot_met,
        both_met=both_met,
        overdue=overdue,
    )


def start_s(record: Record) -> float:
    """When it was sent; a request that never was has waited since it came due."""
    return record.due_s if record.sent_s is None else record.sent_s


def finish_s(record: Record) -> float | None:
    """When the last of the answer came; None if nothing did."""
    return record.chunk_times_s[-1] if record.chunk_times_s else record.end_s


def output_tokens(record: Record) -> int:
    return len(record.chunk_times_s) if record.output_tokens is None else record.output_tokens


def gaps_s(record: Record) -> list[float]:
    """Between each piece of text and the next."""
    times = record.chunk_times_s
    return list(map(operator.sub, times[1:], times))


def prompt_tokens(record: Record) -> int:
    planned = record.planned.prompt_tokens
    return planned if record.prompt_tokens is None else record.prompt_tokens


def held_to(record: Record, slo: Slo | None) -> Slo:
    """Its own objectives before those of the run; none at all if the run has none (None)."""
    if slo is None:
        return Slo()
    own = record.planned.slo
    return Slo(
        ttft_s=slo.ttft_s if own.ttft_s is None else own.ttft_s,
        tpot_s=slo.tpot_s if own.tpot_s is None else own.tpot_s,
    )


def _first_piece(
    record: Record, limit_s: float | None, until_s: float
) -> tuple[float | None, bool | None]:
    """Time to the first piece of text and whether that was in time."""
    if record.chunk_times_s:
        seconds = record.chunk_times_s[0] - start_s(record)
        return seconds, _within(seconds, limit_s)
    if record.outcome is Outcome.COMPLETED:
        return None, _within(e2e_s(record), limit_s)  # without text, or not streamed
    if record.outcome is not Outcome.OPEN:
        return None, _missed(limit_s)
    waited = until_s - start_s(record)
    return (waited, False) if _within(waited, limit_s) is False else (None, None)


def _later_pieces(
    record: Record, limit_s: float | None, until_s: float
) -> tuple[float | None, bool | None]:
    """Mean time per token after the first and whether that was in time."""
    times = record.chunk_times_s
    if record.outcome is Outcome.COMPLETED:
        tokens = output_tokens(record)
        if not times or tokens < 2:
            return None, None
        mean = (times[-1] - times[0]) / (tokens - 1)
        return mean, _within(mean, limit_s)
    if record.outcome is not Outcome.OPEN:
        return None, _missed(limit_s)
    if times:
        at_best = (until_s - times[0]) / len(times)  # if the next piece came right now
        if _within(at_best, limit_s) is False:
            return at_best, False
    return None, None


def pieces_on_time(
    record: Record, ttft_met: bool | None, slo: Slo | None, until_s: float
) -> tuple[int, int]:
    """(met, decided) pieces, the next one of a lost or overdue request included."""
    met, decided = int(ttft_met is True), int(ttft_met is not None)
    limit_s = held_to(record, slo).tpot_s
    times = record.chunk_times_s
    if limit_s is None or not times:
        return met, decided
    gaps = gaps_s(record)
    met += sum(gap <= limit_s + _TOLERANCE_S for gap in gaps)
    lost = record.outcome not in (Outcome.COMPLETED, Outcome.OPEN)
    overdue = record.outcome is Outcome.OPEN and not _within(until_s - times[-1], limit_s)
    return met, decided + len(gaps) + int(lost or overdue)


def e2e_s(record: Record) -> float:
    """Of a completed request."""
    end_s = finish_s(record)
    assert end_s is not None, f"{record.planned.name} was completed, but at no time"
    return end_s - start_s(record)


def _within(seconds: float, limit_s: float | None) -> bool | None:
    return None if limit_s is None else seconds <= limit_s + _TOLERANCE_S


def _missed(limit_s: float | None) -> bool | None:
    return None if limit_s is None else False
