"""What a session starts, aborts and tells, event by event. test_session_machine.py has the rest."""

from __future__ import annotations

import pytest

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.semantic.core.nodes import Level, NewCall, OutputPiece
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import (
    AbortCall,
    Action,
    Prefill,
    PromoteCall,
    SessionStateMachine,
    Settled,
    Start,
)
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import CallKind, CallState, Criteria, Perf, VariableState
from support.naive_programs import llm, llm_calls, native
from support.programs import DUE_LATER

LATENCY = Criteria()
PENDING, READY = VariableState.PENDING, VariableState.READY
FAILED, CANCELLED = VariableState.FAILED, VariableState.CANCELLED


def core_of(*calls: NewCall, limits: SessionLimits | None = None) -> SessionStateMachine:
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0, limits=limits or SessionLimits())
    core.submit(calls, 0.0)
    return core


def shown(actions: list[Action]) -> list[str]:
    """As 'start c', 'prefill c 2', 'ready v'; the second LLM call of a call as c/1."""

    def name(action: Start | PromoteCall | AbortCall | Prefill) -> str:
        llm_call = action.llm_call
        return llm_call.call.id + (f"/{llm_call.index}" if llm_call.index else "")

    def words(action: Action) -> str:
        match action:
            case Settled(variable):
                return f"{variable.state} {variable.id}"
            case Prefill(_, pieces):
                return f"prefill {name(action)} {pieces}"
            case _:
                return f"{type(action).__name__.removesuffix('Call').lower()} {name(action)}"

    return [words(action) for action in actions]


def take(core: SessionStateMachine) -> list[str]:
    core.check_integrity()
    return shown(core.take_actions())


def states(core: SessionStateMachine) -> dict[str, VariableState]:
    return {v.id: v.state for v in core.graph.variables.values()}


def finish(core: SessionStateMachine, call: str, index: int = 0, text: str = "done") -> None:
    core.finished(llm_calls(core)[call, index], text, (1, 2), 1.0)


def test_nothing_runs_until_it_is_wanted_and_then_only_what_is_needed() -> None:
    core = core_of(llm("a", ("", "u")), llm("b", ("u", "v")), llm("other", ("u", "w")))
    assert take(core) == []
    core.want("v", LATENCY, 0.0)
    assert take(core) == ["start a"]
    finish(core, "a")
    assert take(core) == ["ready u", "start b"]
    finish(core, "b", text="value")
    assert take(core) == ["ready v"]
    variable = core.variable("v")
    assert (variable.text, variable.token_ids) == ("value", (1, 2))
    assert states(core)["w"] is PENDING


def test_starts_come_in_the_order_of_submission() -> None:
    core = core_of(*(llm(f"m{i}", ("", f"v{i}")) for i in range(5)), llm("r", ("v3 v0", "o")))
    core.want("o", LATENCY, 0.0)
    core.want("v4", LATENCY, 0.0)
    assert take(core) == ["start m0", "start m3", "start m4"]


def test_a_call_with_two_outputs_goes_on_where_it_was() -> None:
    core = core_of(llm("talk", ("x", "question"), ("answer", "thanks")))
    core.want("thanks", LATENCY, 0.0)
    core.set("x", "text", 0.0)
    assert take(core) == ["ready x", "start talk"]
    core.set("answer", "text", 0.0)
    assert take(core) == ["ready answer"]
    finish(core, "talk")
    assert take(core) == ["ready question", "start talk/1"]


def test_only_the_first_llm_call_runs_if_the_second_is_not_requested() -> None:
    core = core_of(llm("talk", ("", "a"), ("", "b")))
    core.want("a", LATENCY, 0.0)
    finish(core, "talk")
    assert take(core) == ["ready a"], "its start was pointless by the time it was asked for"
    core.want("b", LATENCY, 0.0)
    assert take(core) == ["start talk/1"]


def test_a_program_that_comes_after_the_want_runs_at_once() -> None:
    core = core_of(llm("last", ("mid", "out")))
    core.want("out", LATENCY, 0.0)
    assert take(core) == []
    core.submit([llm("first", ("", "start")), llm("second", ("start", "mid"))], 1.0)
    assert take(core) == ["start first"]
    finish(core, "first")
    assert take(core) == ["ready start", "start second"]


