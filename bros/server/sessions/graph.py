"""A session's graph as an HTML page, as Mermaid text and as Graphviz DOT text."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from jinja2 import Environment, Template

from bros.semantic.schema import CallKind, CallView, SessionView, VariableState, VariableView

MAX_CARDS = 400
"""Most calls on the page, which says how many it omits; the two texts have all calls."""

_MAX_PATHS = 5
_MAX_STEPS = 12
_MAX_NAME = 40
_MAX_ERROR = 80

_NOT_SHOWN = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
# Mermaid ignores -._ within a word; elsewhere they can begin a list or emphasis.
_MERMAID_SPECIAL = re.compile(r"(?<![^\W_])[-._]|[-._](?![^\W_])|[^\w\s,:·.()-]")


class _Look(NamedTuple):
    """Colors of a kind of call, and its label in the legend. dark_fill: on a dark page."""

    fill: str
    dark_fill: str
    stroke: str
    label: str


_LOOKS: Mapping[str, _Look] = MappingProxyType(
    {
        "rt": _Look("#fde3c1", "#4a2f10", "#b45f06", "real-time"),
        "group": _Look("#d3e5f7", "#17344f", "#1f5f99", "task group"),
        "be": _Look("#e7e7e7", "#34373c", "#666666", "best-effort"),
        "native": _Look("#e6f2dd", "#263a1a", "#4b7a2b", "native function"),
        "unwanted": _Look("#ffffff", "#16171a", "#999999", "not wanted yet"),
    }
)


def render_page(view: SessionView) -> str:
    """HTML without scripts: the critical paths, a column for each depth, a card for each call."""
    calls = view.calls[:MAX_CARDS]
    return _printable(
        _PAGE.render(
            view=view,
            calls=calls,
            number={call.id: number for number, call in enumerate(calls)},
            variables={variable.id: variable for variable in view.variables},
            ended=sum(call.end_s is not None for call in view.calls),
            left_out=len(view.calls) - len(calls),
            paths=view.critical_paths[:_MAX_PATHS],
            more_paths=len(view.critical_paths[_MAX_PATHS:]),
            max_steps=_MAX_STEPS,
            looks=_LOOKS,
        )
    )


def render_mermaid(view: SessionView) -> str:
    """A flow chart. Mermaid draws 500 edges unless its `maxEdges` is set higher."""
    lines = ["flowchart LR"]
    for number, call in enumerate(view.calls):
        label = "<br/>".join(map(_mermaid_text, _lines(call)))
        lines.append(f'    c{number}["{label}"]:::{_look(call)}')
    for number, variable in _own_nodes(view):
        lines.append(f'    v{number}(["{_mermaid_text(_label(variable))}"])')
    for source, target, variable in _edges(view):
        arrow = "-->" if variable.state is VariableState.READY else "-.->"
        label = f'|"{_mermaid_text(_label(variable))}"|' if _joins_calls(variable) else ""
        lines.append(f"    {source} {arrow}{label} {target}")
    for name, look in _LOOKS.items():
        lines.append(f"    classDef {name} fill:{look.fill},stroke:{look.stroke},color:#222222")
    return _printable("\n".join(lines) + "\n")


def render_dot(view: SessionView) -> str:
    """A directed graph for Graphviz."""
    lines = [
        f"digraph {_dot_text([view.id])} {{",
        '    graph [rankdir="LR"];',
        '    node [shape="box", style="rounded,filled", fillcolor="#ffffff"];',
    ]
    for number, call in enumerate(view.calls):
        look = _LOOKS[_look(call)]
        lines.append(
            f"    c{number} [label={_dot_text(_lines(call))}, "
            f'fillcolor="{look.fill}", color="{look.stroke}"];'
        )
    for number, variable in _own_nodes(view):
        lines.append(f'    v{number} [label={_dot_text([_label(variable)])}, shape="ellipse"];')
    for source, target, variable in _edges(view):
        style = "solid" if variable.state is VariableState.READY else "dashed"
        label = f"label={_dot_text([_label(variable)])}, " if _joins_calls(variable) else ""
        lines.append(f'    {source} -> {target} [{label}style="{style}"];')
    return _printable("\n".join([*lines, "}"]) + "\n")


def _look(call: CallView) -> str:
    """Its key in `_LOOKS`."""
    if call.kind is CallKind.NATIVE:
        return "native"
    if call.level == "group":
        return "group"
    return "unwanted" if call.service_class is None else call.service_class.value


def _facts(call: CallView) -> list[str]:
    """Lines on a call: its place in the program and why it has its class, its times (queued,
    first, end and predicted end in seconds after the start of the session), its tokens, and where
    the router has placed it."""
    position = [] if call.service_class is None else [call.service_class.value.upper()]
    if call.group is not None:
        position.append(f"group {call.group}")
    if call.stage is not None:
        position.append(f"stage {call.stage}")
    position.append(f"depth {call.depth}")
    times = _times(queued=call.queued_s, first=call.first_token_s, end=call.end_s)
    facts = [" · ".join(position), times or "not started"]
    if call.why:
        facts.insert(1, call.why)
    outlook = [_times(**{"predicted end": call.predicted_end_s, "slack": call.slack_s})]
    outlook += ["on the critical path"] * call.critical
    spent = _times(queueing=call.queueing_s, prefill=call.prefill_s, decode=call.decode_s)
    facts += filter(None, (" · ".join(filter(None, outlook)), spent))
    if call.prompt_tokens or call.output_tokens:
        cached = f" ({call.cached_tokens} cached)" if call.cached_tokens else ""
        facts.append(f"tokens: {call.prompt_tokens}{cached} in, {call.output_tokens} out")
    if call.placement is not None:
        placed = call.placement
        facts.append(
            f"replica {placed.replica}: {placed.reason}, expected {placed.expected_tokens} cached"
        )
        if placed.group is not None:
            costs = placed.group
            spread = f"group on {costs.replicas} replica{'s' * (costs.replicas > 1)}"
            facts.append(f"{spread}: {_times(cost=costs.cost_s, alternative=costs.alternative_s)}")
    return facts


def _times(**named: float | None) -> str:
    """The known ones of these seconds; empty if there are none."""
    known = [f"{name} {seconds:.2f}" for name, seconds in named.items() if seconds is not None]
    return " · ".join(known) + " s" if known else ""


def _lines(call: CallView) -> list[str]:
    """The label of a node: name and state, the facts, and the error if there is one."""
    error = [] if call.error is None else [f"error: {_cut(call.error.message, _MAX_ERROR)}"]
    return [f"{_cut(call.name or call.id, _MAX_NAME)}: {call.state.value}", *_facts(call), *error]


def _label(variable: VariableView) -> str:
    name = _cut(variable.name or variable.id, _MAX_NAME)
    return name if variable.state is VariableState.READY else f"{name}: {variable.state.value}"


def _joins_calls(variable: VariableView) -> bool:
    """Whether it is drawn as edges between calls; otherwise it has its own node."""
    return variable.producer is not None and bool(variable.consumers)


def _own_nodes(view: SessionView) -> Iterator[tuple[int, VariableView]]:
    for number, variable in enumerate(view.variables):
        if not _joins_calls(variable):
            yield number, variable


def _edges(view: SessionView) -> Iterator[tuple[str, str, VariableView]]:
    """(source node, target node, variable), one for each call that reads the variable."""
    nodes = {call.id: f"c{number}" for number, call in enumerate(view.calls)}
    for number, variable in enumerate(view.variables):
        source = nodes[variable.producer] if variable.producer else f"v{number}"
        targets = [nodes[i] for i in dict.fromkeys(variable.consumers)] or [f"v{number}"]
        for target in targets:
            if source != target:
                yield source, target, variable


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _printable(text: str) -> str:
    """The text with U+FFFD for control characters and what UTF-8 cannot encode."""
    return _NOT_SHOWN.sub("\ufffd", text)


def _mermaid_text(text: str) -> str:
    """Text for a quoted label: syntax, Markdown and HTML characters become entity codes."""
    line = " ".join(_printable(text).split())
    return _MERMAID_SPECIAL.sub(lambda found: f"#{ord(found[0])};", line)


def _dot_text(lines: Sequence[str]) -> str:
    r"""A quoted string, in which Graphviz reads HTML entities, and \n as a line break."""
    quoted = r"\n".join(
        " ".join(line.split()).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
        for line in lines
    )
    return f'"{quoted}"'


def _load_page() -> Template:
    source = importlib.resources.files("bros.server").joinpath("static/session_graph.html")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(facts=_facts, look=_look)
    return environment.from_string(source.read_text(encoding="utf-8"))


_PAGE = _load_page()
