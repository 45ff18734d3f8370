"""Transforms in processes of their own give what they give here, within limits of the kernel."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from bros.semantic.transforms import TransformError, Transforms, parse_transforms
from bros.semantic.transforms.pipeline import PIPELINE_S, QUICK_CHARS, REGISTRY
from bros.semantic.transforms.process import TransformProcess, TransformProcesses
from bros.semantic.transforms.steps import MAX_CHARS, MAX_PARTS
from support.tier import by_tier

SLOW = 'regex("(a|aa)+$")'
SLOW_TEXT = "a" * 1500 + "b"

TEXTS = [
    "",
    "  One, two  ",
    "1. a\n2) b\n\n- c",
    '{"a": [1, {"b": "c"}], "d": null}',
    "a: 1\nb: [x, y]",
    "```python\nprint()\n```",
    "half \ud800 character",
    "ünï © 😀 \x00",
    "2001-02-03",
]
PIPELINES = [
    "strip | upper",
    "lines[0]",
    "comma_list | join('; ')",
    "numbered_list[-1]",
    "json | json_path($.a[*])",
    "json_path($.a[1].b)",
    "yaml_path($.b[1])",
    r"regex('(\w+)', 1) | lower",
    "code_block(python)",
    "datetime",
    "template('<{}> {}') | truncate(5)",
    "int",
]


def parsed(source: str) -> Transforms:
    transforms = parse_transforms(source)
    assert transforms is not None
    return transforms


def outcome(apply: object, *arguments: str) -> tuple[str, str]:
    assert callable(apply)
    try:
        return "done", apply(*arguments)
    except TransformError as error:
        return "failed", str(error)


@pytest.fixture(scope="module")
def process() -> Iterator[TransformProcess]:
    made = TransformProcess()
    yield made
    made.close()


@pytest.mark.parametrize("source", PIPELINES)
def test_process_and_quick_way_give_what_the_transforms_give(
    process: TransformProcess, source: str
) -> None:
    transforms = parsed(source)
    for text in TEXTS:
        expected = outcome(transforms, text)
        assert outcome(process.apply, source, text) == expected
        quick = outcome(transforms.quickly, text)
        if quick != ("done", None):
            assert quick == expected


def test_what_is_quick_is_short_and_has_no_regular_expression() -> None:
    slow = {name for name, entry in REGISTRY.items() if not entry.quick}
    assert slow == {"regex", "yaml_path", "datetime"}
    assert parsed("upper").quickly("a" * QUICK_CHARS) == "A" * QUICK_CHARS
    assert parsed("upper").quickly("a" * (QUICK_CHARS + 1)) is None
    assert parsed(SLOW).quickly("a") is None
    assert parsed("template('{}{}') | upper").quickly("a" * QUICK_CHARS) is None


def test_long_text_crosses_the_border_whole(process: TransformProcess) -> None:
    text = "ä" * MAX_CHARS
    assert process.apply("lower", text) == text


def test_slow_regular_expression_fails_with_its_name(process: TransformProcess) -> None:
    with pytest.raises(TransformError, match=r"regex.*took longer than 0\.25 s"):
        process.apply(SLOW, SLOW_TEXT)
    assert process.apply("upper", "on") == "ON"


def test_pipeline_has_one_budget_for_all_its_transforms() -> None:
    times = iter([0.0, 0.0, 0.4, 0.8, 1.2])
    with pytest.raises(TransformError, match="^lower: the transforms before it took too long"):
        parsed("strip | upper | strip | lower")("text", lambda: next(times))


def test_regular_expression_gets_what_is_left_of_the_budget() -> None:
    times = iter([0.0, PIPELINE_S - 0.01])
    with pytest.raises(TransformError, match=r"took longer than 0\.01 s"):
        parsed(SLOW)(SLOW_TEXT, lambda: next(times))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGXCPU])
def test_killed_process_fails_what_it_did_and_another_one_follows(number: signal.Signals) -> None:
    made, before = TransformProcess(), children_of_this_process()
    try:
        assert made.apply("upper", "a") == "A"
        (child,) = children_of_this_process() - before
        os.kill(child, signal.SIGSTOP)
        os.kill(child, number)
        os.kill(child, signal.SIGCONT)
        first = outcome(made.apply, "upper", "a")
        assert first in (("done", "A"), ("failed", "upper: took too long or too much memory"))
        assert made.apply("upper", "b") == "B"
    finally:
        made.close()
    assert children_of_this_process() <= before
    with pytest.raises(TransformError, match="stops"):
        made.apply("upper", "a")


def children_of_this_process() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


async def test_slow_transforms_of_one_tenant_do_not_keep_another_waiting() -> None:
    """Twenty slow ones of a wait, one after the other; b's is done beside the first of them."""
    processes, order = TransformProcesses(), list[str]()

    async def one(tenant: str, source: str, text: str) -> None:
        try:
            await processes.apply(tenant, parsed(source), text)
        except TransformError:
            pass
        order.append(tenant)

    try:
        await processes.apply("b", parsed("upper"), "both processes have started")
        slow = [
            asyncio.create_task(one("a", SLOW, SLOW_TEXT)) for _ in range(by_tier(fast=4, long=20))
        ]
        await asyncio.sleep(0)
        await one("b", "upper", "text")
        assert order.count("a") <= 2
        await asyncio.gather(*slow)
    finally:
        processes.close()


@pytest.mark.parametrize(
    "source",
    by_tier(
        fast=[f'join("{"x" * 4000}")', "lines"],
        long=[f'join("{"x" * 4000}")', "lines", "split(1)", "comma_list"],
    ),
)
def test_large_results_are_refused_before_they_are_built(source: str) -> None:
    parts = MAX_PARTS // 2 if source.startswith("join") else 1_000_000
    text = json.dumps([1] * parts).replace(" ", "\n" if source == "lines" else " ")
    tracemalloc.start()
    try:
        with pytest.raises(TransformError, match="more than"):
            parsed(source)(text)
        assert tracemalloc.get_traced_memory()[1] < 16 * MAX_CHARS
    finally:
        tracemalloc.stop()


def test_long_list_is_not_joined() -> None:
    with pytest.raises(TransformError, match="500000 parts, more than 100000"):
        parsed(f'join("{"x" * 4000}")')("[" + ",".join("1" * 500_000) + "]")