def test_what_only_a_failed_call_would_have_needed_does_not_run() -> None:
    core = core_of(llm("bad", ("", "u")), llm("both", ("u z", "out")), llm("other", ("z", "w")))
    core.want("out", LATENCY, 0.0)
    core.failed(llm_calls(core)["bad", 0], Cause("bad", FailedStage.GENERATE, "it broke"), 1.0)
    take(core)
    core.submit([llm("late", ("", "z"))], 2.0)
    assert take(core) == []
    core.want("w", LATENCY, 3.0)
    assert take(core) == ["start late"]


def test_native_calls_are_run_by_the_client_and_what_follows_goes_on() -> None:
    core = core_of(llm("a", ("", "u")), native("f", "u", "p q"), llm("b", ("p", "out")))
    core.want("out", LATENCY, 0.0)
    assert take(core) == ["start a"]
    assert llm_calls(core)["f", 0].state is CallState.WAITING
    finish(core, "a")
    assert take(core) == ["ready u"]
    assert llm_calls(core)["f", 0].state is CallState.READY
    core.set("p", "1", 0.0)
    assert take(core) == ["ready p", "start b"]
    core.set("q", "2", 0.0)
    assert llm_calls(core)["f", 0].state is CallState.FINISHED


def test_a_native_function_that_fails_says_so_to_all_that_need_it() -> None:
    core = core_of(native("f", "x", "p q"), llm("b", ("q", "out")), llm("c", ("p", "fine")))
    core.set("p", "1", 0.0)
    core.native_failed("f", "ZeroDivisionError", 1.0)
    take(core)
    assert core.variable("out").cause == Cause("f", FailedStage.NATIVE, "ZeroDivisionError")
    assert states(core) == {
        **{"x": PENDING, "p": READY, "q": FAILED},
        **{"out": FAILED, "fine": PENDING},
    }
    with pytest.raises(ConflictError):
        core.native_failed("f", "again", 2.0)
    with pytest.raises(InvalidRequestError):
        core.native_failed("c", "it is not native", 2.0)


def test_a_failure_reaches_what_needs_it_and_nothing_else() -> None:
    core = core_of(
        llm("bad", ("", "u")),
        llm("sibling", ("", "w")),
        llm("far", ("v w", "out"), ("", "more")),
        llm("near", ("u", "v")),
        llm("half", ("", "h1"), ("u", "h2"), ("", "h3")),
    )
    for name in ("more", "h3"):
        core.want(name, LATENCY, 0.0)
    take(core)
    cause = Cause("bad", FailedStage.GENERATE, "out of memory", "u")
    core.failed(llm_calls(core)["bad", 0], cause, 1.0)
    told = take(core)
    assert sorted(told) == sorted(
        [f"failed {name}" for name in ("u", "v", "out", "more", "h2", "h3")]
        + ["demote half", "demote sibling"]
    )
    assert all(core.variable(name).cause is cause for name in ("u", "v", "out", "more", "h2", "h3"))
    assert core.graph.calls["far"].cause is cause
    finish(core, "sibling")
    finish(core, "half")
    assert take(core) == ["ready w", "ready h1"]


def test_calls_that_come_after_the_failure_have_failed_too() -> None:
    core = core_of(llm("bad", ("", "u")))
    core.want("u", LATENCY, 0.0)
    cause = Cause("bad", FailedStage.TRANSFORM, "no JSON", "u")
    core.failed(llm_calls(core)["bad", 0], cause, 1.0)
    core.submit([llm("late", ("u", "v")), llm("later", ("v", "w"))], 2.0)
    take(core)
    assert core.variable("w").cause is cause


