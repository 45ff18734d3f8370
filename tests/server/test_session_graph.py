"""Graphs of sessions for readers: all of a call is there, whatever its names contain."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.request import ServiceClass
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.schema import (
    CallKind,
    CallState,
    CriticalPathView,
    GroupCostsView,
    PlacementView,
    SessionView,
)
from bros.server.sessions.graph import MAX_CARDS, render_dot, render_mermaid, render_page
from support.session_views import make_call, make_session

BE = ServiceClass.BE
RENDERERS = (render_page, render_mermaid, render_dot)


class Page(HTMLParser):
    """cards: attributes of each call's element. links: targets, by the card they are on."""

    def __init__(self, view: SessionView) -> None:
        super().__init__()
        self.cards: list[dict[str, str | None]] = []
        self.links: dict[str | None, list[str | None]] = {}
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.columns: list[list[str | None]] = []
        self.feed(render_page(view))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        fields = dict(attrs)
        if tag == "section":
            self.columns.append([])
        elif tag == "article":
            self.cards.append(fields)
            self.columns[-1].append(fields["title"])
        elif tag == "a" and self.cards:
            self.links.setdefault(self.cards[-1]["title"], []).append(fields["href"])

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def test_texts_can_be_read_on_light_and_on_dark_pages() -> None:
    html = render_page(make_session([make_call("a")]))
    assert "color-scheme:light dark" in html

    def luminance(color: str) -> float:
        digits = color if len(color) == 6 else "".join(2 * digit for digit in color)
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    pairs = "light-dark\\(#([0-9a-f]+),#([0-9a-f]+)\\)"
    texts = re.findall(f"--(?:ink|quiet|bad):{pairs}", html)
    fills = re.findall(f"background:{pairs}", html) + re.findall(f"--paper:{pairs}", html)
    assert len(texts) == 3 and len(fills) == 6
    for text in texts:
        for fill in fills:
            for own, other in zip(text, fill, strict=True):
                dark, light = sorted((luminance(own), luminance(other)))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (own, other)  # WCAG's level AA


def look(**fields: Any) -> str | None:
    (card,) = Page(make_session([make_call("a", **fields)])).cards
    return card["class"]


@pytest.mark.parametrize("render", RENDERERS)
def test_a_call_shows_its_state_class_times_and_tokens(render: Any) -> None:
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
    view = make_session([call])
    shown = Page(view).text if render is render_page else render(view)
    for text in (
        *("Summarize", "running", "BE · group summary-12:2 · stage 2 · depth 13"),
        *("queued 0.25 · first 0.50 s", "tokens: 300 (100 cached) in, 20 out"),
    ):
        assert text in shown


@pytest.mark.parametrize("render", RENDERERS)
def test_a_failure_shows_its_message(render: Any) -> None:
    cause = Cause("req-1", FailedStage.TRANSFORM, "no such line")
    shown = render(make_session([make_call("a", state=CallState.FAILED, error=cause)]))
    assert "no such line" in shown and "failed" in shown


def test_classes_have_colours_of_their_own() -> None:
    looks = {
        look(),
        look(level="throughput", service_class=BE),
        look(level="group", service_class=BE),
        look(level=None, service_class=None),
        look(level=None, service_class=None, kind=CallKind.NATIVE),
    }
    assert len(looks) == 5
    page = render_page(make_session([]))
    colours = {re.findall(rf"^\.{name}{{(.*)}}$", page, re.M)[0] for name in looks}
    assert len(colours) == 5


def test_columns_of_the_page_are_depths_and_cards_link_to_each_other() -> None:
    view = make_session(
        [
            make_call("reduce", ["s1", "s2"], ["final"], depth=1),
            make_call("map-1", ["c1"], ["s1"]),
            make_call("map-2", ["c2"], ["s2"]),
        ]
    )
    page = Page(view)
    assert page.columns == [["map-1", "map-2"], ["reduce"]]
    at = {card["title"]: f"#{card['id']}" for card in page.cards}
    assert page.links == {
        "map-1": [at["reduce"]],
        "map-2": [at["reduce"]],
        "reduce": [at["map-1"], at["map-2"]],
    }
    for variable in ("c1", "c2", "s1", "s2", "final"):
        assert variable in page.text


