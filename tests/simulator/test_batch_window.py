"""A batch beside chats: streams near their own pace if its window is far, as fast as possible if
not."""

from __future__ import annotations

import statistics

import pytest

from bros.workload.arrivals import Arrival, PoissonLoad, Size
from support.batch_run import BatchRun, run_batch

SECONDS, ROWS = 120.0, 60
OFF = 1000.0


def chats() -> list[Arrival]:
    found = PoissonLoad(0.25, "lmsys").arrivals(SECONDS, 1)
    return [
        Arrival(a.time_s, Size(min(a.size.prompt_tokens, 200), a.size.output_tokens)) for a in found
    ]


def run(window_s: float, rows: int = ROWS, **options: object) -> BatchRun:
    return run_batch(chats(), rows=rows, window_s=window_s, duration_s=SECONDS, **options)  # type: ignore[arg-type]


def slowdown(found: BatchRun) -> float:
    """The median of the chats beside the batch."""
    return statistics.median(
        record.slowdown
        for record in found.result.records
        if record.slowdown is not None and record.arrival_s < found.until_s
    )


def test_a_batch_with_an_ample_window_leaves_chats_near_their_pace() -> None:
    alone, beside = run(1e6, rows=1), run(600.0)
    assert beside.ended_s is not None and beside.ended_s < 600.0
    paces = [statistics.median(found.paces(beside.ended_s)) for found in (alone, beside)]
    assert paces[1] <= 1.5 * paces[0]
    assert slowdown(beside) == pytest.approx(1.4, abs=0.03)


@pytest.mark.parametrize("of_fastest", [1.03, 1.3, 1.8])
def test_the_tighter_the_window_the_faster_the_batch(of_fastest: float) -> None:
    fastest = run(1e6, rt_slowdown=OFF)
    assert fastest.ended_s is not None
    window_s = of_fastest * fastest.ended_s
    found = run(window_s)
    assert found.ended_s is not None and found.ended_s <= window_s
    if of_fastest < 1.1:
        assert found.ended_s <= 1.02 * fastest.ended_s, "as without a target"
    assert 1.3 <= slowdown(found) <= 1.02 * slowdown(fastest)


def test_each_batch_has_its_own_target() -> None:
    found = [run(600.0, rt_slowdown=target) for target in (1.2, 3.0)]
    assert slowdown(found[0]) <= 1.2 < 2.0 < slowdown(found[1])
    assert found[1].until_s < found[0].until_s