def test_cancelling_aborts_what_runs_and_ends_what_needs_it() -> None:
    core = core_of(llm("a", ("", "u"), ("", "u2")), llm("b", ("u2", "v")), llm("c", ("u", "w")))
    core.want("v", LATENCY, 0.0)
    core.want("w", LATENCY, 0.0)
    finish(core, "a")
    take(core)
    core.cancel("a", 2.0)
    assert take(core) == ["abort a/1", "cancelled u2", "cancelled v"]
    cause = core.variable("v").cause
    assert cause == Cause("a", FailedStage.CANCELLED, "A client cancelled it.")
    assert str(UpstreamError(cause)) == "The request a was cancelled: A client cancelled it."
    finish(core, "a", 1)
    core.failed(llm_calls(core)["a", 1], Cause("a", FailedStage.GENERATE, "late"), 3.0)
    core.first_token(llm_calls(core)["a", 1], 3.0)
    core.cancel("a", 3.0)
    assert take(core) == [], "it was over"
    finish(core, "c")
    assert take(core) == ["ready w"]
    with pytest.raises(NotFoundError):
        core.cancel("nobody", 3.0)


def test_what_was_never_handed_out_is_not_aborted_either() -> None:
    core = core_of(llm("a", ("", "u")))
    core.want("u", LATENCY, 0.0)
    core.cancel("a", 0.0)
    assert take(core) == ["cancelled u"]


def test_what_has_not_been_handed_out_is_not_promoted_either() -> None:
    core = core_of(llm("a", ("", "u")))
    core.want("u", Criteria(perf=Perf.THROUGHPUT), 0.0)
    core.want("u", LATENCY, 0.0)
    assert take(core) == ["start a"], "as a real-time request"
    core = core_of(llm("a", ("", "u")))
    core.want("u", Criteria(perf=Perf.THROUGHPUT), 0.0)
    assert take(core) == ["start a"]
    core.want("u", LATENCY, 0.0)
    assert take(core) == ["promote a"]


def test_nothing_is_done_for_a_llm_call_that_was_over_in_the_meantime() -> None:
    core = core_of(llm("a", ("", "u")), llm("b", ("u", "v")), llm("c", ("", "w")))
    for name in ("v", "w"):
        core.want(name, Criteria(perf=Perf.THROUGHPUT), 0.0)
    assert take(core) == ["start a", "start c"]
    core.want("v", LATENCY, 1.0)
    core.want("w", LATENCY, 1.0)
    core.first_token(llm_calls(core)["a", 0], 1.0)
    finish(core, "a")
    core.cancel("b", 1.0)
    assert take(core) == ["promote c", "ready u", "cancelled v"]


def test_known_beginnings_are_computed_while_the_rest_is_generated() -> None:
    core = core_of(llm("a", ("", "u")), llm("b", ("", "v")), llm("both", ("x u v", "out")))
    core.set("x", "text", 0.0)
    core.want("out", DUE_LATER, 0.0)
    assert take(core) == ["ready x", "start a", "start b"]
    core.first_token(llm_calls(core)["b", 0], 1.0)
    assert take(core) == [], "v is being generated, but u is missing before that"
    core.first_token(llm_calls(core)["a", 0], 1.0)
    assert take(core) == ["prefill both 3"], "its name, x, and what is between"
    finish(core, "a")
    assert take(core) == ["ready u", "prefill both 5", "promote b"], "b is the last of its group"
    finish(core, "b")
    assert take(core) == ["ready v", "start both"]


def test_no_early_prefill_of_unrequested_or_later_llm_calls() -> None:
    core = core_of(
        llm("a", ("", "u")), llm("idle", ("u", "w")), llm("talk", ("", "q"), ("u", "thanks"))
    )
    core.want("thanks", LATENCY, 0.0)
    take(core)
    core.first_token(llm_calls(core)["a", 0], 1.0)
    assert take(core) == []
    finish(core, "talk")
    assert take(core) == ["ready q", "prefill talk/1 3"]
    core.want("w", LATENCY, 0.0)
    assert take(core) == ["prefill idle 1"]


