"""Calls of a session and what they wait for, against edges found naively."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.semantic.core.graph import Graph
from bros.semantic.core.nodes import NewCall, open_ancestors
from bros.semantic.errors import ConflictError
from bros.semantic.schema import VariableState
from support.naive_programs import (
    NaiveGraph,
    llm,
    llm_call_id,
    native,
    plain_llm_calls,
    programs,
    variables,
)


def snapshot(graph: Graph) -> object:
    """All that is in a graph, to compare."""
    return (
        list(graph.calls),
        {
            v.id: (v.state, v.text, v.depth, v.producer, list(v.consumers))
            for v in graph.variables.values()
        },
        {
            llm_call_id(t): (t.num_missing, t.depth)
            for c in graph.calls.values()
            for t in c.llm_calls
        },
    )


def test_producer_and_consumers_are_linked_through_the_variable() -> None:
    graph = Graph()
    graph.add([llm("code", ("task", "code")), llm("test", ("task code", "test"))], 0.0)
    producer = graph.variables["code"].producer
    assert producer is not None and llm_call_id(producer) == ("code", 0)
    assert graph.variables["task"].producer is None
    assert [llm_call_id(llm_call) for llm_call in graph.variables["task"].consumers] == [
        ("code", 0),
        ("test", 0),
    ]
    assert [llm_call_id(llm_call) for llm_call in graph.variables["code"].consumers] == [
        ("test", 0)
    ]


def test_outputs_of_one_call_are_llm_calls_in_a_row() -> None:
    graph = Graph()
    [call] = graph.add([llm("c", ("a b", "o1"), ("a o1 d", "o2"))], 0.0)
    first, second = call.llm_calls
    assert [v.id for v in first.inputs] == ["a", "b"]
    assert [v.id for v in second.inputs] == ["o1", "d"], "a was in the prompt already"
    assert second.previous is first and first.next is second
    assert call.pieces[second.prompt_end].variable_id == "o2"  # type: ignore[union-attr]
    assert (first.depth, second.depth) == (0, 1)


def test_constants_are_there_at_once() -> None:
    graph = Graph()
    call = NewCall(id="c", pieces=llm("c", ("k", "o")).pieces, values={"k": "7"})
    [added] = graph.add([call], 0.0)
    assert graph.variables["k"].state is VariableState.READY
    assert graph.variables["k"].text == "7"
    assert added.llm_calls[0].num_missing == 0


@given(programs(), st.randoms(use_true_random=False))
def test_edges_depths_and_ancestors_are_those_of_the_program(
    calls: list[NewCall], random: Random
) -> None:
    graph = Graph()
    shuffled = list(calls)
    random.shuffle(shuffled)
    while shuffled:
        size = random.randint(1, len(shuffled))
        graph.add(shuffled[:size], 0.0)
        del shuffled[:size]
        graph.check_integrity({})
    naive = NaiveGraph(calls)
    for call in graph.calls.values():
        for llm_call in call.llm_calls:
            assert llm_call.depth == naive.depth(naive.llm_calls[llm_call_id(llm_call)])
    for name in variables(calls):
        made_by = graph.variables[name].producer
        expected = naive.producer.get(name)
        assert (made_by and llm_call_id(made_by)) == (expected and expected.id)
        found = open_ancestors(graph.variables[name])
        assert {llm_call_id(llm_call) for llm_call in found} == {
            llm_call.id for llm_call in naive.ancestors(name)
        }
        position = {llm_call: i for i, llm_call in enumerate(found)}
        for llm_call in found:
            assert all(position[b] > position[llm_call] for b in llm_call.open_predecessors())


NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f"])


@st.composite
def tangles(draw: st.DrawFn) -> list[NewCall]:
    """Calls that may well wait for each other, or set the same variables."""
    calls = []
    for number in range(draw(st.integers(1, 6))):
        inputs = draw(st.lists(NAMES, max_size=2, unique=True))
        outputs = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
        if draw(st.booleans()):
            calls.append(native(f"c{number}", " ".join(inputs), " ".join(outputs)))
        else:
            first, *more = outputs
            segments = [(" ".join(inputs[:1]), first), *((" ".join(inputs[1:]), o) for o in more)]
            calls.append(llm(f"c{number}", *segments))
    return calls


@given(tangles(), st.integers(1, 6))
def test_cycles_and_second_producers_are_refused_and_nothing_is_added(
    calls: list[NewCall], size: int
) -> None:
    graph = Graph()
    accepted: list[NewCall] = []
    for start in range(0, len(calls), size):
        batch = calls[start : start + size]
        outputs = [v for c in [*accepted, *batch] for t in plain_llm_calls(c) for v in t.outputs]
        twice = len(set(outputs)) < len(outputs)
        wrong = twice or NaiveGraph([*accepted, *batch]).cyclic()
        before = snapshot(graph)
        if wrong:
            with pytest.raises(ConflictError) as refused:
                graph.add(batch, 0.0)
            assert refused.value.code == ("already_produced" if twice else "cyclic")
            assert snapshot(graph) == before
        else:
            graph.add(batch, 0.0)
            accepted += batch
        graph.check_integrity({})


def test_the_path_of_a_cycle_is_named() -> None:
    graph = Graph()
    graph.add([llm("a", ("z", "u")), llm("b", ("u", "v")), llm("other", ("u", "w"))], 0.0)
    with pytest.raises(ConflictError, match="wait") as refused:
        graph.add([llm("c", ("v", "z"))], 0.0)
    steps = str(refused.value).removesuffix(".").split(": ")[1].split(", ")
    # c is refused, so that its id means nothing to the client.
    around = ["a needs z of requests[0]", "requests[0] needs v of b", "b needs u of a"]
    start = around.index(steps[0])
    assert steps == [*around[start:], *around[:start]]
    with pytest.raises(ConflictError, match=r"needs e of judge\.$"):
        graph.add([llm("d", ("e", "e"), name="judge")], 0.0)


def test_who_makes_a_variable_already_is_named() -> None:
    graph = Graph()
    graph.add([llm("a", ("", "u"), name="draft")], 0.0)
    with pytest.raises(ConflictError, match=r"u is an output of draft \(a\) already"):
        graph.add([llm("b", ("", "u"))], 0.0)
    with pytest.raises(ConflictError, match=r"v is an output of requests\[1\] already"):
        graph.add([llm("b", ("", "w")), llm("c", ("", "v")), llm("d", ("", "v"))], 0.0)


def test_a_later_llm_call_may_need_what_the_first_one_leads_to() -> None:
    graph = Graph()
    graph.add(
        [llm("talk", ("", "question"), ("answer", "thanks")), native("n", "question", "answer")],
        0.0,
    )
    graph.check_integrity({})
    with pytest.raises(ConflictError) as refused:
        graph.add([llm("t", ("back", "there"), ("", "end")), native("m", "end", "back")], 0.0)
    assert refused.value.code == "cyclic"
    assert list(graph.calls) == ["talk", "n"]


def test_ids_and_values_are_taken_once() -> None:
    graph = Graph()
    graph.declare("k")
    graph.add([llm("c", ("k", "o"))], 0.0)
    for call, code in [
        (llm("c", ("", "p")), "already_exists"),
        (llm("d", ("", "o")), "already_produced"),
        (NewCall(id="e", pieces=llm("e", ("k", "q")).pieces, values={"k": "1"}), "already_exists"),
        (NewCall(id="f", pieces=llm("f", ("", "q")).pieces, values={"q": "1"}), "already_set"),
    ]:
        before = snapshot(graph)
        with pytest.raises(ConflictError) as refused:
            graph.add([llm("fine", ("k", "r")), call], 0.0)
        assert refused.value.code == code
        assert snapshot(graph) == before
    with pytest.raises(ConflictError):
        graph.declare("k")


def test_a_chain_of_ten_thousand_is_no_deeper_than_the_stack() -> None:
    calls = [llm(f"c{i}", (f"v{i}", f"v{i + 1}")) for i in range(10_000)]
    graph = Graph()
    graph.add(calls[::-1], 0.0)
    assert len(open_ancestors(graph.variables["v10000"])) == 10_000
    assert graph.calls["c9999"].llm_calls[0].depth == 9_999
    with pytest.raises(ConflictError):
        graph.add([llm("back", ("v10000", "v0"))], 0.0)
