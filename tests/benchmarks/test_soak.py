"""benchmarks/soak.py: it finds what it is to find. The run itself is in test_quick.py."""

from __future__ import annotations

import copy
import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ERROR = {"message": "No engine.", "type": "server_error", "param": None}
UNAVAILABLE = {"error": ERROR | {"code": "engine_unavailable"}}


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("soak")


def row(name: str, tokens: int, status: int = 200, **error: Any) -> str:
    body = {"usage": {"completion_tokens": tokens}, "choices": [{"finish_reason": "length"}]}
    response = {"status_code": status, "body": {"error": error} if error else body}
    return json.dumps({"custom_id": name, "response": response, "error": None})


# Answers


def test_an_error_that_lost_engines_cause_is_a_failure(soak: ModuleType) -> None:
    assert soak.judge(503, UNAVAILABLE, {"Retry-After": "5"}).code == "engine_unavailable"
    assert soak.judge(None, UNAVAILABLE, {}).code == "engine_unavailable"


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (503, UNAVAILABLE, {}),
        (500, UNAVAILABLE, {"retry-after": "5"}),
        (500, {"error": ERROR | {"code": "internal_error"}}, {}),
        (None, {"error": ERROR | {"code": "engine_error"}}, {}),
        (400, {"error": ERROR | {"code": "invalid_value"}}, {}),
        (503, {"error": {"message": "No engine."}}, {"retry-after": "5"}),
        (503, {"detail": "No engine."}, {"retry-after": "5"}),
        (503, "<html>", {"retry-after": "5"}),
    ],
)
def test_other_errors_break_the_run(
    soak: ModuleType, status: int | None, body: object, headers: dict[str, str]
) -> None:
    with pytest.raises(soak.Broken):
        soak.judge(status, body, headers)


@pytest.mark.parametrize(("tokens", "reason"), [(23, "length"), (25, "length"), (24, "stop")])
def test_a_part_of_an_answer_breaks_the_run(soak: ModuleType, tokens: int, reason: str) -> None:
    with pytest.raises(soak.Broken):
        soak.check_complete(
            {"usage": {"completion_tokens": tokens}, "choices": [{"finish_reason": reason}]}
        )


def test_rows_have_one_outcome_each(soak: ModuleType) -> None:
    lost = row("b", 0, 503, **ERROR, code="engine_unavailable")
    assert soak.judge_rows(["a", "b"], [row("a", soak.TOKENS), lost]) == {
        "complete": 1,
        "engine_unavailable": 1,
    }


@pytest.mark.parametrize("names", [("a",), ("a", "b", "b"), ("a", "c"), ("a", "b", "c")])
def test_a_row_that_is_lost_or_there_twice_breaks_the_run(
    soak: ModuleType, names: tuple[str, ...]
) -> None:
    with pytest.raises(soak.Broken):
        soak.judge_rows(["a", "b"], [row(name, soak.TOKENS) for name in names])


# What is held


def process(pid: int = 1, **figures: Any) -> dict[str, Any]:
    return {"pid": pid, "rss_mib": 100.0, "descriptors": 40, "threads": 10, **figures}


def sample(soak: ModuleType, **figures: Any) -> dict[str, Any]:
    held = dict.fromkeys(soak.HELD, 3)
    return {"at_s": 0.0, **held, "server": process(), "engines": {"0": process(2)}, **figures}


def test_nothing_is_left_of_a_run_that_ends_as_it_began(soak: ModuleType) -> None:
    before = sample(soak)
    after = sample(soak, kv_blocks=0, engines={"0": process(7, rss_mib=500.0, descriptors=48)})
    assert soak.differences(before, after) == []


def test_everything_that_is_left_is_named(soak: ModuleType) -> None:
    before = sample(soak)
    for name in soak.HELD:
        assert soak.differences(before, sample(soak, **{name: 4})) == [f"{name}: 3 before, 4 after"]
    more = sample(soak, server=process(descriptors=49, threads=19))
    assert len(soak.differences(before, more)) == 2
    assert soak.differences(before, sample(soak, engines={})) == ["engine 0 does not run"]


# Memory


def test_the_slope_is_the_median_of_all_slopes(soak: ModuleType) -> None:
    line = [(x, 2.0 * x) for x in range(20)]
    assert soak.theil_sen(line) == 2.0
    assert soak.theil_sen([*line[:5], (5, 1000.0), *line[6:]]) == 2.0, "an outlier does not count"
    assert soak.theil_sen(line[:1]) is None


def test_a_process_that_grows_is_found(soak: ModuleType) -> None:
    """Only its own second half counts: growth at the start, and that of others, does not."""
    rng = random.Random(1)
    samples = []
    for second in range(0, 3600, 10):
        noise = rng.uniform(-3, 3)
        start = min(second, 600) / 10
        engine = process(2 if second < 1200 else 3, rss_mib=1000 + noise + 0.1 * second / 3.6)
        server = process(1, rss_mib=100 + start + noise)
        samples.append(sample(soak, at_s=float(second), server=server, engines={"0": engine}))
    server, long, short = soak.growths(soak.lives(samples))
    assert not server.too_steep and server.at_most == soak.GROWTH_MIB_PER_H["server"]
    assert (long.process, long.lives) == ("engine 0", 1) and long.too_steep
    assert long.mib_per_h == pytest.approx(100, rel=0.1)
    assert (short.lives, short.at_most) == (1, soak.GROWTH_MIB_PER_H["engine"])


