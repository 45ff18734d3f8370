"""Work on large sessions is done in slices; what comes between two slices changes no result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.semantic.core.nodes import NewCall
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import Prefill, SessionStateMachine, Settled, Start
from bros.semantic.errors import ConflictError, SessionGoneError, SessionLimitError
from bros.semantic.schema import Criteria
from support.naive_programs import criteria, llm, llm_calls, programs, variables
from support.tier import examples

REFUSALS = (ConflictError, SessionLimitError, SessionGoneError)


def core_with(slice_calls: int, **limits: int) -> SessionStateMachine:
    return SessionStateMachine(
        "s",
        estimate=lambda llm_call: 1.0,
        limits=SessionLimits(slice_calls=slice_calls, **limits),
    )


def state(core: SessionStateMachine) -> dict[str, Any]:
    """All that can be seen of a session."""
    return {
        "variables": {
            v.id: (v.state, v.text, v.depth, v.producer and v.producer.call.id, v.want)
            for v in core.graph.variables.values()
        },
        "calls": {
            key: (t.state, t.wanted, t.depth, t.num_missing, t.label, t.call.number, t.call.cause)
            for key, t in llm_calls(core).items()
        },
    }


def apply(core: SessionStateMachine, event: tuple[Any, ...]) -> tuple[type, Any] | None:
    """Do one thing to a session; returns its refusal if there is one."""
    kind, *arguments = event
    try:
        if kind == "submit":
            core.submit(*arguments, 3.0)
        elif kind == "want":
            core.want(*arguments, 2.0)
        elif kind == "set":
            core.set(*arguments, "set", 2.0)
        elif kind == "declare":
            core.declare(*arguments)
        elif kind == "cancel":
            core.cancel(*arguments, 2.0)
        elif kind == "finish":
            started = [t for t in llm_calls(core).values() if t.started and not t.native]
            if started:
                core.finished(started[0], "done", None, 2.0)
        else:
            core.close("over", 2.0)
    except Exception as error:
        return type(error), getattr(error, "code", None)
    return None


@st.composite
def additions(draw: st.DrawFn, name: str, names: Sequence[str]) -> list[NewCall]:
    """Calls that read and set variables of these names, which are rarely refused."""
    outputs = draw(st.lists(st.sampled_from(names), min_size=1, max_size=4, unique=True))
    calls = []
    for n, output in enumerate(outputs):
        inputs = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
        calls.append(llm(f"{name}{n}", (" ".join(v for v in inputs if v != output), output)))
    return calls


@st.composite
def events(draw: st.DrawFn, calls: Sequence[NewCall], names: Sequence[str]) -> list[Any]:
    """Things to do to a session of these calls. names: of variables."""
    kinds = st.one_of(
        st.tuples(st.just("want"), st.sampled_from(names), criteria()),
        st.tuples(st.just("set"), st.sampled_from(names)),
        st.tuples(st.just("declare"), st.sampled_from(names)),
        st.tuples(st.just("cancel"), st.sampled_from([call.id for call in calls])),
        st.tuples(st.just("submit"), additions("more", names)),
        st.just(("finish",)),
        st.sampled_from([("finish",), ("finish",), ("close",)]),
    )
    return draw(st.lists(kinds, max_size=4))


@given(programs(4), st.data())
@settings(max_examples=examples(80, long=4000), deadline=None)
def test_a_program_in_slices_is_added_as_in_one(before: list[NewCall], data: st.DataObject) -> None:
    """As if all that came between its slices had come before it. It is refused if it would have
    been at some time, and then nothing of it is there."""
    names = [*variables(before)[:3], "n0", "n1", "n2", "n3"]
    new = data.draw(additions("new", names))
    sliced = core_with(1)
    apply(sliced, ("submit", before))
    waiting, came, refused = data.draw(events(before, names)), [], False
    adding = sliced.submitting(new, 3.0)
    try:
        while True:
            next(adding)
            if waiting and data.draw(st.booleans()):
                came.append(waiting.pop(0))
                apply(sliced, came[-1])
    except StopIteration:
        pass
    except REFUSALS:
        refused = True
    sliced.check_integrity()
    refusals = []
    for count in range(len(came) + 1):
        whole = core_with(1000)
        for event in (("submit", before), *came[:count]):
            apply(whole, event)
        refusals.append(apply(whole, ("submit", new)) is not None)
    if refused:
        assert any(refusals)
        whole = core_with(1000)
        for event in (("submit", before), *came):
            apply(whole, event)
    else:
        assert not refusals[-1]
    assert state(sliced) == state(whole)


def test_a_program_is_refused_if_one_of_its_outputs_is_set_after_it_was_checked() -> None:
    core = core_with(1)
    core.declare("x")
    adding = core.submitting([llm("c0", ("", "x")), llm("c1", ("", "y"))], 3.0)
    next(adding)
    core.set("x", "set", 2.0)
    with pytest.raises(ConflictError) as refused:
        list(adding)
    assert refused.value.code == "already_set"
    assert core.graph.calls.keys() == set() and core.graph.variables.keys() == {"x"}
    core.check_integrity()


@given(programs(), st.data())
@settings(max_examples=examples(50, long=1000), deadline=None)
def test_a_session_that_closes_in_slices_ends_all_and_starts_nothing(
    calls: list[NewCall], data: st.DataObject
) -> None:
    core = core_with(1)
    if apply(core, ("submit", calls)) is not None:
        return
    for event in data.draw(events(calls, variables(calls))):
        apply(core, event)
    if core.closed:
        return
    core.take_actions()
    running = [t for t in llm_calls(core).values() if t.started and not t.native]
    settled = {v.id for v in core.graph.variables.values() if not v.pending}
    for _ in core.closing("over", 5.0):
        if running and data.draw(st.booleans()):
            llm_call = running.pop()
            core.finished(llm_call, "late", None, 5.0)
        refusal = apply(core, ("want", "other", Criteria()))
        assert refusal is not None and refusal[0] is SessionGoneError
    actions = core.take_actions()
    assert not any(isinstance(action, Start | Prefill) for action in actions)
    told = [action.variable.id for action in actions if isinstance(action, Settled)]
    assert sorted(told) == sorted({*core.graph.variables} - settled)
    core.check_integrity()


def test_closing_and_adding_pause() -> None:
    core = core_with(10)
    pauses = sum(1 for _ in core.submitting([llm(f"c{n}", ("x", f"v{n}")) for n in range(95)], 0.0))
    assert pauses >= 9
    assert sum(1 for _ in core.closing("over", 0.0)) >= 18


@given(programs(4), st.data())
@settings(max_examples=examples(100, long=4000), deadline=None)
def test_consumers_told_of_a_value_later_start_as_if_told_at_once(
    before: list[NewCall], data: st.DataObject
) -> None:
    """Whatever comes before they are told. Which LLM call finishes depends on what has started, so
    all are told before that."""
    names = [*variables(before)[:3], "n0", "n1", "n2", "n3"]
    sliced, whole = core_with(1000, slice_consumers=1), core_with(1000)
    started: dict[SessionStateMachine, set[str]] = {sliced: set(), whole: set()}

    def note(core: SessionStateMachine) -> None:
        core.check_integrity()
        for action in core.take_actions():
            if isinstance(action, Start):
                started[core].add(action.llm_call.call.id)

    for event in [("submit", before), *data.draw(events(before, names))]:
        while sliced.informs and (event[0] == "finish" or data.draw(st.booleans())):
            sliced.inform(2.0)
            note(sliced)
        refused = [apply(core, event) for core in (sliced, whole)]
        assert refused[0] == refused[1]
        note(sliced)
        note(whole)
    while sliced.informs:
        sliced.inform(2.0)
        note(sliced)
    assert state(sliced) == state(whole) and started[sliced] <= started[whole]