def test_values_are_set_once() -> None:
    core = core_of(llm("a", ("x", "u")))
    core.set("x", "1", 0.0)
    for name, code in (("x", "already_set"), ("u", "already_produced")):
        with pytest.raises(ConflictError) as refused:
            core.set(name, "2", 0.0)
        assert refused.value.code == code
    assert core.variable("x").text == "1"
    with pytest.raises(NotFoundError):
        core.set("nobody", "2", 0.0)
    with pytest.raises(NotFoundError):
        core.want("nobody", LATENCY, 0.0)


def test_plain_requests_are_watched_only() -> None:
    plain = NewCall(id="p", kind=CallKind.PLAIN, pieces=(OutputPiece("answer", "u"),))
    core = core_of(llm("b", ("u", "out")))
    core.want("out", LATENCY, 0.0)
    core.submit([plain], 1.0)
    assert take(core) == []
    core.first_token(llm_calls(core)["p", 0], 2.0)
    assert take(core) == ["prefill b 1"]
    finish(core, "p")
    assert take(core) == ["ready u", "start b"]


def test_times_of_a_llm_call() -> None:
    core = core_of(llm("a", ("", "u")))
    llm_call = llm_calls(core)["a", 0]
    core.want("u", LATENCY, 1.0)
    core.first_token(llm_call, 2.0)
    core.first_token(llm_call, 2.5)
    core.finished(llm_call, "x", None, 3.0)
    assert (llm_call.ready_s, llm_call.first_token_s, llm_call.end_s) == (1.0, 2.0, 3.0)


def test_closing_ends_everything_and_refuses_more() -> None:
    core = core_of(llm("a", ("", "u")), llm("b", ("u z", "v")))
    core.want("v", LATENCY, 0.0)
    take(core)
    core.close("The session was deleted.", 1.0)
    told = take(core)
    assert told[0] == "abort a"
    assert sorted(told[1:]) == ["cancelled u", "cancelled v", "cancelled z"]
    assert {v.cause.message for v in core.graph.variables.values() if v.cause} == {
        "The session was deleted."
    }
    for change in (
        lambda: core.submit([llm("c", ("", "w"))], 2.0),
        lambda: core.want("v", LATENCY, 2.0),
        lambda: core.set("z", "", 2.0),
        lambda: core.declare("new"),
    ):
        with pytest.raises(SessionGoneError):
            change()
    assert core.due() is None
    core.close("again", 3.0)
    assert take(core) == []


# Memory is bounded (the graph of the authors' code only grows).


def test_a_session_forgets_what_was_over_long_ago() -> None:
    limits = SessionLimits(max_calls=2, kept_calls=3, max_variables=6, max_value_chars=100)
    core = core_of(llm("c0", ("", "v0")), limits=limits)
    for i in range(50):
        core.submit([llm(f"c{i + 1}", (f"v{i}", f"v{i + 1}"))], 0.0)
        core.want(f"v{i}", LATENCY, 0.0)
        finish(core, f"c{i}", text="ten chars.")
        assert take(core)[-1] == f"ready v{i}"
        assert len(core.graph.calls) <= 2 + 3
        assert len(core.graph.variables) <= 6
    assert "v45" not in core.graph.variables or core.variable("v45").text == "ten chars."
    with pytest.raises(NotFoundError):
        core.call("c0")
    with pytest.raises(NotFoundError):
        core.variable("v0")
    assert core.variable("v49").text == "ten chars."


def test_values_that_are_needed_are_not_forgotten() -> None:
    limits = SessionLimits(kept_calls=0, max_value_chars=25)
    core = core_of(llm("later", ("old x", "out")), llm("a", ("", "old")), limits=limits)
    core.want("old", LATENCY, 0.0)
    finish(core, "a", text="ten chars.")
    for i in range(5):
        core.submit([llm(f"b{i}", ("", f"w{i}"))], 0.0)
        core.want(f"w{i}", LATENCY, 0.0)
        finish(core, f"b{i}", text="ten chars.")
        core.check_integrity()
    assert core.variable("old").text == "ten chars."
    assert [f"w{i}" in core.graph.variables for i in range(5)] == [False] * 4 + [True]