def test_edges_of_the_texts_are_variables() -> None:
    view = make_session(
        [
            make_call("a", ["given"], ["x"]),
            *(make_call(f"b{i}", ["x"], [f"y{i}"]) for i in range(2)),
        ]
    )
    mermaid, dot = render_mermaid(view), render_dot(view)
    assert re.findall(r'(\w+) -->(?:\|"(\w+)"\|)? (\w+)', mermaid) == [
        *(("c0", "x", "c1"), ("c0", "x", "c2"), ("c1", "", "v1"), ("c2", "", "v2")),
        ("v3", "", "c0"),
    ]
    assert re.findall(r'(\w+) -> (\w+) \[(?:label="(\w+)")?', dot) == [
        *(("c0", "c1", "x"), ("c0", "c2", "x"), ("c1", "v1", ""), ("c2", "v2", "")),
        ("v3", "c0", ""),
    ]
    assert 'v3(["given"])' in mermaid and 'v3 [label="given"' in dot


def test_calls_that_read_from_each_other() -> None:
    view = make_session([make_call("a", ["x"], ["y", "z"]), make_call("b", ["y"], ["x"])])
    assert "c0 --" in render_mermaid(view) and "c1 --" in render_mermaid(view)
    assert Page(view).links == {"a": ["#c1", "#c1"], "b": ["#c0", "#c0"]}


@given(st.text(), st.text(), st.text(min_size=1))
def test_any_text_is_escaped(name: str, message: str, variable: str) -> None:
    cause = Cause("r", FailedStage.NATIVE, message)
    view = make_session(
        [make_call("a", ["v"], ["u"], name=name, error=cause), make_call("b", ["u"], ["w"])],
        {"v": variable, "w": variable, "u": variable},
    )
    for render in RENDERERS:
        render(view).encode("utf-8")
    page = Page(view)
    assert page.tags == Page(make_session([make_call("a", ["u"], ["u"], error=cause)])).tags
    assert len(page.cards) == 2
    quoted = r'"[^"\\<>`{}]*"'
    node = rf"c\d\[{quoted}\]:::\w+|v\d\(\[{quoted}\]\)"
    edge = rf"\w+ -->(\|{quoted}\|)? \w+"
    for line in render_mermaid(view).replace("<br/>", "").splitlines()[1:]:
        assert re.fullmatch(f" +({node}|{edge}|classDef .*)", line), line
    string = r'"(?:[^"\\]|\\.)*"'
    for line in render_dot(view).splitlines()[1:-1]:
        assert re.fullmatch(rf" +[\w >-]+ \[(\w+={string}(, )?)+\];", line), line


@pytest.mark.parametrize("count", [0, 1, 100])
def test_every_call_has_a_card_and_a_node(count: int) -> None:
    calls = [make_call(f"c{i}", [f"v{i // 3}"] if i else [], [f"v{i}"]) for i in range(count)]
    calls = [make_call(call.id, {*call.inputs} - {*call.outputs}, call.outputs) for call in calls]
    view = make_session(calls)
    assert len(Page(view).cards) == count
    assert len(re.findall(r"^ +c\d+\[", render_mermaid(view), re.M)) == count
    assert len(re.findall(r"^ +c\d+ \[", render_dot(view), re.M)) == count


def test_the_page_says_what_it_leaves_out() -> None:
    view = make_session([make_call(f"c{i}") for i in range(MAX_CARDS + 7)])
    page = Page(view)
    assert len(page.cards) == MAX_CARDS
    assert "the last 7 are not shown" in page.text
    assert f"c{MAX_CARDS + 6}[" in render_mermaid(view)


def test_the_page_shows_what_values_wait_for_and_where_calls_are() -> None:
    a = make_call(
        "a",
        [],
        ["x"],
        why="alone 1 call before y",
        critical=True,
        slack_s=-0.5,
        predicted_end_s=2.5,
        queueing_s=0.1,
        prefill_s=0.2,
        decode_s=0.3,
        placement=PlacementView(
            replica=3,
            reason="group",
            expected_tokens=64,
            group=GroupCostsView(cost_s=1.5, alternative_s=2.25, replicas=2),
        ),
    )
    b = make_call("b", ["x"], ["y"], critical=True)
    path = CriticalPathView(variable="y", requests=("a", "b"), predicted_end_s=3.5, slack_s=-0.5)
    view = dataclasses.replace(make_session([a, b]), critical_paths=(path,) * 7)
    page = Page(view)
    for text in (
        *("alone 1 call before y", "predicted end 2.50 · slack -0.50 s · on the critical path"),
        *("queueing 0.10 · prefill 0.20 · decode 0.30 s", "replica 3: group, expected 64 cached"),
        "group on 2 replicas: cost 1.50 · alternative 2.25 s",
        *("predicted at 3.50 s, slack -0.50 s", "and 2 more critical paths"),
    ):
        assert text in page.text
    assert [card["class"] for card in page.cards] == ["rt critical", "rt critical"]
    closed = dataclasses.replace(view, state="closed")
    assert 'http-equiv="refresh"' in render_page(view)
    assert 'http-equiv="refresh"' not in render_page(closed)