def lives_of_engines(
    soak: ModuleType, *, mib_per_h: float = 0.0, **figures: Callable[[int, int], float]
) -> list[dict[str, Any]]:
    """Samples of an hour, in which an engine is replaced every 150 s. `figures` are functions of
    the number of a life and its age in seconds; mib_per_h: growth in each life."""
    rng = random.Random(1)
    samples = []
    for second in range(0, 3600, 5):
        life, age_s = divmod(second, 150)
        values = {name: value(life, age_s) for name, value in figures.items()}
        rss_mib = values.pop("rss_mib", 740.0) + min(age_s, 80) + rng.uniform(-4, 4)
        rss_mib += mib_per_h * age_s / 3600
        own = {name: values.pop(name) for name in soak.SLACK if name in values}
        held = {"at_s": float(second), "up": 2, "open_requests": second % 3 and 5, **values}
        engine = process(100 + life, rss_mib=rss_mib, **own)
        samples.append(sample(soak, **held, engines={"0": engine}))
    return samples


def test_short_lives_are_judged_together(soak: ModuleType) -> None:
    """None of them is long enough alone, and all fill their cache at the start."""
    for mib_per_h, steep in ((0.0, False), (100.0, True)):
        samples = lives_of_engines(soak, mib_per_h=mib_per_h)
        _, engines = soak.growths(soak.lives(samples))
        assert engines.lives == 24 and engines.at_most is not None
        assert engines.too_steep == steep
    few = [each for each in samples if each["at_s"] < 600]
    assert soak.growths(soak.lives(few))[1].at_most is None


@pytest.mark.parametrize(
    ("grows", "figures"),
    [
        ([], {}),
        (["MiB of an engine"], {"rss_mib": lambda life, age_s: 700 + 3 * life}),
        (["descriptors of an engine"], {"descriptors": lambda life, age_s: 24 + life}),
        (["threads of an engine"], {"threads": lambda life, age_s: 9 + life}),
        (["kv blocks of the server"], {"kv_blocks": lambda life, age_s: life // 8}),
        (["tasks of the server"], {"tasks": lambda life, age_s: 17 + life // 2}),
        # What is large only while there is work, in one life, or before the cache is full.
        ([], {"kv_blocks": lambda life, age_s: 50 * (age_s % 15 > 0)}),
        ([], {"descriptors": lambda life, age_s: 24 + 20 * (life == 12)}),
        ([], {"rss_mib": lambda life, age_s: 740 + 20 * life * (age_s < 60)}),
    ],
)
def test_an_engine_that_has_more_than_those_before_it_is_found(
    soak: ModuleType, grows: list[str], figures: dict[str, Callable[[int, int], float]]
) -> None:
    samples = lives_of_engines(soak, **figures)
    trends = soak.at_the_same_age(soak.lives(samples))
    assert [trend.figure for trend in trends if trend.rises] == grows
    assert all(len(trend.points) == 23 for trend in trends), "the first began before the run"


def test_few_lives_are_not_compared(soak: ModuleType) -> None:
    samples = lives_of_engines(soak, descriptors=lambda life, age_s: 24 + 50 * life)
    few = [each for each in samples if each["at_s"] < 900]
    assert all(trend.rise is None for trend in soak.at_the_same_age(soak.lives(few)))
    assert soak.at_the_same_age(soak.lives([])) and soak.part_by_part([]) == []


@pytest.mark.parametrize("name", ["kv_blocks", "pinned_blocks", "sessions", "tasks", "processes"])
def test_what_an_idle_server_has_more_of_is_found(soak: ModuleType, name: str) -> None:
    """One thing that is left after a while, and stays."""
    idle = lives_of_engines(soak)
    assert not any(trend.rises for trend in soak.part_by_part(idle))
    left = [each | {name: each[name] + (each["at_s"] > 1800)} for each in idle]
    found = [trend for trend in soak.part_by_part(left) if trend.rises]
    assert [trend.figure for trend in found] == [f"{name.replace('_', ' ')} of the server"]
    busy = [each | {name: each[name] + 40 * (each["open_requests"] > 0)} for each in idle]
    assert not any(trend.rises for trend in soak.part_by_part(busy))


def test_a_server_that_is_never_idle_is_not_compared(soak: ModuleType) -> None:
    busy = [each | {"open_requests": 1} for each in lives_of_engines(soak)]
    assert all(trend.rise is None for trend in soak.part_by_part(busy))


# Troubles and the page


def test_engines_are_killed_and_stopped_in_turn_and_then_only_one(soak: ModuleType) -> None:
    troubles = soak.plan_troubles(3600.0, 300.0, 600.0)
    kills = [each for each in troubles if each.kind == "kill"]
    stops = [each for each in troubles if each.kind == "stop"]
    assert [each.at_s for each in kills] == [300.0 * n for n in range(1, 12)]
    assert [each.at_s for each in stops] == [450.0, 1050.0, 1650.0, 2250.0, 2850.0, 3450.0]
    assert {each.number for each in troubles if each.at_s < 1800} == {0, 1}
    assert {each.number for each in troubles if each.at_s >= 1800} == {0}
    assert soak.plan_troubles(60.0, 0.0, 0.0) == []


def test_the_page_is_that_of_the_results(soak: ModuleType, tmp_path: Path) -> None:
    results = BENCHMARKS / "results" / "soak_cpu.json"
    if not results.exists():
        pytest.skip("there are no results yet")
    found = json.loads(results.read_text())
    assert soak.page(found) == (BENCHMARKS / "results" / "soak.md").read_text()
    failed = copy.deepcopy(found) | {"reasons": ["an engine grows"]}
    assert "**It did not hold:**\n\n- an engine grows\n" in soak.page(failed)
