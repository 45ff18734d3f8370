"""Sessions as pictures: well-formed whatever is in them, and everything is there."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.request import ServiceClass
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.picture import MAX_CALLS, draw
from bros.semantic.schema import CallKind, CallState, SessionView
from support.session_views import make_call, make_session

SVG = "{http://www.w3.org/2000/svg}"
BE = ServiceClass.BE


def texts(view: SessionView) -> list[str]:
    return [each.text or "" for each in ET.fromstring(draw(view)).iter(f"{SVG}text")]


def boxes(view: SessionView) -> list[ET.Element]:
    """The group of each call: its box, title and lines."""
    inner = ET.fromstring(draw(view)).find(f"{SVG}g")
    assert inner is not None
    return inner.findall(f"{SVG}g")


def fill(**fields: Any) -> str | None:
    (box,) = boxes(make_session([make_call("a", **fields)]))
    rect = box.find(f"{SVG}rect")
    assert rect is not None
    return rect.get("fill")


def position(box: ET.Element) -> tuple[float, float]:
    x, y = box.get("transform", "").removeprefix("translate(").rstrip(")").split()
    return float(x), float(y)


def test_a_call_says_what_became_of_it() -> None:
    call = make_call(
        "req-1",
        name="Summarize",
        level="group",
        service_class=BE,
        group="summary-12:2",
        stage=2,
        depth=13,
        state=CallState.RUNNING,
        end_s=None,
    )
    shown = texts(make_session([call]))
    for text in (
        *("Summarize", "running", "BE · group summary-12:2 · stage 2 · depth 13"),
        *("queued 0.25 · first 0.50 s", "tokens: 300 (100 cached) in, 20 out"),
    ):
        assert text in shown


def test_a_failure_is_shown_instead_of_times() -> None:
    cause = Cause("req-1", FailedStage.TRANSFORM, "no such line")
    shown = texts(make_session([make_call("a", state=CallState.FAILED, error=cause)]))
    assert "no such line" in shown
    assert not any(text.startswith("queued") for text in shown)


def test_classes_have_colours_of_their_own() -> None:
    colours = {
        fill(),
        fill(level="throughput", service_class=BE),
        fill(level="group", service_class=BE),
        fill(level=None, service_class=None),
        fill(level=None, service_class=None, kind=CallKind.NATIVE),
    }
    assert len(colours) == 5


def test_needs_go_from_left_to_right() -> None:
    view = make_session(
        [
            make_call("reduce", ["s1", "s2"], ["final"]),
            make_call("map-1", ["c1"], ["s1"]),
            make_call("map-2", ["c2"], ["s2"]),
        ]
    )
    reduce, first, second = (position(box) for box in boxes(view))
    assert first[0] == second[0] < reduce[0]
    assert first[1] != second[1]
    assert {"c1", "c2", "s1", "s2", "final"} <= set(texts(view))


def test_a_variable_of_several_readers_is_named_once_and_drawn_to_each() -> None:
    view = make_session([make_call("a", [], ["x"]), *(make_call(f"b{i}", ["x"]) for i in range(3))])
    assert texts(view).count("x") == 1
    paths = ET.fromstring(draw(view)).findall(f".//{SVG}path")
    assert len(paths) == 3


def test_calls_that_take_llm_calls_with_each_other() -> None:
    view = make_session([make_call("a", ["x"], ["y", "z"]), make_call("b", ["y"], ["x"])])
    assert len(boxes(view)) == 2
    assert len(ET.fromstring(draw(view)).findall(f".//{SVG}path")) == 2


@given(st.text(), st.text(), st.text(min_size=1))
def test_any_text_is_escaped(name: str, message: str, variable: str) -> None:
    cause = Cause("r", FailedStage.NATIVE, message)
    view = make_session(
        [make_call("a", ["v"], name=name, error=cause), make_call("b", [], ["w"])],
        {"v": variable, "w": variable},
    )
    root = ET.fromstring(draw(view).encode("utf-8"))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {
        *("svg", "style", "rect", "text", "g", "path", "title", "circle")
    }


@pytest.mark.parametrize("count", [0, 1, 100])
def test_every_call_has_a_box(count: int) -> None:
    calls = [make_call(f"c{i}", [f"v{i // 3}"] if i else [], [f"v{i}"]) for i in range(count)]
    calls = [make_call(call.id, {*call.inputs} - {*call.outputs}, call.outputs) for call in calls]
    assert len(boxes(make_session(calls))) == count


def test_what_is_left_out_is_said() -> None:
    view = make_session([make_call(f"c{i}") for i in range(MAX_CALLS + 7)])
    assert len(boxes(view)) == MAX_CALLS
    assert any("the last 7 are not shown" in text for text in texts(view))