def test_old_calls_are_forgotten_before_a_new_value_is_refused() -> None:
    core = core_of(limits=SessionLimits(kept_calls=10, max_value_chars=25))
    for i in range(5):
        core.submit([llm(f"c{i}", ("", f"v{i}"))], 0.0)
        core.want(f"v{i}", LATENCY, 0.0)
        finish(core, f"c{i}", text="ten chars.")
        core.check_integrity()
        assert core.variable(f"v{i}").text == "ten chars."
    assert list(core.graph.calls) == ["c3", "c4"]
    core.submit([NewCall(id="d", pieces=llm("d", ("k", "w")).pieces, values={"k": "x" * 15})], 0.0)
    assert list(core.graph.calls) == ["c4", "d"]
    with pytest.raises(SessionLimitError, match="characters"):  # it reads the last value itself
        core.submit(
            [NewCall(id="e", pieces=llm("e", ("v4 j", "u")).pieces, values={"j": "x"})], 0.0
        )
    core.check_integrity()
    assert core.variable("v4").text == "ten chars."


def test_a_forgotten_value_that_is_used_again_stays() -> None:
    limits = SessionLimits(kept_calls=0, max_variables=3)
    core = core_of(llm("a", ("", "u")), limits=limits)
    core.want("u", LATENCY, 0.0)
    finish(core, "a")
    core.submit([llm("b", ("u", "v"))], 0.0)
    core.declare("k")
    core.check_integrity()
    with pytest.raises(SessionLimitError):
        core.declare("too many")
    core.want("v", LATENCY, 0.0)
    assert take(core)[-1] == "start b"
    finish(core, "b")
    core.declare("now there is room")
    assert "u" not in core.graph.variables


def test_no_room_is_made_by_what_the_new_call_reads() -> None:
    core = core_of(llm("a", ("", "u")), limits=SessionLimits(kept_calls=0, max_variables=3))
    core.want("u", LATENCY, 0.0)
    finish(core, "a")
    core.declare("k")
    core.declare("j")
    with pytest.raises(SessionLimitError, match="variables"):
        core.submit([llm("b", ("u", "v"))], 0.0)
    core.submit([llm("c", ("k", "v"))], 0.0)
    core.check_integrity()
    assert list(core.graph.variables) == ["k", "j", "v"]


def test_what_there_is_no_room_for_is_refused_and_changes_nothing() -> None:
    limits = SessionLimits(max_calls=2, max_variables=4, max_value_chars=10)
    core = core_of(llm("a", ("x", "u")), limits=limits)
    with pytest.raises(SessionLimitError, match="requests"):
        core.submit([llm("b", ("", "v")), llm("c", ("", "w"))], 0.0)
    with pytest.raises(SessionLimitError, match="variables"):
        core.submit([llm("b", ("k l", "v"))], 0.0)
    pieces = llm("b", ("k", "v")).pieces
    with pytest.raises(SessionLimitError, match="characters"):
        core.submit([NewCall(id="b", pieces=pieces, values={"k": "x" * 11})], 0.0)
    with pytest.raises(SessionLimitError, match="characters"):
        core.set("x", "x" * 11, 0.0)
    core.check_integrity()
    assert list(core.graph.calls) == ["a"] and list(core.graph.variables) == ["x", "u"]
    core.set("x", "x" * 10, 0.0)
    core.want("u", LATENCY, 0.0)
    take(core)
    finish(core, "a", text="y")
    assert take(core) == ["failed u"]
    cause = core.variable("u").cause
    assert cause is not None and "characters" in cause.message


def test_unset_inputs_are_forgotten_with_their_calls_unless_a_client_waits_for_them() -> None:
    core = core_of(limits=SessionLimits(kept_calls=0, max_variables=4, max_value_chars=10))
    core.submit([llm("asked", ("", "v"))], 0.0)
    core.submit([llm("a", ("waited", "u"))], 0.0)
    core.want("waited", LATENCY, 0.0)
    core.cancel("a", 0.0)
    for i in range(5):
        core.submit([llm(f"b{i}", (f"x{i}", f"w{i}"))], 0.0)
        core.cancel(f"b{i}", 0.0)
        core.check_integrity()
    assert list(core.graph.variables) == ["v", "waited", "x4", "w4"]
    core.set("x4", "ten chars.", 0.0)
    core.check_integrity()
    core.set("waited", "ten chars.", 0.0)
    core.check_integrity()
    assert list(core.graph.variables) == ["v", "waited", "w4"]


