"""A session's graph as a picture: its calls from left to right, its variables between them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from types import MappingProxyType
from typing import NamedTuple

from bros.semantic.layout import Flow, Layout, arrange
from bros.semantic.schema import CallView, SessionView, VariableView

MAX_CALLS = 400
"""A picture of more would be none; those that come after are left out, and it says so."""

_BOX_WIDTH, _BOX_HEIGHT = 272.0, 82.0
_PORT_HEIGHT = 16.0
_MARGIN, _HEADER, _FOOTER = 16.0, 56.0, 34.0
_CHAR_WIDTH = 6.2
_MIN_GAP = 56.0
_STUB = 14.0
_MAX_LABEL = 22

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class _Look(NamedTuple):
    fill: str
    stroke: str
    words: str


_LOOKS: Mapping[str, _Look] = MappingProxyType(
    {
        "rt": _Look("#fde3c1", "#b45f06", "real-time"),
        "group": _Look("#d3e5f7", "#1f5f99", "task group"),
        "be": _Look("#e7e7e7", "#666666", "best-effort"),
        "native": _Look("#e6f2dd", "#4b7a2b", "the client's own function"),
        "none": _Look("#ffffff", "#999999", "not wanted yet"),
    }
)
_CALL_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "ready": "#e8a317",
        "running": "#1f77d0",
        "finished": "#2b8a3e",
        "failed": "#c92a2a",
        "cancelled": "#868e96",
    }
)
_VARIABLE_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "ready": "#2b8a3e",
        "failed": "#c92a2a",
        "cancelled": "#868e96",
    }
)
_STYLE = (
    "text{font:11px system-ui,'DejaVu Sans',sans-serif;fill:#222}"
    ".t{font-size:16px;font-weight:600}.n{font-size:13px;font-weight:600}.m{fill:#666}"
    ".e{fill:#c92a2a}.v{font-size:10.5px}.r{text-anchor:end}"
)


def draw(view: SessionView) -> str:
    """An SVG document."""
    calls = view.calls[:MAX_CALLS]
    wires = _wires(calls, view.variables)
    heights = [_height(call) for call in calls]
    flows = [Flow(wire.source, wire.targets) for wire in wires.passed]
    canvas = _Canvas(calls, wires, arrange(heights, flows), heights)
    parts = [*canvas.lines(), *canvas.boxes(), *canvas.names()]
    width, height = max(canvas.width, 640.0), canvas.height + _HEADER + _FOOTER
    return "".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-size="11"><style>{_STYLE}</style>'
            f'<rect width="100%" height="100%" fill="#fff"/>',
            _header(view),
            f'<g transform="translate(0 {_HEADER:.0f})">',
            *parts,
            "</g>",
            _legend(height),
            "</svg>",
        )
    )


class _Wire(NamedTuple):
    """A variable from one call to others, all by their index."""

    variable: VariableView
    source: int
    targets: Sequence[int]


class _Wires(NamedTuple):
    """given: variables without a producer here, by the call that reads them."""

    passed: Sequence[_Wire]
    given: Mapping[int, Sequence[VariableView]]


def _wires(calls: Sequence[CallView], variables: Sequence[VariableView]) -> _Wires:
    index = {call.id: i for i, call in enumerate(calls)}
    passed: list[_Wire] = []
    given: dict[int, list[VariableView]] = {}
    for variable in variables:
        targets = [index[i] for i in dict.fromkeys(variable.consumers) if i in index]
        if variable.producer in index:
            passed.append(_Wire(variable, index[variable.producer], targets))
        else:
            for target in targets:
                given.setdefault(target, []).append(variable)
    return _Wires(passed, given)


def _height(call: CallView) -> float:
    ports = max(len(call.outputs), len(call.inputs))
    return max(_BOX_HEIGHT, _PORT_HEIGHT * (ports + 1))


class _Port(NamedTuple):
    x: float
    y: float


class _Canvas:
    """What is where, in pixels."""

    def __init__(
        self, calls: Sequence[CallView], wires: _Wires, layout: Layout, heights: Sequence[float]
    ) -> None:
        self._calls = calls
        self._wires = wires
        self._layout = layout
        self._heights = heights
        self._lefts, self.width = self._place_columns()
        self.height = layout.height
        self._outs = self._out_ports()
        self._ins = self._in_ports()

    def boxes(self) -> Iterator[str]:
        for index, call in enumerate(self._calls):
            yield _box(call, self._left(index), self._layout.tops[index], self._heights[index])

    def lines(self) -> Iterator[str]:
        for number, wire in enumerate(self._wires.passed):
            colour = _VARIABLE_COLOURS.get(wire.variable.state.value, "#555")
            # What goes the same way is drawn once.
            pieces = (piece for target in wire.targets for piece in self._way(number, wire, target))
            for piece in dict.fromkeys(pieces):
                yield f'<path d="{piece}" fill="none" stroke="{colour}" stroke-opacity=".6"/>'
        for target, variables in self._wires.given.items():
            for variable in variables:
                x, y = self._ins[target, variable.id]
                yield f'<path d="M{x - _STUB:.1f} {y:.1f}H{x:.1f}" stroke="#888"/>'

    def names(self) -> Iterator[str]:
        for wire, (x, y) in zip(self._wires.passed, self._outs, strict=True):
            yield _dot(x, y, wire.variable)
            yield f'<text class="v" x="{x + 6:.1f}" y="{y - 4:.1f}">{_label(wire.variable)}</text>'
        for target, variables in self._wires.given.items():
            for variable in variables:
                x, y = self._ins[target, variable.id]
                yield _dot(x - _STUB, y, variable)
                yield (
                    f'<text class="v r" x="{x - _STUB - 6:.1f}" y="{y + 4:.1f}">'
                    f"{_label(variable)}</text>"
                )

    def _way(self, number: int, wire: _Wire, target: int) -> Iterator[str]:
        """From a port to another, straight past the boxes of the columns between."""
        (x, y), end = self._outs[number], self._ins[target, wire.variable.id]
        columns = self._layout.columns
        if columns[target] <= columns[wire.source]:  # around, from below
            low = max(y, end.y) + _BOX_HEIGHT
            yield (
                f"M{x:.1f} {y:.1f}C{x + 90:.1f} {low:.1f} "
                f"{end.x - 90:.1f} {low:.1f} {end.x:.1f} {end.y:.1f}"
            )
            return
        for column in range(columns[wire.source] + 1, columns[target]):
            left, lane = self._lefts[column], self._layout.lanes[number, column]
            yield f"{_curve(x, y, left, lane)}H{left + _BOX_WIDTH:.1f}"
            x, y = left + _BOX_WIDTH, lane
        yield _curve(x, y, *end)

    def _place_columns(self) -> tuple[list[float], float]:
        """Left edges of the columns, with room between them for the names of variables."""
        columns = self._layout.columns
        before = [0.0] * (self._layout.num_columns + 1)
        after = [0.0] * (self._layout.num_columns + 1)
        for target, variables in self._wires.given.items():
            width = max(_text_width(variable) for variable in variables) + 24
            before[columns[target]] = max(before[columns[target]], width)
        for wire in self._wires.passed:
            column = columns[wire.source] + 1
            after[column] = max(after[column], _text_width(wire.variable) + 12)
        lefts, x = [], _MARGIN
        for column in range(self._layout.num_columns):
            gap = after[column] + before[column]
            x += max(gap, _MIN_GAP) if column else gap
            lefts.append(x)
            x += _BOX_WIDTH
        return lefts, x + after[-1] + _MARGIN

    def _left(self, index: int) -> float:
        return self._lefts[self._layout.columns[index]]

    def _out_ports(self) -> list[_Port]:
        counts = [0] * len(self._calls)
        for wire in self._wires.passed:
            counts[wire.source] += 1
        seen = [0] * len(self._calls)
        ports = []
        for wire in self._wires.passed:
            box = wire.source
            seen[box] += 1
            y = self._layout.tops[box] + self._heights[box] * seen[box] / (counts[box] + 1)
            ports.append(_Port(self._left(box) + _BOX_WIDTH, y))
        return ports

    def _in_ports(self) -> dict[tuple[int, str], _Port]:
        """(call, id of a variable) -> where it goes in; from top to bottom as they come."""
        arriving: list[list[tuple[float, str]]] = [[] for _ in self._calls]
        for number, wire in enumerate(self._wires.passed):
            for target in wire.targets:
                lane = (number, self._layout.columns[target] - 1)
                y = self._layout.lanes.get(lane, self._outs[number].y)
                arriving[target].append((y, wire.variable.id))
        for target, variables in self._wires.given.items():
            arriving[target] += [(self._layout.tops[target], v.id) for v in variables]
        return {
            (box, variable_id): _Port(
                self._left(box),
                self._layout.tops[box] + self._heights[box] * place / (len(found) + 1),
            )
            for box, found in enumerate(arriving)
            for place, (_, variable_id) in enumerate(sorted(found), start=1)
        }


def _curve(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (x0 + x1) / 2
    return f"M{x0:.1f} {y0:.1f}C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"


def _box(call: CallView, x: float, y: float, height: float) -> str:
    look = _LOOKS[_kind(call)]
    state = call.state.value
    dashes = ' stroke-dasharray="4 3"' if call.kind.value == "native" else ""
    lines = (
        f'<text class="n" x="10" y="19">{_text(call.name or call.id, 17)}</text>'
        f'<circle cx="{_BOX_WIDTH - 12:.0f}" cy="15" r="4" '
        f'fill="{_CALL_COLOURS.get(state, "none")}" stroke="{_CALL_COLOURS.get(state, "#666")}"/>'
        f'<text class="r" x="{_BOX_WIDTH - 20:.0f}" y="19">{_text(state, 12)}</text>'
        f'<text x="10" y="37">{_text(_place(call), 44)}</text>'
    )
    if call.error is not None:
        lines += f'<text class="e" x="10" y="54">{_text(call.error.message, 42)}</text>'
    else:
        lines += f'<text x="10" y="54">{_text(_times(call), 44)}</text>'
    lines += f'<text class="m" x="10" y="71">{_text(_tokens(call), 44)}</text>'
    return (
        f'<g transform="translate({x:.1f} {y:.1f})"><title>{_text(_details(call), 1000)}</title>'
        f'<rect width="{_BOX_WIDTH:.0f}" height="{height:.0f}" rx="6" fill="{look.fill}" '
        f'stroke="{look.stroke}" stroke-width="1.4"{dashes}/>{lines}</g>'
    )


def _kind(call: CallView) -> str:
    """What colour it has."""
    if call.kind.value == "native":
        return "native"
    if call.level == "group":
        return "group"
    if call.service_class is not None:
        return call.service_class.value
    return "none"


def _place(call: CallView) -> str:
    parts = []
    if call.service_class is not None:
        parts.append(call.service_class.value.upper())
    if call.group is not None:
        parts.append(f"group {call.group}")
    if call.stage is not None:
        parts.append(f"stage {call.stage}")
    parts.append(f"depth {call.depth}")
    return " · ".join(parts)


def _times(call: CallView) -> str:
    """Seconds after the beginning of the session."""
    named = (("queued", call.queued_s), ("first", call.first_token_s), ("end", call.end_s))
    parts = [f"{name} {_seconds(seconds)}" for name, seconds in named if seconds is not None]
    return " · ".join(parts) + " s" if parts else "not begun"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f}" if seconds < 1000 else f"{seconds:.0f}"


def _tokens(call: CallView) -> str:
    if not call.prompt_tokens and not call.output_tokens:
        return ""
    cached = f" ({call.cached_tokens} cached)" if call.cached_tokens else ""
    return f"tokens: {call.prompt_tokens}{cached} in, {call.output_tokens} out"


def _details(call: CallView) -> str:
    error = "" if call.error is None else f"\n{call.error.request_id}: {call.error.message}"
    lines = (f"{call.name} {call.id}", call.state.value, _place(call), _times(call), _tokens(call))
    return "\n".join(line for line in lines if line) + error


def _dot(x: float, y: float, variable: VariableView) -> str:
    """The end of a variable; full if it has a value, and pointing at it shows that."""
    state = variable.state.value
    colour = _VARIABLE_COLOURS.get(state, "#888")
    shown = f"{variable.name} {variable.id}: {state}\n{variable.value or ''}"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" stroke="{colour}" '
        f'fill="{"#fff" if state == "pending" else colour}">'
        f"<title>{_text(shown, 500)}</title></circle>"
    )


def _label(variable: VariableView) -> str:
    return _text(variable.name or variable.id, _MAX_LABEL)


def _text_width(variable: VariableView) -> float:
    return _CHAR_WIDTH * min(len(variable.name or variable.id), _MAX_LABEL)


def _text(text: str, most: int) -> str:
    """As XML, cut to a length."""
    if len(text) > most:
        text = text[: most - 1] + "…"
    return escape(_NOT_XML.sub("\ufffd", text))


def _header(view: SessionView) -> str:
    ended = sum(call.end_s is not None for call in view.calls)
    more = len(view.calls) - MAX_CALLS
    left_out = f" · the last {more} are not shown" if more > 0 else ""
    return (
        f'<text class="t" x="{_MARGIN:.0f}" y="26">{_text(view.id, 80)}</text>'
        f'<text class="m" x="{_MARGIN:.0f}" y="44">{_text(view.state, 20)} · '
        f"{len(view.calls)} requests, {ended} ended{left_out} · times in seconds after the start"
        "</text>"
    )


def _legend(height: float) -> str:
    parts, x = [], _MARGIN
    for look in _LOOKS.values():
        parts.append(
            f'<rect x="{x:.0f}" y="{height - 23:.0f}" width="14" height="12" rx="2" '
            f'fill="{look.fill}" stroke="{look.stroke}"/>'
            f'<text x="{x + 20:.0f}" y="{height - 13:.0f}">{look.words}</text>'
        )
        x += 20 + _CHAR_WIDTH * len(look.words) + 18
    return "".join(parts)
