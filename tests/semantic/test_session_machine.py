"""A session beside a naive model of it: programs, wants, failures, cancels in any order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bros.core.errors import NotFoundError
from bros.semantic.core.nodes import InputPiece, Label, Level, LlmCall, NewCall, OutputPiece
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import (
    AbortCall,
    DemoteCall,
    Prefill,
    PromoteCall,
    SessionStateMachine,
    Settled,
    Start,
)
from bros.semantic.errors import Cause, ConflictError, FailedStage, SessionGoneError
from bros.semantic.schema import Criteria, Perf
from support.naive_programs import (
    NaiveGraph,
    PlainTurn,
    TurnId,
    criteria,
    llm,
    llm_call_id,
    llm_calls,
    native,
    plain_llm_calls,
)
from support.tier import examples


@dataclass
class Model:
    """What should be: states are worked out by going over everything until nothing changes.

    variables, LLM calls: name or id -> state. causes: ids of requests, one of which is the root.
    urgent: variables that were requested with more than THROUGHPUT, and not abandoned since.
    dated: variables that were requested with a deadline.
    active: LLM calls that have been wanted; they run even if no client waits for them any more.
    """

    calls: list[NewCall] = field(default_factory=list)
    variables: dict[str, str] = field(default_factory=dict)
    llm_calls: dict[TurnId, str] = field(default_factory=dict)
    causes: dict[str, set[str]] = field(default_factory=dict)
    wanted: set[str] = field(default_factory=set)
    urgent: set[str] = field(default_factory=set)
    dated: set[str] = field(default_factory=set)
    active: set[TurnId] = field(default_factory=set)

    def add(self, calls: list[NewCall]) -> None:
        self.calls += calls
        for call in calls:
            for llm_call in plain_llm_calls(call):
                self.llm_calls[llm_call.id] = "waiting"
            for piece in call.pieces:
                if isinstance(piece, InputPiece | OutputPiece):
                    self.variables.setdefault(piece.variable_id, "pending")
        self.settle()

    def refuses(self, calls: list[NewCall]) -> bool:
        made = [
            v for call in [*self.calls, *calls] for t in plain_llm_calls(call) for v in t.outputs
        ]
        new = [v for call in calls for t in plain_llm_calls(call) for v in t.outputs]
        set_already = any(self.variables.get(v, "pending") != "pending" for v in new)
        twice = len(set(made)) < len(made)
        over = {
            llm_call
            for llm_call, state in self.llm_calls.items()
            if state not in ("waiting", "started")
        }
        return set_already or twice or NaiveGraph([*self.calls, *calls], over).cyclic()

    def end(self, llm_call: PlainTurn, state: str, causes: set[str]) -> None:
        self.llm_calls[llm_call.id] = state
        for name in llm_call.outputs:
            if self.variables[name] == "pending":
                self.variables[name] = state
                self.causes[name] = causes

    def settle(self) -> None:
        graph = NaiveGraph(self.calls)
        while self._pass_on(graph):
            pass
        while self._wake(graph):
            pass
        for llm_call in graph.llm_calls.values():
            before = [self.llm_calls[b.id] for b, same in graph.before(llm_call) if same]
            there = all(self.variables[v] == "ready" for v in llm_call.inputs)
            if (
                self.llm_calls[llm_call.id] == "waiting"
                and there
                and before in ([], ["finished"])
                and llm_call.id in self.active
            ):
                self.llm_calls[llm_call.id] = "started"

    def _wake(self, graph: NaiveGraph) -> bool:
        asked = {name for name in self.wanted if self.variables[name] == "pending"}
        still = [
            t for t in graph.llm_calls.values() if self.llm_calls[t.id] in ("waiting", "started")
        ]
        for llm_call in still:
            if llm_call.id in self.active:
                asked.update(v for v in llm_call.inputs if self.variables[v] == "pending")
                asked.update(b.outputs[0] for b, same in graph.before(llm_call) if same)
        new = {
            llm_call.id for llm_call in still if asked.intersection(llm_call.outputs)
        } - self.active
        self.active |= new
        return bool(new)

    def _pass_on(self, graph: NaiveGraph) -> bool:
        changed = False
        for llm_call in graph.llm_calls.values():
            if self.llm_calls[llm_call.id] not in ("waiting", "started"):
                continue
            if llm_call.native and all(self.variables[v] == "ready" for v in llm_call.outputs):
                self.llm_calls[llm_call.id] = "finished"
            bad = [v for v in llm_call.inputs if v in self.causes]
            bad += [b.outputs[0] for b, same in graph.before(llm_call) if same]
            bad = [v for v in bad if v in self.causes]
            if bad and self.llm_calls[llm_call.id] != "finished":
                causes = set[str]().union(*(self.causes[v] for v in bad))
                self.end(llm_call, self.variables[bad[0]], causes)
                changed = True
        return changed

    def needed(self) -> set[TurnId]:
        """Open LLM calls that a pending value needs which was requested with more than THROUGHPUT.
        Nothing before a native call is needed for it when its values are set."""
        states = self.llm_calls.items()
        over = {key for key, state in states if state not in ("waiting", "started")}
        graph = NaiveGraph(self.calls, over)
        pending = [name for name in self.urgent if self.variables[name] == "pending"]
        return {t.id for name in pending for t in graph.ancestors(name)}

    def plain(self, llm_call: TurnId) -> PlainTurn:
        return NaiveGraph(self.calls).llm_calls[llm_call]


NAMES = [f"v{i}" for i in range(8)]


class SessionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.now = 0.0
        self.number = 0
        self.handed_out: dict[TurnId, LlmCall] = {}  # by Start
        self.over: set[TurnId] = set()  # said to be, by us
        self.aborted: list[TurnId] = []
        self.settled: list[str] = []
        self.labels: dict[TurnId, Label] = {}
        self.requested: set[str] = set()
        self.abandoned: set[str] = set()
        self.closed = False

    @initialize(kept=st.sampled_from([0, 1, 1000]), seconds=st.sampled_from([0.5, 20.0]))
    def begin(self, kept: int, seconds: float) -> None:
        limits = SessionLimits(kept_calls=kept)
        self.core = SessionStateMachine("s", estimate=lambda llm_call: seconds, limits=limits)

    @precondition(lambda self: not self.closed and len(self.model.calls) < 12)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        calls = [self._draw_call(data) for _ in range(data.draw(st.integers(1, 4)))]
        if self.model.refuses(calls):
            before = (set(self.core.graph.calls), set(self.core.graph.variables))
            with pytest.raises(ConflictError):
                self.core.submit(calls, self.now)
            assert (set(self.core.graph.calls), set(self.core.graph.variables)) == before
        else:
            self.core.submit(calls, self.now)
            self.model.add(calls)

    def _draw_call(self, data: st.DataObject) -> NewCall:
        self.number += 1
        inputs = data.draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
        free = [v for v in NAMES if v not in NaiveGraph(self.model.calls).producer]
        fresh = [f"o{self.number}.{i}" for i in range(2)]
        pool = st.sampled_from([*free, *fresh, *fresh])
        outputs = data.draw(st.lists(pool, min_size=1, max_size=2, unique=True))
        name = f"c{self.number}"
        if data.draw(st.integers(0, 3)) == 0:
            return native(name, " ".join(inputs), " ".join(outputs))
        cut = data.draw(st.integers(0, len(inputs)))
        parts = [inputs[:cut], inputs[cut:]] if len(outputs) == 2 else [inputs]
        return llm(name, *((" ".join(p), o) for p, o in zip(parts, outputs, strict=True)))

    @precondition(lambda self: not self.closed)
    @rule(data=st.data(), asked=criteria(), soon=st.booleans())
    def want(self, data: st.DataObject, asked: Criteria, soon: bool) -> None:
        if not self.model.variables:
            return
        if soon and asked.deadline_s is not None:
            asked = dataclasses.replace(asked, deadline_s=asked.deadline_s - 999.0)
        name = data.draw(st.sampled_from(sorted(self.model.variables)))
        self.core.want(name, asked, self.now)
        if self.model.variables[name] == "pending":
            self.model.wanted.add(name)
            if asked.perf is not Perf.THROUGHPUT or asked.deadline_s is not None:
                self.model.urgent.add(name)
            if asked.deadline_s is not None:
                self.model.dated.add(name)
        self.model.settle()

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        known = sorted(self.core.graph.variables)
        if not known:
            return
        names = data.draw(st.lists(st.sampled_from(known), unique=True))
        self.core.abandon([self.core.variable(name) for name in names], self.now)
        self.abandoned = self.model.urgent.intersection(names) - self.model.dated
        self.model.urgent -= self.abandoned

    @precondition(lambda self: not self.closed)
    @rule(data=st.data())
    def set(self, data: st.DataObject) -> None:
        if not self.model.variables:
            return
        name = data.draw(st.sampled_from(sorted(self.model.variables)))
        producer = NaiveGraph(self.model.calls).producer.get(name)
        made = producer is not None and not producer.native
        if made or self.model.variables[name] != "pending":
            with pytest.raises(ConflictError):
                self.core.set(name, "text", self.now)
        else:
            self.core.set(name, "text", self.now)
            self.model.variables[name] = "ready"
            self.model.settle()

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        if self._running():
            self.core.first_token(data.draw(st.sampled_from(self._running())), self.now)

    @rule(data=st.data(), ok=st.booleans())
    def end_llm_call(self, data: st.DataObject, ok: bool) -> None:
        """What the engine says comes for LLM calls that were aborted, too."""
        if not self._running():
            return
        llm_call = data.draw(st.sampled_from(self._running()))
        self.over.add(llm_call_id(llm_call))
        plain = self.model.plain(llm_call_id(llm_call))
        counts = self.model.llm_calls[plain.id] == "started"
        if ok:
            self.core.finished(llm_call, "text", (7,), self.now)
            if counts:
                self.model.llm_calls[plain.id] = "finished"
                self.model.variables[plain.outputs[0]] = "ready"
        else:
            cause = Cause(llm_call.call.id, FailedStage.GENERATE, "it broke")
            self.core.failed(llm_call, cause, self.now)
            if counts:
                self.model.end(plain, "failed", {llm_call.call.id})
        self.model.settle()

    def _running(self) -> list[LlmCall]:
        return [llm_call for key, llm_call in self.handed_out.items() if key not in self.over]

    @precondition(lambda self: not self.closed)
    @rule(data=st.data(), natively=st.booleans())
    def end_call(self, data: st.DataObject, natively: bool) -> None:
        if not self.model.calls:
            return
        call = data.draw(st.sampled_from(self.model.calls))
        still = [
            t for t in plain_llm_calls(call) if self.model.llm_calls[t.id] in ("waiting", "started")
        ]
        fails = natively and plain_llm_calls(call)[0].native and bool(still)
        try:
            if fails:
                self.core.native_failed(call.id, "it broke", self.now)
            else:
                self.core.cancel(call.id, self.now)
        except NotFoundError:
            assert not still, "only what is over is forgotten"
        for llm_call in still:
            self.model.end(llm_call, "failed" if fails else "cancelled", {call.id})
        self.model.settle()

    @rule(seconds=st.sampled_from([0.0, 1.0, 30.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        due = self.core.due()
        assert due is None or due > self.now

    @rule()
    def close(self) -> None:
        if self.now < 60.0:  # late enough that something has happened
            return
        self.core.close("bye", self.now)
        self.closed = True
        for llm_call in NaiveGraph(self.model.calls).llm_calls.values():
            if self.model.llm_calls[llm_call.id] in ("waiting", "started"):
                self.model.end(llm_call, "cancelled", {llm_call.id[0] for llm_call in self._all()})
        for name, state in self.model.variables.items():
            if state == "pending":
                self.model.variables[name] = "cancelled"
                self.model.causes[name] = {""}
        with pytest.raises(SessionGoneError):
            self.core.submit([llm("late", ("", "late"))], self.now)

    def _all(self) -> list[PlainTurn]:
        return list(NaiveGraph(self.model.calls).llm_calls.values())

    @rule()
    def carry_out(self) -> None:
        """The runner takes the actions. Not after every event, so that some are pointless by then:
        none of those may be left."""
        graph = NaiveGraph(self.model.calls)
        for action in self.core.take_actions():
            match action:
                case Settled(variable):
                    self.settled.append(variable.id)
                case Start(llm_call):
                    key = llm_call_id(llm_call)
                    assert key not in self.handed_out, "started twice"
                    assert self.model.llm_calls[key] == "started"
                    assert not graph.llm_calls[key].native
                    assert llm_call.depth == graph.depth(graph.llm_calls[key])
                    self.handed_out[key] = llm_call
                case AbortCall(llm_call):
                    assert llm_call_id(llm_call) in self.handed_out
                    assert self.model.llm_calls[llm_call_id(llm_call)] in ("cancelled", "failed")
                    self.aborted.append(llm_call_id(llm_call))
                case PromoteCall(llm_call):
                    assert llm_call_id(llm_call) in self.handed_out
                    assert self.model.llm_calls[llm_call_id(llm_call)] == "started"
                    assert llm_call.label.level is Level.RT
                case DemoteCall(llm_call):
                    assert llm_call_id(llm_call) in self.handed_out
                    assert self.model.llm_calls[llm_call_id(llm_call)] == "started"
                case Prefill(llm_call, pieces):
                    assert self.model.llm_calls[llm_call_id(llm_call)] == "waiting"
                    self._check_prefill(llm_call, pieces)
        self._check_all_told(graph)

    def _check_prefill(self, llm_call: LlmCall, pieces: int) -> None:
        known, missing = llm_call.call.pieces[:pieces], llm_call.call.pieces[pieces]
        for piece in known:
            if isinstance(piece, InputPiece | OutputPiece):
                assert self.model.variables[piece.variable_id] == "ready"
        assert pieces and isinstance(missing, InputPiece)

    def _check_all_told(self, graph: NaiveGraph) -> None:
        ready = {
            key
            for key, state in self.model.llm_calls.items()
            if state == "started" and not graph.llm_calls[key].native
        }
        assert ready <= self.handed_out.keys()
        stopped = {
            key
            for key in self.handed_out.keys() - self.over
            if self.model.llm_calls[key] in ("cancelled", "failed")
        }
        assert stopped <= set(self.aborted) and len(set(self.aborted)) == len(self.aborted)
        done = [name for name, state in self.model.variables.items() if state != "pending"]
        assert sorted(self.settled) == sorted(done), "each is told once"

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check_integrity()
        for name, variable in self.core.graph.variables.items():
            assert variable.state == self.model.variables[name], name
            if variable.cause is not None:
                assert variable.cause.request_id in self.model.causes[name]
        assert self.core.graph.variables.keys() == self.model.variables.keys()
        for key, llm_call in llm_calls(self.core).items():
            same = {"ready": "started", "running": "started"}.get(llm_call.state, llm_call.state)
            assert same == self.model.llm_calls[key], key
        for key, state in self.model.llm_calls.items():
            assert state not in ("waiting", "started") or key[0] in self.core.graph.calls
        if self.closed:
            assert "pending" not in self.model.variables.values()
        self._check_labels()

    def _check_labels(self) -> None:
        """Labels rise; they fall only where a requested value has failed, was cancelled or was
        abandoned, and nothing else that is urgent needs what it needed."""
        now = {key: llm_call.label for key, llm_call in llm_calls(self.core).items()}
        states = self.model.variables
        given_up = {name for name in self.requested if states[name] in ("failed", "cancelled")}
        given_up |= {name for name in self.abandoned if states[name] == "pending"}
        self.abandoned = set()
        graph = NaiveGraph(self.model.calls)
        before = {t for name in given_up for t in graph.ancestors(name) if not t.native}
        unneeded = {t.id for t in before} - self.model.needed()
        for key, label in now.items():
            if key in unneeded and self.model.llm_calls[key] in ("waiting", "started"):
                assert label in (Label(), Label(objectives=frozenset({Perf.THROUGHPUT})))
            elif key in self.labels:
                assert self.labels[key].merged(label) == label
        self.labels = now
        self.requested = {name for name in self.model.wanted if states[name] == "pending"}


TestSession = SessionMachine.TestCase
TestSession.settings = settings(max_examples=examples(30, long=600), stateful_step_count=40)
