"""Random programs of calls, as data, and what each of their values is if nothing fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from bros.semantic.schema import CallSpec
from support.program_engine import echo
from support.programs import call, native

SHARED = "You are one of many who work on something large. "


@dataclass(frozen=True)
class Node:
    """One call. inputs: numbers of variables; the outputs have the numbers that follow.

    kind: llm, native, native-fails. transform: of all outputs.
    """

    number: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: str
    transform: str | None
    greedy: bool

    @property
    def template(self) -> str:
        text = SHARED + f"{self.number}: " + " ".join(f"{{{{v{i}}}}}" for i in self.inputs)
        return text + "".join(f" then {{{{output:v{i}}}}}" for i in self.outputs)

    def spec(self) -> CallSpec:
        if self.kind != "llm":
            names = (" ".join(f"v{i}" for i in side) for side in (self.inputs, self.outputs))
            return native(*names)
        transforms = {f"v{i}": self.transform for i in self.outputs}
        sampling = {"temperature": 0.0} if self.greedy else {}
        return call(self.template, transforms=transforms, sampling=sampling)


def expected_values(nodes: Sequence[Node]) -> dict[int, str]:
    """What each variable is if nothing fails."""
    values: dict[int, str] = {}
    for node in nodes:
        texts = [values[i] for i in node.inputs]
        prompt = SHARED + f"{node.number}: " + " ".join(texts)
        for i in node.outputs:
            if node.kind == "llm":
                prompt += " then "
                answer = echo(prompt)
                prompt += answer
                values[i] = answer.upper() if node.transform == "upper" else answer
            else:
                values[i] = native_value(texts, i)
    return values


def native_value(texts: Sequence[str], output: int) -> str:
    """What a function of the client makes of its inputs."""
    return f"[{'+'.join(texts)}|{output}]"


def nodes_behind(nodes: Sequence[Node]) -> dict[int, set[int]]:
    """Variable -> the nodes that it needs, by number."""
    needs: dict[int, set[int]] = {}
    for node in nodes:
        for i in node.outputs:
            needs[i] = {node.number}.union(*(needs[j] for j in node.inputs))
    return needs


_TRANSFORMS = st.sampled_from([None, None, None, "upper", "json"])


@st.composite
def programs(draw: st.DrawFn) -> list[Node]:
    """Calls that read any values of calls before them."""
    nodes: list[Node] = []
    made = 0
    for number in range(draw(st.integers(1, 7))):
        inputs = draw(st.lists(st.integers(0, made - 1), max_size=3)) if made else []
        count = draw(st.integers(1, 2))
        nodes.append(
            Node(
                number,
                tuple(dict.fromkeys(inputs)),
                tuple(range(made, made + count)),
                draw(st.sampled_from(["llm", "llm", "llm", "native", "native-fails"])),
                draw(_TRANSFORMS),
                draw(st.booleans()),
            )
        )
        made += count
    return nodes


@st.composite
def shaped_programs(draw: st.DrawFn) -> list[Node]:
    """Maps, chains, reduces and functions of the client, each over the values before it."""
    nodes: list[Node] = []
    last: list[int] = []
    made = 0

    def add(inputs: Sequence[int], kind: str = "llm", outputs: int = 1) -> None:
        nonlocal made
        made += outputs
        transform = draw(_TRANSFORMS) if kind == "llm" else None
        nodes.append(
            Node(
                len(nodes), tuple(inputs), tuple(range(made - outputs, made)), kind, transform,
                draw(st.booleans()),
            )
        )  # fmt: skip

    for _ in range(draw(st.integers(1, 3))):
        begin = made
        match draw(st.sampled_from(["maps", "maps", "chain", "reduce", "native", "two outputs"])):
            case "maps":
                for _ in range(draw(st.integers(2, 5))):
                    add(last[:1])
            case "chain":
                for _ in range(draw(st.integers(1, 3))):
                    add([made - 1] if made else [])
                begin = made - 1
            case "reduce":
                add(last[:5])
            case "native":
                add(last[:2], draw(st.sampled_from(["native", "native", "native-fails"])))
            case "two outputs":
                add(last[:2], outputs=2)
        last = list(range(begin, made))
    return nodes
