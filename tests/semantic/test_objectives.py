"""What each request must achieve, for the programs of the paper and against the naive algorithm."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.request import ServiceClass, Slo
from bros.semantic.core.nodes import Label, Level, LlmCall, NewCall, Want
from bros.semantic.core.objectives import (
    CHECK_EVERY_S,
    CHECKED_CALLS,
    LAXITY_MARGIN_S,
    EngineTerms,
    terms,
)
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import DemoteCall, PromoteCall, SessionStateMachine
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.schema import Criteria, Perf
from support.naive_programs import (
    NaiveGraph,
    NaiveObjectives,
    TurnId,
    criteria,
    llm,
    llm_call_id,
    llm_calls,
    native,
    programs,
    variables,
)
from support.programs import DUE_LATER, LATENCY, THROUGHPUT
from support.tier import examples

RT, GROUP, BATCH = Level.RT, Level.GROUP, Level.THROUGHPUT


def core_of(*calls: NewCall, seconds: float = 1.0) -> SessionStateMachine:
    core = SessionStateMachine("s", estimate=lambda llm_call: seconds)
    core.submit(calls, 0.0)
    return core


def levels(core: SessionStateMachine) -> dict[str, tuple[Level, int | None]]:
    """Level and stage of the first LLM call of each call of the model."""
    return {
        call: (llm_call.label.level, llm_call.stage)
        for (call, index), llm_call in llm_calls(core).items()
        if not index and not llm_call.native
    }


def groups(core: SessionStateMachine) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for (call, _), llm_call in llm_calls(core).items():
        for group in llm_call.groups:
            found.setdefault(group.id, set()).add(call)
    return found


def group_levels(core: SessionStateMachine) -> dict[str, Level]:
    return {group.id: group.level for t in llm_calls(core).values() for group in t.groups}


def finish(core: SessionStateMachine, *calls: str, now: float = 1.0) -> None:
    for call in calls:
        core.finished(llm_calls(core)[call, 0], "done", None, now)


def tick_until(core: SessionStateMachine, end_s: float, until: str = "") -> float | None:
    """Tick whenever that is due, until an LLM call is promoted. Returns that time; None if none is
    before end_s. until: go on to a promotion of this call."""
    before = {t for t in llm_calls(core).values() if t.promoted is not None}
    while (due_s := core.due()) is not None and due_s <= end_s:
        core.tick(due_s)
        new = {t.call.id for t in llm_calls(core).values() if t.promoted and t not in before}
        if until in new or (new and not until):
            return due_s
    return None


def promoted(core: SessionStateMachine) -> set[str]:
    return {a.llm_call.call.id for a in core.take_actions() if isinstance(a, PromoteCall)}


def demoted(core: SessionStateMachine) -> set[str]:
    return {a.llm_call.call.id for a in core.take_actions() if isinstance(a, DemoteCall)}


FIGURE_9 = (
    *(llm(name, ("doc", f"v{name}")) for name in "4567"),
    llm("3", ("v4 v5", "v3")),
    llm("1", ("v3", "x")),
    llm("2", ("v6 v7", "y")),
)


def test_figure_9() -> None:
    core = core_of(*FIGURE_9)
    core.want("x", LATENCY, 0.0)
    core.want("y", LATENCY, 0.0)
    assert levels(core) == {
        **{"1": (RT, 0), "2": (RT, 0), "3": (RT, 1)},
        **{"4": (RT, 2), "5": (RT, 2), "6": (RT, 1), "7": (RT, 1)},
    }
    assert groups(core) == {"x:2": {"4", "5"}, "y:1": {"6", "7"}}


def test_every_request_of_a_chain_gates_the_rest() -> None:
    core = core_of(*(llm(f"c{i}", (f"v{i}", f"v{i + 1}")) for i in range(4)))
    core.want("v4", LATENCY, 0.0)
    assert levels(core) == {f"c{i}": (RT, 3 - i) for i in range(4)}
    assert groups(core) == {}


def map_reduce(maps: int) -> tuple[NewCall, ...]:
    values = [f"v{i}" for i in range(maps)]
    return (
        *(llm(f"m{i}", (f"x{i}", value)) for i, value in enumerate(values)),
        llm("reduce", (" ".join(values), "out")),
    )


def test_maps_are_a_task_group_of_their_reduce() -> None:
    core = core_of(*map_reduce(3))
    core.want("out", LATENCY, 0.0)
    assert levels(core) == {**{f"m{i}": (RT, 1) for i in range(3)}, "reduce": (RT, 0)}
    assert groups(core) == {"out:1": {"m0", "m1", "m2"}}


@pytest.mark.parametrize("perf", [Perf.LATENCY, Perf.TTFT, Perf.TPOT])
def test_a_group_is_real_time_if_a_client_waits_and_names_no_deadline(perf: Perf) -> None:
    core = core_of(*map_reduce(3))
    core.want("out", Criteria(perf=perf), 0.0)
    assert levels(core) == {**{f"m{i}": (RT, 1) for i in range(3)}, "reduce": (RT, 0)}
    core = core_of(*map_reduce(3))
    core.want("out", Criteria(perf=perf, deadline_s=50.0), 0.0)
    assert levels(core) == {**{f"m{i}": (GROUP, 1) for i in range(3)}, "reduce": (RT, 0)}
    core.want("out", Criteria(perf=perf), 0.0)
    assert {level for level, _ in levels(core).values()} == {RT}
    core.want("out", Criteria(perf=perf, deadline_s=50.0), 0.0)
    assert {level for level, _ in levels(core).values()} == {RT}, "also what was labeled anew"


def test_parallel_chains_are_groups_stage_by_stage() -> None:
    core = core_of(
        *(llm(f"a{i}", ("x", f"u{i}")) for i in range(2)),
        *(llm(f"b{i}", (f"u{i}", f"v{i}")) for i in range(2)),
        llm("reduce", ("v0 v1", "out")),
    )
    core.want("out", LATENCY, 0.0)
    assert groups(core) == {"out:1": {"b0", "b1"}, "out:2": {"a0", "a1"}}


def test_diamond() -> None:
    core = core_of(
        llm("top", ("x", "t")),
        llm("left", ("t", "l")),
        llm("right", ("t", "r")),
        llm("right2", ("r", "r2")),
        llm("bottom", ("l r2", "out")),
    )
    core.want("out", LATENCY, 0.0)
    assert levels(core) == {
        **{"top": (RT, 3), "right": (RT, 2), "bottom": (RT, 0)},
        **{"left": (RT, 1), "right2": (RT, 1)},
    }
    assert groups(core) == {"out:1": {"left", "right2"}}


def test_native_functions_in_the_middle_add_no_stage() -> None:
    core = core_of(
        llm("a", ("x", "va")),
        llm("b", ("x", "vb")),
        native("n1", "va", "n1o"),
        native("n2", "n1o", "n2o"),
        llm("c", ("n2o vb", "out")),
    )
    core.want("out", LATENCY, 0.0)
    assert levels(core) == {"a": (RT, 1), "b": (RT, 1), "c": (RT, 0)}
    assert groups(core) == {"out:1": {"a", "b"}}


def test_what_feeds_a_native_sink_is_at_its_own_stage_not_read_by_the_caller() -> None:
    core = core_of(llm("a", ("x", "va")), llm("b", ("x", "vb")), native("n", "va vb", "out"))
    core.want("out", Criteria(perf=Perf.TTFT, ttft_s=0.1), 0.0)
    assert groups(core) == {"out:1": {"a", "b"}}
    one = core_of(llm("a", ("x", "va")), native("n", "va", "out"))
    one.want("out", Criteria(perf=Perf.TTFT, ttft_s=0.1), 0.0)
    label = llm_calls(one)["a", 0].label
    assert label == Label(level=RT, objectives=frozenset({Perf.LATENCY}))


def test_llm_calls_of_one_call_are_one_request() -> None:
    core = core_of(llm("talk", ("x", "a"), ("", "b")), llm("end", ("b", "out")))
    core.want("out", LATENCY, 0.0)
    both = [llm_calls(core)["talk", i] for i in range(2)]
    assert [(llm_call.label.level, llm_call.stage) for llm_call in both] == [(RT, 1), (RT, 1)]


def test_objectives_of_a_reader_are_those_of_the_output_that_is_read() -> None:
    """And not of an earlier output of the same call."""
    core = core_of(llm("talk", ("x", "a"), ("", "b")))
    core.want("b", Criteria(perf=Perf.TTFT, ttft_s=0.1, deadline_s=31.0), 0.0)
    first, second = (llm_calls(core)["talk", i] for i in range(2))
    assert first.label == Label(level=RT, objectives=frozenset({Perf.LATENCY}), deadline_s=30.0)
    assert terms(first, 0.0, 100.0, DEFAULT).slo == Slo(
        pytest.approx(0.2), pytest.approx(0.3), 30.0
    )
    assert (second.label.ttft_s, second.label.objectives) == (0.1, {Perf.TTFT})
    assert terms(second, 0.0, 100.0, DEFAULT).slo == Slo(0.1, None, 31.0)
    core.want("a", Criteria(perf=Perf.TPOT, tpot_s=0.5), 0.0)
    assert terms(first, 0.0, 100.0, DEFAULT).slo == Slo(None, 0.5, 30.0)


def test_throughput_raises_nothing_above_it() -> None:
    core = core_of(*map_reduce(3))
    core.want("out", THROUGHPUT, 0.0)
    assert {level for level, _ in levels(core).values()} == {BATCH}
    assert groups(core) == {"out:1": {"m0", "m1", "m2"}}, "a router places them as one"
    assert group_levels(core) == {"out:1": BATCH}
    assert llm_calls(core)["m0", 0].label.objectives == {Perf.THROUGHPUT}


def test_a_call_before_two_sinks_is_submitted_in_the_more_urgent_group() -> None:
    core = core_of(
        *(llm(name, ("x", f"v{name}")) for name in "ab"),
        llm("p", ("va vb", "out1")),
        llm("q", ("va vb", "out2")),
    )
    core.want("out1", THROUGHPUT, 0.0)
    core.want("out2", DUE_LATER, 0.0)
    group = llm_calls(core)["a", 0].group
    assert group is not None and group.id == "out2:1"


@pytest.mark.parametrize("order", list(itertools.permutations("ABC")))
def test_calls_before_several_sinks_are_submitted_in_the_largest_group(order: str) -> None:
    """Not in the one that was deduced first. Of equal ones, in that of the first sink."""
    core = core_of(
        *(llm(f"m{n}", ("x", f"v{n}")) for n in range(4)),
        llm("b", ("v0 v1", "B")),
        llm("a", ("v0 v1 v2 v3", "A")),
        llm("c", ("v0 v1 v2 v3", "C")),
    )
    for sink in order:
        core.want(sink, LATENCY, 0.0)
    groups = {llm_calls(core)[f"m{n}", 0].group for n in range(4)}
    assert [group.id for group in groups if group is not None] == ["A:1"]


def test_two_sinks_share_what_both_need() -> None:
    core = core_of(
        llm("a", ("x", "va")),
        llm("b", ("x", "vb")),
        llm("p", ("va vb", "out1")),
        llm("q", ("va", "out2")),
    )
    core.want("out1", DUE_LATER, 0.0)
    assert levels(core)["a"] == (GROUP, 1)
    core.want("out2", LATENCY, 0.0)
    assert levels(core)["a"] == (RT, 1), "it alone gates the second one"
    assert levels(core)["b"] == (GROUP, 1)
    assert groups(core) == {"out1:1": {"a", "b"}}, "it still counts for the makespan"


def test_groups_of_two_sinks_take_the_earlier_deadline() -> None:
    core = core_of(
        llm("a", ("x", "va")),
        llm("b", ("x", "vb")),
        llm("c", ("x", "vc")),
        llm("p", ("va vb", "out1")),
        llm("q", ("vb vc", "out2")),
        seconds=3.0,
    )
    core.want("out1", Criteria(deadline_s=100.0), 0.0)
    core.want("out2", Criteria(deadline_s=90.0), 0.0)
    deadlines = {name: llm_calls(core)[name, 0].label.deadline_s for name in "abc"}
    assert deadlines == {"a": 97.0, "b": 87.0, "c": 87.0}
    assert {g.id for g in llm_calls(core)["b", 0].groups} == {"out1:1", "out2:1"}


@pytest.mark.parametrize("inputs", ["vfast vslow", "vslow vfast"])
def test_latest_finish_is_that_of_the_slowest_way_to_the_sink(inputs: str) -> None:
    seconds = {"slow": 10.0}
    core = SessionStateMachine("s", estimate=lambda llm_call: seconds.get(llm_call.call.id, 1.0))
    core.submit(
        [
            llm("first", ("x", "v")),
            *(llm(name, ("v", f"v{name}")) for name in ("fast", "slow")),
            llm("last", (inputs, "out")),
        ],
        0.0,
    )
    core.want("out", Criteria(deadline_s=100.0), 0.0)
    deadlines = {call: llm_call.label.deadline_s for (call, _), llm_call in llm_calls(core).items()}
    assert deadlines == {"first": 89.0, "fast": 99.0, "slow": 99.0, "last": 100.0}


@pytest.mark.parametrize(("call", "how"), [("m0", "fails"), ("m0", ""), ("reduce", "")])
def test_what_no_value_needs_any_more_is_best_effort(call: str, how: str) -> None:
    core = core_of(*map_reduce(3), llm("before", ("x", "x2")))
    core.want("out", LATENCY, 0.0)
    core.set("x0", "text", 0.0)
    core.set("x1", "text", 0.0)
    core.take_actions()
    if how == "fails":
        cause = Cause(call, FailedStage.GENERATE, "it broke")
        core.failed(llm_calls(core)[call, 0], cause, 1.0)
    else:
        core.cancel(call, 1.0)
    left = {"m0", "m1", "m2", "before"} - {call}
    assert {levels(core)[name] for name in left} == {(BATCH, None)}
    assert {llm_calls(core)[name, 0].label for name in left} == {Label()}
    assert demoted(core) == left & {"m0", "m1"}, "what has not started starts as best-effort"
    assert groups(core) == {} and core.due() is None
    core.check_integrity()


def test_what_another_value_needs_keeps_its_label() -> None:
    core = core_of(
        *(llm(name, ("x", f"v{name}")) for name in "abc"),
        llm("p", ("va vb vc", "out1")),
        native("n", "vb", "vn"),
        llm("q", ("vn", "out2")),
        llm("r", ("vc", "out3")),
    )
    core.want("out1", LATENCY, 0.0)
    core.want("out2", DUE_LATER, 0.0)
    core.want("out3", THROUGHPUT, 0.0)
    core.cancel("p", 1.0)
    assert {name: levels(core)[name] for name in "abc"} == {
        **{"a": (BATCH, None), "b": (RT, 1), "c": (BATCH, 1)}
    }
    assert llm_calls(core)["c", 0].label == Label(objectives=frozenset({Perf.THROUGHPUT}))
    core.check_integrity()


def test_what_is_requested_after_it_was_given_up_is_urgent_again() -> None:
    core = core_of(*map_reduce(3))
    core.want("out", LATENCY, 0.0)
    core.set("x1", "text", 0.0)
    core.take_actions()
    core.cancel("reduce", 1.0)
    assert demoted(core) == {"m1"}
    core.want("v1", LATENCY, 2.0)
    assert promoted(core) == {"m1"}
    assert levels(core) == {"m0": (BATCH, None), "m1": (RT, 0), "m2": (BATCH, None)} | {
        "reduce": (RT, 0)
    }
    core.submit([llm("again", ("v0 v1", "out2"))], 3.0)
    core.want("out2", DUE_LATER, 3.0)
    assert levels(core)["m0"] == (GROUP, 1)


def test_the_deadline_of_a_value_that_has_failed_promotes_nothing() -> None:
    """Nor does a promotion for it last: `first` had become real-time, as its deadline was near."""
    names = ["first", "second", "third"]
    core = core_of(*(llm(name, (f"v{i}", f"v{i + 1}")) for i, name in enumerate(names)))
    core.set("v0", "text", 0.0)
    core.want("v3", Criteria(perf=Perf.THROUGHPUT, deadline_s=20.0), 0.0)
    assert tick_until(core, 200.0, "first") is not None
    core.take_actions()
    core.cancel("third", 19.0)
    assert llm_calls(core)["first", 0].label == llm_calls(core)["second", 0].label == Label()
    assert llm_calls(core)["first", 0].promoted is None
    assert demoted(core) == {"first"} and core.due() is None


def test_a_value_set_in_between_leaves_nothing_in_the_groups_of_what_follows() -> None:
    core = core_of(
        *(llm(name, ("x", f"v{name}")) for name in "abc"),
        native("n", "va", "vn"),
        llm("p", ("vn vb vc", "out1")),
        llm("q", ("va", "out2")),
    )
    core.want("out1", LATENCY, 0.0)
    core.want("out2", LATENCY, 0.0)
    assert groups(core) == {"out1:1": {"a", "b", "c"}}
    core.set("vn", "text", 1.0)
    core.cancel("q", 1.0)
    assert levels(core)["a"] == (BATCH, None) and groups(core) == {"out1:1": {"b", "c"}}
    core.check_integrity()


def test_what_only_clients_that_have_gone_waited_for_is_best_effort() -> None:
    core = core_of(*map_reduce(3), llm("other", ("v0", "out2")))
    core.set("x0", "text", 0.0)
    core.set("x1", "text", 0.0)
    core.want("out", LATENCY, 0.0)
    core.want("out2", DUE_LATER, 0.0)
    core.take_actions()
    core.abandon([core.variable("out"), core.variable("out2")], 1.0)
    assert levels(core) == {
        **{"m0": (RT, 1), "m1": (BATCH, 1), "m2": (BATCH, 1)},
        **{"reduce": (BATCH, 0), "other": (RT, 0)},
    }, "a value with a deadline is still due"
    assert group_levels(core) == {"out:1": BATCH}
    assert demoted(core) == {"m1"}
    core.check_integrity()
    core.want("out", THROUGHPUT, 2.0)
    assert levels(core)["m1"] == (BATCH, 1)
    core.want("out", LATENCY, 2.0)
    assert {level for level, _ in levels(core).values()} == {RT}
    assert "m1" in promoted(core)
    core.check_integrity()


def test_what_is_not_requested_is_not_abandoned() -> None:
    core = core_of(llm("a", ("", "va")), llm("b", ("", "vb")), llm("c", ("", "vc")))
    core.want("vb", THROUGHPUT, 0.0)
    core.want("vc", LATENCY, 0.0)
    finish(core, "c")
    core.take_actions()
    core.abandon([core.variable(name) for name in ("va", "vb", "vc")], 1.0)
    assert core.variable("va").want is None and not core.take_actions()
    core.close("bye", 2.0)
    core.abandon([core.variable("va")], 3.0)


@settings(max_examples=examples(60))
@given(programs(), st.data())
def test_labels_fall_where_nothing_urgent_depends_on_a_call(
    calls: list[NewCall], data: st.DataObject
) -> None:
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
    core.submit(calls, 0.0)
    graph = NaiveGraph(calls)
    wants: dict[str, bool] = {}
    for name in data.draw(st.lists(st.sampled_from(variables(calls)), max_size=4)):
        asked = data.draw(criteria())
        core.want(name, asked, 0.0)
        plain = asked.perf is Perf.THROUGHPUT and asked.deadline_s is None
        wants[name] = wants.get(name, True) and plain
    for call in data.draw(st.lists(st.sampled_from(calls), min_size=1, max_size=3)):
        before = {key: t.label for key, t in llm_calls(core).items()}
        core.cancel(call.id, 0.0)
        core.check_integrity()
        urgent = {
            t.id
            for v, plain in wants.items()
            if not plain and core.variable(v).pending
            for t in graph.ancestors(v)
        }
        needed = {t.id for v in wants if core.variable(v).pending for t in graph.ancestors(v)}
        for key, llm_call in llm_calls(core).items():
            if key in urgent or not llm_call.open:
                assert llm_call.label == before[key]
            elif not llm_call.native:
                objectives = frozenset({Perf.THROUGHPUT} if key in needed else ())
                assert llm_call.label == Label(objectives=objectives)


def test_asking_again_only_makes_it_stricter() -> None:
    core = core_of(*map_reduce(3))
    core.set("x1", "text", 0.0)
    core.want("out", THROUGHPUT, 0.0)
    core.take_actions()
    core.want("out", DUE_LATER, 1.0)
    assert levels(core) == {**{f"m{i}": (GROUP, 1) for i in range(3)}, "reduce": (RT, 0)}
    assert not promoted(core), "this group is best-effort"
    core.want("out", THROUGHPUT, 2.0)
    assert levels(core)["reduce"] == (RT, 0)
    core.want("v1", Criteria(perf=Perf.TPOT, tpot_s=0.05, ttft_s=0.3), 3.0)
    assert promoted(core) == {"m1"}
    core.want("v1", Criteria(perf=Perf.TTFT, ttft_s=0.1), 4.0)
    assert replace(llm_calls(core)["m1", 0].label, deadline_s=None) == Label(
        level=RT,
        objectives=frozenset({Perf.THROUGHPUT, Perf.TPOT, Perf.TTFT}),
        ttft_s=0.1,
        tpot_s=0.05,
    )


def test_a_want_before_the_program_is_there() -> None:
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0)
    core.declare("out")
    core.want("out", LATENCY, 0.0)
    *maps, reduce = map_reduce(2)
    core.submit([reduce], 1.0)
    assert levels(core) == {"reduce": (RT, 0)}
    core.submit(maps, 2.0)
    assert levels(core) == {"reduce": (RT, 0), "m0": (RT, 1), "m1": (RT, 1)}


def test_groups_are_made_anew_when_a_longer_way_comes() -> None:
    core = core_of(
        *(llm(f"m{i}", (f"x{i}", f"v{i}")) for i in range(2)), llm("reduce", ("v0 v1 z", "out"))
    )
    core.want("out", LATENCY, 0.0)
    assert groups(core) == {"out:1": {"m0", "m1"}}
    core.submit([llm("detour", ("v0", "z"))], 0.0)
    assert groups(core) == {"out:1": {"detour", "m1"}}
    assert levels(core)["m0"] == (RT, 2)
    assert [len(llm_calls(core)[call, 0].groups) for call in ("m1", "detour")] == [1, 1]


def test_a_group_remains_the_same_while_its_program_grows() -> None:
    """Twenty maps come one by one; most have finished when the last ones come."""
    names = [f"v{i}" for i in range(20)]
    core = core_of(llm("reduce", (" ".join(names), "out")))
    core.want("out", DUE_LATER, 0.0)
    out = core.graph.variables["out"]
    seen = []
    for i, name in enumerate(names):
        core.submit([llm(f"m{i}", ("", name))], float(i))
        if i:
            seen.append(out.groups[1])
            assert seen[0] is seen[-1] and seen[0].size == i + 1
        if 3 <= i < 18:
            finish(core, f"m{i - 3}", now=float(i))
            assert levels(core)[f"m{i}"] == (GROUP, 1), "three of so many are no stragglers yet"
        core.check_integrity()
    assert (seen[0].num_finished, len(seen[0].members)) == (15, 5)
    core.take_actions()
    for i in range(15, 17):
        finish(core, f"m{i}")
        assert promoted(core) == set()
    finish(core, "m17")
    assert promoted(core) == {"m18", "m19"}, "a tenth of all, and not of those that are left"
    core.check_integrity()


def test_who_joins_a_group_of_stragglers_is_no_straggler_yet() -> None:
    maps = [llm(f"m{i}", ("", f"v{i}")) for i in range(4)]
    core = core_of(*maps[:2], llm("r", ("v0 v1 v2 v3", "out")))
    core.want("out", DUE_LATER, 0.0)
    finish(core, "m0")
    assert levels(core)["m1"] == (RT, 1)
    core.submit(maps[2:], 1.0)
    assert [levels(core)[f"m{i}"][0] for i in (2, 3)] == [GROUP, GROUP]
    core.take_actions()
    finish(core, "m1")
    assert promoted(core) == set()
    finish(core, "m2")
    assert promoted(core) == {"m3"}


def test_what_also_serves_throughput_keeps_its_pace() -> None:
    """It is the value of one client, and comes before the value of another one."""
    core = core_of(llm("a", ("", "va")), llm("b", ("va", "out")), seconds=1.0)
    core.want("out", Criteria(deadline_s=31.0), 0.0)
    core.want("va", THROUGHPUT, 0.0)
    a = llm_calls(core)["a", 0]
    assert (a.label.level, a.stage) == (RT, 0)
    found = terms(a, 0.0, 100.0, DEFAULT)
    assert found.slo == Slo(pytest.approx(0.2), pytest.approx(0.3), 30.0)
    core.want("va", LATENCY, 0.0)
    assert terms(a, 0.0, 100.0, DEFAULT).slo == Slo(None, None, 30.0)


def same(core: SessionStateMachine, naive: NaiveObjectives) -> None:
    found = llm_calls(core)
    labels = {llm_call: t.label for llm_call, t in found.items() if not t.native}
    assert labels == {llm_call: naive.labels[llm_call] for llm_call in labels}
    stages = {
        llm_call: {sink.id: n for sink, n in t.stages.items()} for llm_call, t in found.items()
    }
    assert stages == naive.stages
    made: dict[tuple[str, int], tuple[set[TurnId], float | None]] = {}
    for llm_call, t in found.items():
        for group in t.groups:
            members, _ = made.setdefault((group.sink.id, group.stage), (set(), group.deadline_s))
            members.add(llm_call)
            assert {llm_call_id(member) for member in group.members} >= members
    assert made == naive.groups
    assert group_levels(core) == {f"{sink}:{n}": level for (sink, n), level in naive.levels.items()}


@settings(max_examples=examples(40))
@given(programs(), st.data())
def test_incremental_is_from_scratch_in_any_order(
    calls: list[NewCall], data: st.DataObject
) -> None:
    """Calls come in batches in any order, between wants; labels are joined with earlier ones."""
    estimates = {call.id: float(1 + i % 4) for i, call in enumerate(calls)}
    limits = SessionLimits(label_steps=10**9)
    core = SessionStateMachine(
        "s", estimate=lambda llm_call: estimates[llm_call.call.id], limits=limits
    )
    naive = NaiveObjectives(estimates)
    for name in variables(calls):
        core.declare(name)
    waiting = data.draw(st.permutations(calls))
    before: dict[TurnId, Label] = {}
    for _ in range(12):
        if waiting and data.draw(st.booleans()):
            size = data.draw(st.integers(1, len(waiting)))
            core.submit(waiting[:size], 0.0)
            naive.calls += waiting[:size]
            del waiting[:size]
        else:
            sink = data.draw(st.sampled_from(variables(calls)))
            asked = data.draw(criteria())
            core.want(sink, asked, 0.0)
            naive.wants.append((sink, asked))
        naive.update()
        same(core, naive)
        core.check_integrity()
        now = {llm_call: t.label for llm_call, t in llm_calls(core).items()}
        assert all(
            label.merged(now[llm_call]) == now[llm_call] for llm_call, label in before.items()
        )
        before = now


@settings(max_examples=examples(40))
@given(programs(), st.data())
def test_deadlines_never_fall_along_a_path_and_are_one_in_a_group(
    calls: list[NewCall], data: st.DataObject
) -> None:
    """Also where members of one group are due at different times, by what comes after them."""
    seconds = {call.id: data.draw(st.integers(1, 9).map(float)) for call in calls}
    core = SessionStateMachine("s", estimate=lambda llm_call: seconds[llm_call.call.id])
    core.submit(calls, 0.0)
    asked = data.draw(criteria())
    core.want(data.draw(st.sampled_from(variables(calls))), asked, 0.0)
    for llm_call in llm_calls(core).values():
        for before in _model_calls_before(llm_call):
            assert _deadline_s(before) <= _deadline_s(llm_call)
    for group in {group for t in llm_calls(core).values() for group in t.groups}:
        if asked.perf is not Perf.THROUGHPUT:
            assert len({_deadline_s(member) for member in group.members}) == 1


@settings(max_examples=examples(40))
@given(programs(), st.data())
def test_deadlines_never_fall_along_a_path_whatever_is_requested_and_predicted(
    calls: list[NewCall], data: st.DataObject
) -> None:
    """Values are requested one after another, while predictions change and calls end."""
    seconds = {call.id: 1.0 for call in calls}
    core = SessionStateMachine("s", estimate=lambda llm_call: seconds[llm_call.call.id])
    core.submit(calls, 0.0)
    for name in variables(calls):
        if core.variable(name).producer is None:
            core.set(name, "text", 0.0)
    now = 0.0
    for _ in range(data.draw(st.integers(1, 6))):
        before = {key: t.label for key, t in llm_calls(core).items()}
        what = data.draw(st.sampled_from(["want", "want", "predict", "finish"]))
        started = [t for t in llm_calls(core).values() if t.started and not t.native]
        if what == "want":
            core.want(data.draw(st.sampled_from(variables(calls))), data.draw(criteria()), now)
        elif what == "predict":
            seconds |= {call.id: data.draw(st.integers(1, 9).map(float)) for call in calls}
        elif started:
            core.finished(data.draw(st.sampled_from(started)), "text", None, now)
        now += 2 * CHECK_EVERY_S
        core.tick(now)
        core.check_integrity()
        for key, llm_call in llm_calls(core).items():
            assert before[key].merged(llm_call.label) == llm_call.label, "labels only rise"
        for llm_call in llm_calls(core).values():
            for earlier in _model_calls_before(llm_call):
                assert _deadline_s(earlier) <= _deadline_s(llm_call)


def _deadline_s(llm_call: LlmCall) -> float:
    deadline_s = llm_call.label.deadline_s
    return math.inf if deadline_s is None else deadline_s


def _model_calls_before(llm_call: LlmCall) -> Iterator[LlmCall]:
    """What it waits for, through native functions."""
    for before in llm_call.open_predecessors():
        if before.native:
            yield from _model_calls_before(before)
        else:
            yield before


def test_members_due_at_different_times_hand_the_earliest_one_on() -> None:
    """```
    a ──▶ m1 ──▶ x (8 s) ──▶ out       m1 must end at 92 s - 8 s, m2 at 92 s - 1 s;
    b ──▶ m2 ──▶ y (1 s) ──▶ out       as members of one group both at 84 s, b and a before it
    ```"""
    seconds = {"x": 8.0, "out": 8.0}
    core = SessionStateMachine("s", estimate=lambda each: seconds.get(each.call.id, 1.0))
    names = (("a", "in", "va"), ("b", "in", "vb"), ("m1", "va", "v1"), ("m2", "vb", "v2"))
    later = (("x", "v1", "vx"), ("y", "v2", "vy"), ("out", "vx vy", "o"))
    core.submit([llm(name, (read, made)) for name, read, made in (*names, *later)], 0.0)
    core.want("o", replace(LATENCY, deadline_s=100.0), 0.0)
    found = {call: t.label.deadline_s for (call, _), t in llm_calls(core).items()}
    assert found == {"out": 100, "x": 92, "y": 92, "m1": 84, "m2": 84, "a": 83, "b": 83}


def test_the_last_members_before_a_value_for_throughput_stay_best_effort() -> None:
    core = core_of(*map_reduce(3))
    core.want("out", THROUGHPUT, 0.0)
    for i in range(3):
        core.set(f"x{i}", "text", 0.0)
    finish(core, "m0", "m1")
    assert levels(core)["m2"] == (BATCH, 1) and not promoted(core)
    core.want("out", DUE_LATER, 1.0)
    assert promoted(core) == {"m2"}, "now a client waits for what follows"


@pytest.mark.parametrize(
    ("members", "over", "left"),
    [(2, 1, 1), (3, 1, 0), (3, 2, 1), (20, 17, 0), (20, 18, 2), (45, 40, 0), (45, 41, 4)],
)
def test_stragglers_of_a_group_are_promoted(members: int, over: int, left: int) -> None:
    """left: how many are promoted after `over` are; at most a tenth of the group, or one."""
    core = core_of(*map_reduce(members))
    core.want("out", DUE_LATER, 0.0)
    for i in range(members):
        core.set(f"x{i}", "text", 0.0)
    core.take_actions()
    finish(core, *(f"m{i}" for i in range(over - 1)))
    assert not promoted(core)
    finish(core, f"m{over - 1}")
    assert promoted(core) == ({f"m{i}" for i in range(over, members)} if left else set())
    core.check_integrity()


def test_stragglers_that_have_not_started_start_real_time() -> None:
    core = core_of(*map_reduce(2))
    core.want("out", DUE_LATER, 0.0)
    core.set("x0", "text", 0.0)
    finish(core, "m0")
    assert llm_calls(core)["m1", 0].label.level is RT
    core.take_actions()
    core.set("x1", "text", 2.0)
    assert [type(action).__name__ for action in core.take_actions()] == ["Settled", "Start"]


def test_a_group_whose_deadline_is_at_risk_becomes_real_time() -> None:
    core = core_of(*map_reduce(4), seconds=2.0)
    for i in range(3):
        core.set(f"x{i}", "text", 0.0)
    core.want("out", Criteria(deadline_s=20.0), 0.0)
    core.take_actions()
    risk_s = 18.0 - 2.0 - LAXITY_MARGIN_S
    assert tick_until(core, risk_s - 0.001) is None and levels(core)["m0"] == (GROUP, 1)
    finish(core, "m0")
    assert tick_until(core, risk_s) == risk_s
    assert promoted(core) == {"m1", "m2"}
    assert levels(core)["m3"] == (RT, 1), "though it waits for its input"
    assert core.due() is None


def test_batch_work_with_a_deadline_becomes_real_time_when_it_has_to() -> None:
    core = core_of(*(llm(f"c{i}", (f"v{i}", f"v{i + 1}")) for i in range(2)), seconds=3.0)
    core.set("v0", "text", 0.0)
    core.want("v2", Criteria(perf=Perf.THROUGHPUT, deadline_s=100.0), 0.0)
    core.take_actions()
    assert tick_until(core, 200.0) == 94.0 - LAXITY_MARGIN_S
    assert promoted(core) == {"c0"}
    assert levels(core) == {"c0": (RT, 1), "c1": (BATCH, 0)}
    tick_until(core, 200.0, "c1")
    assert levels(core) == {"c0": (RT, 1), "c1": (RT, 0)}


@pytest.mark.parametrize("perf", [Perf.LATENCY, Perf.THROUGHPUT])
@pytest.mark.parametrize("seconds", [2.0, 20.0, 25.0])
def test_deadlines_follow_predictions(perf: Perf, seconds: float) -> None:
    """Each call takes 3 s by the first prediction, and then `seconds`; 60 s from the request, all
    must have ended."""
    now_takes = {"m0": 3.0, "m1": 3.0, "r": 3.0}
    core = SessionStateMachine("s", estimate=lambda llm_call: now_takes[llm_call.call.id])
    core.submit([llm("m0", ("", "v0")), llm("m1", ("", "v1")), llm("r", ("v0 v1", "out"))], 0.0)
    core.want("out", Criteria(perf=perf, deadline_s=60.0), 0.0)
    core.take_actions()
    assert tick_until(core, 5.0) is None
    now_takes.update(m0=seconds, m1=seconds, r=seconds)
    expected_s = 60.0 - 2 * seconds - LAXITY_MARGIN_S
    assert tick_until(core, 200.0) == pytest.approx(expected_s)
    assert promoted(core) == {"m0", "m1"}


def test_a_prediction_that_was_too_long_is_noticed_when_a_deadline_seems_at_risk() -> None:
    """Also where it changes too little to be deduced again."""
    takes = {"c": 50.0}
    core = SessionStateMachine("s", estimate=lambda llm_call: takes[llm_call.call.id])
    core.submit([llm("c", ("", "out"))], 0.0)
    core.want("out", Criteria(perf=Perf.THROUGHPUT, deadline_s=60.0), 0.0)
    core.take_actions()
    takes["c"] = 46.0
    assert tick_until(core, 200.0) == pytest.approx(60.0 - 46.0 - LAXITY_MARGIN_S)


@pytest.mark.parametrize("maps", [2, 50])
def test_predictions_are_compared_from_time_to_time_and_with_few_calls(maps: int) -> None:
    asked = 0

    def estimate(llm_call: LlmCall) -> float:
        nonlocal asked
        asked += 1
        return 1.0

    core = SessionStateMachine("s", estimate=estimate)
    core.submit(map_reduce(maps), 0.0)
    core.want("out", Criteria(deadline_s=1000.0), 0.0)
    asked = 0
    assert tick_until(core, 100.0) is None
    assert 0 < asked <= 100 * CHECKED_CALLS


def test_urgent_values_are_labeled_before_those_for_throughput() -> None:
    """However many of these there are: all values of a chain, which is more than may be labeled."""
    chain = [llm(f"c{i}", (f"u{i}", f"u{i + 1}")) for i in range(100)]
    limits = SessionLimits(max_labels=500, label_steps=300)
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0, limits=limits)
    core.submit([*chain, *map_reduce(3)], 0.0)
    for i in range(100):
        core.want(f"u{i + 1}", THROUGHPUT, 0.0)
    core.want("out", LATENCY, 0.0)
    tick_until(core, 0.2)
    assert {levels(core)[f"m{i}"] for i in range(3)} == {(RT, 1)}
    assert groups(core) == {"out:1": {"m0", "m1", "m2"}}
    tick_until(core, 100.0)
    core.check_integrity()
    assert core.due() is None
    labels = sum(len(llm_calls(core)[f"c{i}", 0].stages) for i in range(100))
    assert 250 <= labels < 250 + 100, "the other half is for values that are more urgent"


def test_what_an_urgent_value_needs_is_real_time_without_room_for_its_labels() -> None:
    chain = [llm(f"c{i}", (f"u{i}", f"u{i + 1}")) for i in range(30)]
    limits = SessionLimits(max_labels=20)
    core = SessionStateMachine("s", estimate=lambda llm_call: 1.0, limits=limits)
    core.submit([*chain, *map_reduce(3)], 0.0)
    core.want("u30", LATENCY, 0.0)
    core.want("out", LATENCY, 0.0)
    assert {level for level, _ in levels(core).values()} == {RT}
    assert groups(core) == {} and core.due() is None
    core.cancel("c0", 0.0)
    core.tick(core.due() or 0.0)
    assert groups(core) == {"out:1": {"m0", "m1", "m2"}}
    core.check_integrity()


def test_a_deadline_that_is_at_risk_from_the_start_starts_real_time() -> None:
    core = core_of(*map_reduce(2), seconds=2.0)
    core.want("out", Criteria(deadline_s=3.0), 0.0)
    assert levels(core)["m0"] == (RT, 1)


def test_the_deadline_of_a_settled_value_is_not_watched() -> None:
    core = core_of(*map_reduce(2))
    core.want("out", Criteria(deadline_s=50.0), 0.0)
    assert core.due() is not None
    core.cancel("m0", 1.0)
    assert core.due() is None


DEFAULT = Slo(ttft_s=0.4, tpot_s=0.2)


def labeled(label: Label, stage: int) -> LlmCall:
    """stage: before a value that a client waits for."""
    core = core_of(llm("c", ("x", "v")), llm("d", ("v", "out")))
    llm_call = llm_calls(core)["c", 0]
    llm_call.label = label
    sink = core.graph.variables["out" if stage else "v"]
    sink.want = Want().with_criteria(LATENCY, None)
    llm_call.stages[sink] = stage
    return llm_call


def rt(**times: float) -> Label:
    return Label(level=RT, objectives=frozenset({Perf.LATENCY}), **times)


@pytest.mark.parametrize(
    ("label", "stage", "expected"),
    [
        (Label(), 0, EngineTerms(ServiceClass.BE, Slo())),
        (Label(deadline_s=15.0), 0, EngineTerms(ServiceClass.BE, Slo(deadline_s=5.0))),
        (Label(level=GROUP), 1, EngineTerms(ServiceClass.BE, Slo())),
        (
            Label(level=GROUP, deadline_s=12.0),
            1,
            EngineTerms(ServiceClass.BE, Slo(deadline_s=2.0)),
        ),
        (rt(), 0, EngineTerms(ServiceClass.RT, Slo())),
        (rt(deadline_s=13.0), 0, EngineTerms(ServiceClass.RT, Slo(deadline_s=3.0))),
        (rt(ttft_s=0.1, tpot_s=0.05), 0, EngineTerms(ServiceClass.RT, Slo(0.1, 0.05))),
        (rt(), 1, EngineTerms(ServiceClass.RT, Slo())),
        (rt(deadline_s=9.0), 0, EngineTerms(ServiceClass.RT, Slo())),
        # 100 tokens: in 30 s each has 0.3 s, in 100 s more than twice the default, in 5 s less
        # than half of it.
        (rt(deadline_s=40.0), 2, EngineTerms(ServiceClass.RT, Slo(0.2, 0.3, 30.0))),
        (rt(deadline_s=110.0), 2, EngineTerms(ServiceClass.RT, Slo(0.8, 0.4, 100.0))),
        (rt(deadline_s=15.0), 2, EngineTerms(ServiceClass.RT, Slo(0.2, 0.1, 5.0))),
        (rt(deadline_s=9.0), 2, EngineTerms(ServiceClass.RT, Slo(0.2, 0.1))),
    ],
)
def test_what_a_label_means_for_the_engine(label: Label, stage: int, expected: EngineTerms) -> None:
    found = terms(labeled(label, stage), 10.0, 100.0, DEFAULT)
    assert found.service_class is expected.service_class
    for name in ("ttft_s", "tpot_s", "deadline_s"):
        assert getattr(found.slo, name) == pytest.approx(getattr(expected.slo, name))


def test_members_of_an_urgent_group_are_ordinary_real_time_requests() -> None:
    """So that a program is never later than its calls sent one by one."""
    core = core_of(*map_reduce(3))
    core.want("out", LATENCY, 0.0)
    for i in range(3):
        core.set(f"x{i}", "text", 1.0)
    for i in range(3):
        member = llm_calls(core)[f"m{i}", 0]
        assert terms(member, 1.0, 100.0, DEFAULT) == EngineTerms(ServiceClass.RT, Slo())