def test_asking_for_every_value_of_a_long_chain_is_done_in_slices() -> None:
    """What makes a wanted value is labeled at once, what is behind it as time goes by; in the
    end it is all the same."""
    chain = [llm(f"c{i}", (f"v{i}", f"v{i + 1}")) for i in range(100)]
    criteria = Criteria(deadline_s=500.0)
    core = core_of(*chain, limits=SessionLimits(label_steps=500))
    atonce = core_of(*chain, limits=SessionLimits(label_steps=10**9))
    for i in range(100, 0, -1):
        core.want(f"v{i}", criteria, 0.0)
        atonce.want(f"v{i}", criteria, 0.0)
    core.check_integrity()
    assert sum(len(llm_call.stages) for llm_call in llm_calls(core).values()) <= 500 + 2 * 100
    assert {llm_call.label.level for llm_call in llm_calls(core).values()} == {Level.RT}
    slices = 0
    while (due_s := core.due()) is not None and due_s < 100.0:
        core.tick(due_s)
        slices += 1
    core.check_integrity()
    assert slices >= 15
    for key, llm_call in llm_calls(core).items():
        expected = llm_calls(atonce)[key]
        assert (llm_call.label, llm_call.stage) == (expected.label, expected.stage)
        assert len(llm_call.stages) == len(expected.stages)


def test_labels_beyond_the_limit_wait_until_others_are_not_needed_any_more() -> None:
    chain = [llm(f"c{i}", (f"v{i}", f"v{i + 1}")) for i in range(20)]
    core = core_of(*chain, limits=SessionLimits(max_labels=30))
    core.want("v20", LATENCY, 0.0)
    core.want("v19", LATENCY, 0.0)
    core.want("v1", LATENCY, 0.0)
    assert core.due() is None
    assert len(llm_calls(core)["c0", 0].stages) == 3, "c0 makes v1"
    assert len(llm_calls(core)["c1", 0].stages) == 2
    core.want("v3", LATENCY, 0.0)
    assert len(llm_calls(core)["c1", 0].stages) == 2
    core.cancel("c18", 0.0)
    due_s = core.due()
    assert due_s is not None
    core.tick(due_s)
    assert len(llm_calls(core)["c1", 0].stages) == 3
    assert core.due() is None
    core.check_integrity()


def test_a_value_without_room_leaves_no_variable() -> None:
    core = core_of(limits=SessionLimits(max_value_chars=10))
    with pytest.raises(SessionLimitError):
        core.declare("v", chars=11)
    assert not core.graph.variables
    core.declare("v", chars=10)


def test_what_a_client_makes_itself_is_not_cancelled_here() -> None:
    plain = NewCall(id="p", kind=CallKind.PLAIN, pieces=(OutputPiece("o", "v"),))
    core = core_of(plain)
    with pytest.raises(InvalidRequestError, match="closes its connection"):
        core.cancel("p", 0.0)
    assert llm_calls(core)["p", 0].open
    finish(core, "p")
    core.cancel("p", 1.0)
    assert core.variable("v").state is READY


def test_a_thousand_maps_and_a_chain_of_ten_thousand() -> None:
    maps = [llm(f"m{i}", ("", f"v{i}")) for i in range(1000)]
    reduce = llm("r", (" ".join(f"v{i}" for i in range(1000)), "out"))
    core = core_of(*maps, reduce)
    core.want("out", Criteria(perf=Perf.LATENCY, deadline_s=60.0), 0.0)
    assert len(core.take_actions()) == 1000
    chain = core_of(*(llm(f"c{i}", (f"v{i}", f"v{i + 1}")) for i in range(10_000)))
    chain.want("v10000", LATENCY, 0.0)
    chain.cancel("c0", 1.0)
    assert chain.variable("v10000").state is CANCELLED
    assert not any(call.open for call in chain.graph.calls.values())
