"""The front end on a back end that evaluates programs in the simplest way."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bros.semantic as P
from bros.core import grammars
from bros.core.errors import InvalidRequestError, NotFoundError, OverloadedError
from bros.semantic.client.session import MAX_GETS, MAX_NATIVE_THREADS
from bros.semantic.schema import Role, SubmitProgram, to_json
from bros.server.sessions.wire import read
from support.fake_sessions import FakeBackend, fake_connection, refuse, shout


class Pair(NamedTuple):
    first: int
    second: list[int]


class Interrupt(BaseException):
    """What some libraries raise to pass all handlers of errors."""


@dataclass(frozen=True)
class Report:
    text: P.SemanticVariable


class Wordless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Desk(NamedTuple):
    backend: FakeBackend
    session: P.Session


@pytest.fixture
def desk() -> Iterator[Desk]:
    backend = FakeBackend()
    with fake_connection(backend) as connection, P.Session(connection=connection) as session:
        yield Desk(backend, session)


@P.semantic_function
def write(task: P.SemanticVariable) -> P.SemanticVariable:
    """Write {{input:task}}. Code: {{output:code}}"""


@P.semantic_function
def test_of(task: str, code: P.SemanticVariable):
    """Task: {{task}}
    Code: {{input:code}}
    Test: {{output:test}}"""


test_of.__test__ = False  # type: ignore[attr-defined]


@P.semantic_function
def judge(text: P.SemanticVariable):
    """Judge {{text}}. Verdict: {{output:verdict}} Why: {{output:reason}}"""


@P.native_function
def clip(text: P.SemanticVariable, length: int = 3) -> P.SemanticVariable:
    return str(text)[:length]  # type: ignore[return-value]


@P.native_function
def divide(text: P.SemanticVariable) -> P.SemanticVariable:
    return 1 / 0  # type: ignore[return-value]


def endless() -> tuple[Any, threading.Event, threading.Event]:
    """A native coroutine function that never returns, and what is set when it begins and when it is
    left."""
    entered, left = threading.Event(), threading.Event()

    @P.native_function
    async def slow(text):
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    return slow, entered, left


def code_of(task: str) -> str:
    return shout("write", "code", f"Write {task}. Code: ")


class TestDecoration:
    @pytest.mark.parametrize(
        ("template", "options", "message"),
        [
            ("", {}, "f: its docstring is the template, and there is none"),
            ("{{input:x}}", {}, "f: the template has no {{output:...}}"),
            ("{{x}}{{y}}{{output:o}}", {}, "f: {{input:y}} is none of its parameters"),
            ("{{output:o}}", {}, "f: the parameter x does not occur in the template"),
            ("{{output:x}}", {}, "f: .*'x'"),
            ("{{x}}{{output:o", {}, "f: Line 1, column 6: {{ is not closed"),
            ("{{x}}{{output:o}}{{output:p}}", {}, "f: The output 'p' follows another"),
            ("{{x}}{{output:o:hot}}", {}, "f: the template names the sampling 'hot'"),
            ("{{x}}{{output:o}}", {"sampling": {"heat": 1}}, "f: sampling: 'heat' is neither"),
            ("{{x}}{{output:o}}", {"sampling": {"n": 2}}, "f: sampling: 'n' is neither"),
            (
                "{{x}}{{output:o}}",
                {"sampling": {"prompt_logprobs": 1}},
                "f: sampling: 'prompt_logprobs' is neither",
            ),
            (
                "{{x}}{{output:o}}",
                {"sampling": {"response_format": {"type": "json"}}},
                "f: 'response_format.type' must be text",
            ),
            (
                "{{x}}{{output:o:own}}",
                {"sampling": {"own": {"guided_regex": "a", "guided_choice": ["a"]}}},
                "f: The output can match one grammar only",
            ),
            ("{{x}}{{output:o}}", {"sampling": {"top_p": 2}}, r"f: top_p must be in \(0, 1\]"),
            ("{{x}}{{output:o:a}}", {"sampling": {"a": {"b": 1}}}, "f: sampling: 'b' is neither"),
            ("{{x}}{{output:o}}", {"transforms": {"z": "strip"}}, "f: transforms: 'z' does not"),
            ("{{x}}{{output:o}}", {"transforms": {"o": "srtip"}}, "f: .*srtip"),
            ("{{x}}{{output:o}}", {"transforms": "strip"}, "f: transforms must be a mapping"),
            ("{{x}}{{output:o}}", {"transforms": {"o": 3}}, "f: transforms of o must be a string"),
            ("{{x}}{{output:o}}", {"sampling": [1]}, "f: sampling must be a mapping"),
            ("{{x}}{{output:o:a}}", {"sampling": {"a": 1}}, "f: sampling: a must be a mapping"),
            ("{{x}}{{output:o}}", {"system": "Be nice."}, "f: system is for chat=True"),
            ("{{x}}{{output:o}}", {"system": "{{y}}", "chat": True}, "f: system is the same"),
        ],
    )
    def test_what_does_not_fit_is_refused_with_the_functions_name(
        self, template: str, options: dict[str, Any], message: str
    ) -> None:
        def f(x):
            pass

        f.__doc__ = template
        with pytest.raises(ValueError, match=message.replace("{", r"\{").replace("...", r"\.\.\.")):
            P.semantic_function(**options)(f)

    def test_variadic_parameters_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"f: \*x has no place in a template"):

            @P.semantic_function
            def f(*x):
                """{{x}}{{output:o}}"""

    @pytest.mark.parametrize("outputs", ["text", (), ("a", "a")])
    def test_outputs_of_native_functions_are_different_names(self, outputs: Any) -> None:
        with pytest.raises(ValueError, match="outputs are one or more different names"):
            P.native_function(outputs=outputs)(lambda x: x)

    def test_metadata_of_the_function_is_kept(self) -> None:
        assert write.__name__ == "write"
        assert write.__doc__ == "Write {{input:task}}. Code: {{output:code}}"


class TestCalls:
    def test_wrong_calls_are_type_errors_in_plain_words(self, desk: Desk) -> None:
        with pytest.raises(TypeError, match=r"write\(\): missing a required argument: 'task'"):
            write()
        with pytest.raises(TypeError, match=r"write\(\): .*'mask'"):
            write("a", mask="b")
        with pytest.raises(TypeError, match=r"write\(\): task is None"):
            write(None)
        with pytest.raises(TypeError, match=r"the output code must be a variable, not str"):
            write("a", code="b")
        with pytest.raises(TypeError, match="code has a value or a producer already"):
            write("a", code=P.SemanticVariable("b"))
        with pytest.raises(TypeError, match="code has a value or a producer already"):
            write("a", code=write("b"))
        with pytest.raises(TypeError, match="one variable cannot be two outputs"):
            variable = P.SemanticVariable()
            judge("a", verdict=variable, reason=variable)
        with pytest.raises(TypeError, match="text has variables among other things"):
            judge([write("a"), 3])

    @pytest.mark.parametrize(
        ("argument", "message"),
        [
            ((part for part in "ab"), r"is an iterator \(generator\); pass a list"),
            (map(str, "ab"), r"is an iterator \(map\); pass a list"),
            (b"a", "is bytes; decode it"),
            (clip, "is a SemanticCallable, which can be called"),
            (len, "is a builtin_function_or_method, which can be called"),
            (str, "is a type, which can be called"),
            (asyncio.sleep, "is a function, which can be called"),
            ([[P.SemanticVariable()]], "is a list with variables in it"),
            (({"a": P.SemanticVariable("b")}, "c"), "is a tuple with variables in it"),
            ({"a": P.SemanticVariable()}, "is a dict with variables in it"),
            ({P.SemanticVariable()}, "is a set with variables in it"),
            (Report(P.SemanticVariable()), "is a Report with variables in it"),
        ],
    )
    def test_what_has_no_text_is_refused(self, argument: object, message: str) -> None:
        with pytest.raises(TypeError, match=rf"write\(\): task {message}"):
            write(argument)

    def test_a_coroutine_is_refused(self) -> None:
        waiting = asyncio.sleep(0)
        with pytest.raises(TypeError, match=r"write\(\): task is a coroutine; pass what it"):
            write(waiting)
        waiting.close()

    def test_what_can_be_called_may_have_a_text(self, desk: Desk) -> None:
        class Symbol:
            def __call__(self) -> None: ...

            def __str__(self) -> str:
                return "x"

        assert write(Symbol()).get() == code_of("x")

    def test_a_record_that_can_be_called_has_the_text_of_its_fields(self, desk: Desk) -> None:
        @dataclasses.dataclass
        class Tool:
            name: str

            def __call__(self) -> None: ...

        assert write(Tool("saw")).get() == code_of(str(Tool("saw")))

    def test_what_contains_itself_or_one_thing_many_times_is_looked_at_once(
        self, desk: Desk
    ) -> None:
        @dataclasses.dataclass
        class Pair:
            left: object
            right: object

            def __str__(self) -> str:
                return "pair"

        pair = Pair(1, 2)
        for _ in range(60):
            pair = Pair(pair, pair)
        pair.left = pair
        assert write(pair).get() == code_of("pair")
        pair.right = {"deep": [write("a")]}
        with pytest.raises(TypeError, match="variables in it"):
            write(pair)

    def test_only_the_value_of_a_variable_is_its_text(self, desk: Desk) -> None:
        code = write("a")
        for build in ("Judge {}".format, lambda variable: f"Judge {variable:>9}"):
            with pytest.raises(TypeError, match="'code' has no value yet: pass the variable"):
                build(code)
        assert str(code) == repr(code), "to print it"
        code.get()
        assert f"{code}" == str(code) == code_of("a")
        assert repr(code).startswith("<SemanticVariable code: ")

    def test_what_the_text_of_an_argument_raises_is_told_with_its_name(self) -> None:
        class Broken:
            def __str__(self) -> str:
                return b"\xff".decode()

        with pytest.raises(ValueError, match=r"write\(\): task 'utf-8' codec can't decode"):
            write(Broken())

    @pytest.mark.parametrize("argument", ["a game", 17, 2.5, {"a": 1}, [1, 2]])
    def test_constants_are_written_by_str(self, desk: Desk, argument: object) -> None:
        assert write(argument).get() == code_of(str(argument))
        assert write(task=argument).get() == code_of(str(argument))

    def test_defaults_of_parameters_count(self, desk: Desk) -> None:
        @P.semantic_function(name="write")
        def write_game(task: str = "a game"):
            """Write {{task}}. Code: {{output:code}}"""

        assert write_game().get() == code_of("a game")

    def test_several_outputs_are_a_named_tuple(self, desk: Desk) -> None:
        judged = judge("a")
        assert judged._fields == ("verdict", "reason")
        verdict = judged.verdict.get()
        assert verdict == shout("judge", "verdict", "Judge a. Verdict: ")
        assert judged.reason.get() == shout("judge", "reason", f"Judge a. Verdict: {verdict} Why: ")

    def test_a_variable_can_be_made_before_its_producer(self, desk: Desk) -> None:
        code = P.SemanticVariable(name="code")
        test = test_of("a", code)
        assert write("a", code=code) is code
        assert test.get().startswith("<test_of")
        assert code.get() == code_of("a")

    def test_lists_are_written_one_after_the_other(self, desk: Desk) -> None:
        @P.semantic_function(separator=" / ", transforms={"parts": "strip"})
        def join(parts, parts_1: str):
            """Join {{parts}} and {{parts_1}} again {{parts}}: {{output:whole}}"""

        first = write("a")
        whole = join([first, "b", first], "c").get()
        listed = f"{code_of('a')} / b / {code_of('a')}"
        assert desk.backend.prompts[-1] == f"Join {listed} and c again {listed}: "
        assert whole == shout("join", "whole", desk.backend.prompts[-1])
        parameters = desk.backend.programs[0][1].parameters
        assert [p.transforms for p in parameters if p.name.startswith("parts__")] == ["strip"] * 3
        assert join([], "c").get() == shout("join", "whole", "Join  and c again : ")

    def test_sampling_and_transforms_go_along_by_placeholder(self, desk: Desk) -> None:
        @P.semantic_function(
            sampling={"temperature": 0.5, "precise": {"temperature": 0.0, "seed": 3}},
            transforms={"code": "strip | lower", "task": "upper"},
        )
        def plan(task):
            """{{task}} {{output:plan}} then {{output:code:precise}}"""

        plan("x").code.get()
        [[call]] = desk.backend.programs
        assert dict(call.sampling) == {"temperature": 0.5}
        by_name = {parameter.name: parameter for parameter in call.parameters}
        assert by_name["plan"].sampling is None
        assert by_name["code"].sampling == {"temperature": 0.0, "seed": 3}
        assert by_name["code"].transforms == "strip | lower"
        assert by_name["task"].transforms == "upper"
        assert "precise" not in (call.template or "")

    def test_what_outputs_must_match_goes_along_and_can_be_overridden(self, desk: Desk) -> None:
        facts = {"response_format": {"type": "json_object"}, "max_tokens": 20}

        @P.semantic_function(sampling={**facts, "vote": {"guided_choice": ["yes", "no"]}})
        def check(text):
            """{{text}} Facts: {{output:facts}} True? {{output:verdict:vote}}"""

        check("x").verdict.get()
        [[call]] = desk.backend.programs
        assert dict(call.sampling) == facts
        own = {parameter.name: parameter.sampling for parameter in call.parameters}
        assert own["verdict"] == {"guided_choice": ["yes", "no"]}
        fields = json.loads(json.dumps(to_json(SubmitProgram(requests=[call]), defaults=False)))
        (received,) = read(SubmitProgram, fields).requests
        assert received.sampling["grammar"].text == grammars.json_object().text
        assert received.parameters[-1].sampling["grammar"].text == (
            grammars.choice(["yes", "no"]).text
        )

    def test_a_system_prompt_makes_a_conversation(self, desk: Desk) -> None:
        @P.semantic_function(chat=True, system=r"Say \{{ and be brief.")
        def talk(question):
            """{{question}} {{output:answer}} Sure? {{output:again}} Bye."""

        talk("Why?").again.get()
        [[call]] = desk.backend.programs
        assert [(message.role, message.content) for message in call.messages or ()] == [
            ("system", r"Say \{{ and be brief."),
            ("user", "{{input:question}} "),
            ("assistant", "{{output:answer}}"),
            ("user", " Sure? "),
            ("assistant", "{{output:again}}"),
        ]

    def test_docstrings_lose_their_indentation_unless_told_not_to(self, desk: Desk) -> None:
        def f(x):
            """
            One {{x}}

              two {{output:y}}
            """

        P.semantic_function(f)("1").get()
        P.semantic_function(dedent=False)(f)("1").get()
        assert desk.backend.prompts[0] == "One 1\n\n  two "
        assert desk.backend.prompts[1].startswith("\n            One 1\n")


class TestPrograms:
    def test_all_that_was_called_is_sent_at_the_first_get_in_order(self, desk: Desk) -> None:
        task = P.SemanticVariable("a snake game", name="task")
        code = write(task)
        test = test_of(task, code)
        verdicts = judge(test)
        assert desk.backend.programs == []
        assert test.get(perf=P.LATENCY, deadline=4) == shout(
            "test_of", "test", f"Task: a snake game\nCode: {code_of('a snake game')}\nTest: "
        )
        [program] = desk.backend.programs
        assert [call.name for call in program] == ["write", "test_of", "judge"]
        # Constants are inline, and what is asked for is wanted from the beginning.
        assert [(p.name, p.value) for p in program[0].parameters if p.role is Role.INPUT] == [
            ("task", "a snake game")
        ]
        criteria = {p.name: p.criteria for call in program for p in call.parameters}
        assert criteria["test"] == P.Criteria(perf=P.LATENCY, deadline_s=4)
        assert criteria["code"] is criteria["verdict"] is None
        verdicts.reason.get()
        assert len(desk.backend.programs) == 1

    def test_gather_wants_all_before_it_waits(self, desk: Desk) -> None:
        codes = [write(str(i)) for i in range(5)]
        assert P.gather(*codes, perf=P.THROUGHPUT) == [code_of(str(i)) for i in range(5)]
        [program] = desk.backend.programs
        throughput = P.Criteria(perf=P.THROUGHPUT)
        assert all(call.parameters[-1].criteria == throughput for call in program)
        assert P.gather(*codes) == [code_of(str(i)) for i in range(5)]

    def test_calls_outside_a_session_belong_to_the_one_they_are_asked_in(self) -> None:
        code = write("a")
        test = test_of("a", code)
        other = write("b")
        verdict, _ = judge([code, other])
        backend = FakeBackend()
        with pytest.raises(RuntimeError, match="no session .*'code'"):
            code.get()
        with fake_connection(backend) as connection, P.Session(connection=connection):
            assert code.get() == code_of("a")
            assert verdict.get().startswith("<judge.verdict")
            assert test.get().startswith("<test_of")
        assert [call.name for call in backend.programs[0]] == ["write", "test_of", "write", "judge"]
        assert len(backend.programs) == 1

    @pytest.mark.parametrize("sent", [False, True])
    def test_a_large_gather_requests_all_values_and_waits_for_some_at_a_time(
        self, sent: bool
    ) -> None:
        """Each wait holds a connection. sent: whether the server has the calls before."""
        count = MAX_GETS + 20
        most = waiting = requesting = most_requesting = 0

        class CountingBackend(FakeBackend):
            async def want(self, *arguments: Any) -> None:
                nonlocal requesting, most_requesting
                requesting += 1
                most_requesting = max(most_requesting, requesting)
                await asyncio.sleep(0)
                await super().want(*arguments)
                requesting -= 1

            async def get(self, session_id: str, variable_id: str, *arguments: Any) -> str:
                nonlocal most, waiting
                if not waiting and not most:
                    if sent:
                        assert len([each for each in self.operations if each[0] == "want"]) == 20
                    else:
                        (program,) = self.programs
                        asked = [call.parameters[-1].criteria for call in program]
                        assert len(asked) == count and None not in asked
                waiting += 1
                most = max(most, waiting)
                await asyncio.sleep(0)
                try:
                    return await super().get(session_id, variable_id, *arguments)
                finally:
                    waiting -= 1

        with (
            fake_connection(CountingBackend()) as connection,
            P.Session(connection=connection) as session,
        ):
            codes = [write(str(number)) for number in range(count)]
            if sent:
                session.flush()
            assert P.gather(*codes) == [code_of(str(number)) for number in range(count)]
        assert most == MAX_GETS
        assert most_requesting == (20 if sent else 0)  # not one after another's answer

    def test_variables_do_not_cross_sessions_but_their_values_do(self) -> None:
        backend = FakeBackend()
        task = P.SemanticVariable("a")
        with fake_connection(backend) as connection:
            with P.Session(connection=connection) as outer:
                code, unknown = write(task), write("b")
                code.get()
                with P.Session(connection=connection) as inner:
                    assert test_of(task, code).session is inner
                    with pytest.raises(ValueError, match="'code' belongs to another session"):
                        test_of(task, unknown)
                    test_of(task, code).get()
                assert test_of("x", unknown).session is outer
            assert write(code).session is None
        assert backend.deleted == ["sess-2", "sess-1"]

    def test_a_closed_session_gives_nothing_more(self) -> None:
        with fake_connection(FakeBackend()) as connection:
            with P.Session(connection=connection) as session:
                known, unknown = write("a"), write("b")
                known.get()
            assert known.get() == code_of("a")
            with pytest.raises(P.SessionGoneError, match="has been closed"):
                unknown.get()
            session.close()

    async def test_a_session_ends_with_the_server_process(self) -> None:
        class RestartedBackend(FakeBackend):
            def _session(self, session_id: str) -> Any:
                message = f"There is no session {session_id!r}."
                raise NotFoundError(message, "session_id", "session_not_found")

        async with fake_connection(RestartedBackend()) as connection:
            async with P.Session(connection=connection) as session:
                code = write("a")
                with pytest.raises(P.SessionGoneError, match="The server has forgotten"):
                    await code.aget()
                with pytest.raises(P.SessionGoneError):
                    await asyncio.to_thread(code.get)
                write("b")
                with pytest.raises(P.SessionGoneError):
                    await asyncio.to_thread(session.flush)

    def test_a_refused_program_says_why_each_time(self, desk: Desk) -> None:
        earlier = write("a")
        desk.session.flush()
        desk.backend.refusal = refuse("It is too long.")
        code = write("b")
        test = test_of("b", code)
        assert earlier.get() == code_of("a")  # was sent before, so it does not care
        for variable in (code, test, judge(test).verdict):
            with pytest.raises(InvalidRequestError, match="It is too long.") as raised:
                variable.get()
            assert raised.value.param == "requests[0].template"
        assert write("c").get() == code_of("c")

    def test_a_program_that_finds_no_room_is_sent_again(self, desk: Desk) -> None:
        desk.backend.refusal = OverloadedError("Later.", 1.0)
        code = write("a")
        with pytest.raises(OverloadedError):
            code.get()
        assert code.get() == code_of("a")

    def test_a_failure_names_its_cause_to_all_that_need_it(self, desk: Desk) -> None:
        def model(name: str, output: str, prompt: str) -> str:
            if name == "write":
                raise ValueError("no more ink")
            return shout(name, output, prompt)

        desk.backend.model = model
        code = write("a")
        test, sibling = test_of("a", code), judge("b")
        for variable in (test, code):
            with pytest.raises(P.UpstreamError, match="no more ink") as raised:
                variable.get()
            assert raised.value.cause == P.Cause("req-1", P.FailedStage.GENERATE, "no more ink")
        assert sibling.verdict.get().startswith("<judge")

    def test_cancelled_calls_fail_what_needs_them(self, desk: Desk) -> None:
        sent, unsent = write("a"), None
        desk.session.flush()
        sent.cancel()
        unsent = write("b")
        unsent.cancel()
        for variable in (sent, unsent, test_of("c", sent), test_of("d", unsent)):
            with pytest.raises(P.UpstreamError, match="was cancelled") as raised:
                variable.get()
            assert raised.value.cause.stage is P.FailedStage.CANCELLED
        assert [call.parameters[0].value for p in desk.backend.programs for call in p] == ["a", "c"]

    @given(data=st.data())
    def test_any_program_gives_what_its_calls_give_one_by_one(self, data: st.DataObject) -> None:
        """Random graphs, the first calls made before there is a session, asked for in any order."""
        backend = FakeBackend()
        known: list[tuple[Any, str]] = [("constant", "constant"), (P.SemanticVariable("v"), "v")]

        def call_something() -> None:
            (task, task_text), (code, code_text) = (
                data.draw(st.sampled_from(known)) for _ in range(2)
            )
            prompt = f"Task: {task_text}\nCode: {code_text}\nTest: "
            known.append((test_of(task, code), shout("test_of", "test", prompt)))

        for _ in range(data.draw(st.integers(0, 5))):
            call_something()
        with fake_connection(backend) as connection, P.Session(connection=connection):
            for _ in range(data.draw(st.integers(0, 5))):
                call_something()
            for variable, value in data.draw(st.permutations(known[2:])):
                assert variable.get() == value
        assert sum(len(program) for program in backend.programs) == len(known) - 2


class TestVariables:
    def test_inputs_can_be_set_later_and_once(self, desk: Desk) -> None:
        early, late = P.SemanticVariable(name="early"), P.SemanticVariable(name="late")
        first, second = write(early), write(late)
        early.set("a")
        assert first.get() == code_of("a")
        assert desk.backend.operations == []  # went along inline
        with pytest.raises(P.GetTimeoutError, match="'code' was not there within 0.01 s"):
            second.get(timeout=0.01)
        late.set("b")
        assert second.get() == code_of("b")
        for variable, code in ((early, "already_set"), (first, "already_produced")):
            with pytest.raises(P.ConflictError) as raised:
                variable.set("c")
            assert raised.value.code == code

    def test_a_get_without_timeout_asks_again_whenever_the_server_times_out(self) -> None:
        class ImpatientBackend(FakeBackend):
            gave_up = 0

            async def get(self, *arguments: Any) -> str:
                if self.gave_up < 3:
                    self.gave_up += 1
                    raise P.GetTimeoutError("Not yet.")
                return await super().get(*arguments)

        backend = ImpatientBackend()
        with fake_connection(backend) as connection, P.Session(connection=connection):
            assert write("a").get() == code_of("a")
        assert backend.gave_up == 3

    @pytest.mark.parametrize("operation", ["submit", "get"])
    @pytest.mark.parametrize("several", [False, True])
    def test_a_timeout_holds_if_the_server_hangs(
        self, desk: Desk, operation: str, several: bool
    ) -> None:
        go_on, answer = threading.Event(), getattr(desk.backend, operation)

        async def hang(*arguments: Any) -> Any:
            await asyncio.to_thread(go_on.wait, 12)
            return await answer(*arguments)

        setattr(desk.backend, operation, hang)
        known, code = P.SemanticVariable("a"), write("a")
        with pytest.raises(P.GetTimeoutError, match=r"'code' was not there within 0.1 s\.$"):
            if several:
                P.gather(known, code, timeout=0.1)
            else:
                code.get(timeout=0.1)
        go_on.set()
        assert code.get(timeout=30) == code_of("a")
        assert len(desk.backend.programs) == 1

    def test_a_get_without_timeout_warns_once_of_inputs_that_nobody_has_set(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class ImpatientBackend(FakeBackend):
            waits = 0

            async def get(self, *arguments: Any) -> str:
                if self.waits < 3:
                    self.waits += 1
                    raise P.GetTimeoutError("Not yet. No client has set task of write so far.")
                return await super().get(*arguments)

        with (
            fake_connection(ImpatientBackend()) as connection,
            P.Session(connection=connection),
        ):
            assert write("a").get() == code_of("a")
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
            "'code' is waited for without a timeout. No client has set task of write so far."
        ]

    def test_a_value_set_on_another_thread_is_waited_for(self, desk: Desk) -> None:
        task = P.SemanticVariable(name="task")
        code = write(task)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(code.get)
            with desk.session.use():
                while not desk.backend.programs:
                    desk.session.flush()
            task.set("a")
            assert waiting.result() == code_of("a")

    def test_ids_are_known_to_the_server_when_something_is_sent(self, desk: Desk) -> None:
        constant, code = P.SemanticVariable("a", name="my task!"), write("b")
        ids = constant.id, code.id
        assert ids == (constant.id, code.id)
        write(constant).get()
        variables = desk.backend.variables[desk.session.id]
        assert variables[ids[0]].value == "a"
        assert ids[1] in variables
        # What has an id is referred to by it.
        assert desk.backend.programs[0][1].parameters[0].variable == ids[0]

    def test_a_refused_value_is_taken_back(self, desk: Desk) -> None:
        set_value = desk.backend.set

        async def refuse(session_id: str, variable_id: str, value: str) -> None:
            desk.backend.set = set_value  # type: ignore[method-assign]
            raise InvalidRequestError("the value is too long")

        task = P.SemanticVariable(name="task")
        code = write(task)
        code.want()
        desk.backend.set = refuse  # type: ignore[method-assign]
        with pytest.raises(InvalidRequestError):
            task.set("long")
        assert task.value is None
        task.set("a")
        assert code.get(timeout=30) == code_of("a")

    def test_a_refused_declaration_fails_what_reads_the_variable(self, desk: Desk) -> None:
        declare = desk.backend.declare

        async def refuse(*arguments: Any) -> None:
            desk.backend.declare = declare  # type: ignore[method-assign]
            raise InvalidRequestError("the value is too long")

        task = P.SemanticVariable("long", name="task")
        assert task.id
        code, other = write(task), write("b")
        desk.backend.declare = refuse  # type: ignore[method-assign]
        for variable in (code, code, task):
            with pytest.raises(InvalidRequestError, match="too long"):
                variable.get(timeout=10)
        assert other.get() == code_of("b")
        task.set("a")
        assert write(task).get(timeout=30) == code_of("a")

    def test_a_value_can_be_set_before_the_server_accepts_what_reads_it(self, desk: Desk) -> None:
        task = P.SemanticVariable(name="task")
        code = write(task)
        desk.backend.refusal = OverloadedError("Later.", 1.0)
        with pytest.raises(OverloadedError):
            code.want()
        task.set("a")
        assert code.get(timeout=30) == code_of("a")

    def test_a_value_that_is_set_during_its_declaration_is_sent_once(self) -> None:
        entered, go_on = threading.Event(), threading.Event()

        class SlowBackend(FakeBackend):
            async def declare(self, *arguments: Any) -> None:
                entered.set()
                await asyncio.to_thread(go_on.wait)
                await super().declare(*arguments)

        with (
            fake_connection(SlowBackend()) as connection,
            P.Session(connection=connection) as session,
            ThreadPoolExecutor(2) as pool,
        ):
            first, second = P.SemanticVariable(), P.SemanticVariable()
            assert first.id != second.id
            code = write(second)
            flushed = pool.submit(session.flush)
            entered.wait()
            setting = pool.submit(second.set, "a")
            while second.value is None:
                time.sleep(0.001)
            go_on.set()
            flushed.result()
            setting.result()
            assert code.get(timeout=30) == code_of("a")

    @pytest.mark.parametrize("kind", ["text", "variable", "variables"])
    def test_a_long_text_of_several_calls_is_sent_once(self, desk: Desk, kind: str) -> None:
        document = "The harbour of Marrow Bay was built in a single summer. " * 400

        def argument() -> Any:
            return document if kind == "text" else P.SemanticVariable(document)

        one = argument()
        for _ in range(2):  # the server may have dropped the first one meanwhile
            tests = [
                test_of(f"Question {number}", argument() if kind == "variables" else one)
                for number in range(100)
            ]
            assert P.gather(*tests) == [
                shout("test_of", "test", f"Task: Question {number}\nCode: {document}\nTest: ")
                for number in range(100)
            ]
        for program in desk.backend.programs:
            assert len(json.dumps(to_json(SubmitProgram(requests=program)))) < 100_000
        declared = [name for what, _, name in desk.backend.operations if what == "declare"]
        assert declared == ["code", "code"]
        # A request more costs more than to send short texts twice.
        other = [write("b" * 2000), write("b" * 2000), write("a"), write("a")]
        P.gather(*other)
        assert len(desk.backend.operations) == len(declared)

    @pytest.mark.parametrize("lost", [True, False])
    def test_a_long_text_whose_declaration_fails_loses_no_call(
        self, desk: Desk, lost: bool
    ) -> None:
        declare, document = desk.backend.declare, "x" * 20_000
        error = P.ServerUnreachableError("lost") if lost else InvalidRequestError("too long")

        async def fail(*arguments: Any) -> None:
            desk.backend.declare = declare  # type: ignore[method-assign]
            raise error

        desk.backend.declare = fail  # type: ignore[method-assign]
        codes = [write(document), write(document)]
        if lost:
            with pytest.raises(P.ServerUnreachableError):
                P.gather(*codes)
        assert P.gather(*codes, timeout=30) == 2 * [code_of(document)]
        inline = [p.value for call in desk.backend.programs[0] for p in call.parameters]
        assert inline.count(document) == (0 if lost else 2)

    def test_asking_an_input_for_its_value_waits_for_it(self, desk: Desk) -> None:
        task = P.SemanticVariable(name="task")
        with pytest.raises(P.GetTimeoutError):
            task.get(timeout=0.01)
        task.set("a")
        assert task.get() == "a"
        assert ("set", "task-1", "a") in desk.backend.operations

    @pytest.mark.parametrize("value", [3, b"a"])
    def test_values_are_strings(self, desk: Desk, value: Any) -> None:
        with pytest.raises(TypeError, match="is a string"):
            P.SemanticVariable(value)
        with pytest.raises(TypeError, match="is a string"):
            P.SemanticVariable().set(value)

    def test_criteria_of_the_session_are_the_default(self) -> None:
        backend = FakeBackend()
        mine = P.Criteria(perf=P.THROUGHPUT, deadline_s=9)
        with (
            fake_connection(backend) as connection,
            P.Session(
                connection=connection,
                criteria=mine,
                ttl=7,
                tenant="t",
                sharing="session",
                metadata={"a": "b"},
            ),
        ):
            code, other = write("a"), write("b")
            code.get()
            other.get(perf="ttft", ttft=0.5)
        assert backend.created == [(mine, 7, "t", "session", {"a": "b"})]
        variables = backend.variables["sess-1"]
        assert variables["code-1"].wanted == [mine, mine]
        asked = P.Criteria(perf=P.TTFT, deadline_s=9, ttft_s=0.5)
        assert variables["code-2"].wanted == [asked]

    def test_criteria_of_the_session_may_be_names(self) -> None:
        backend = FakeBackend()
        mine = P.Criteria(perf="Throughput", deadline_s=9)  # type: ignore[arg-type]
        with (
            fake_connection(backend) as connection,
            P.Session(connection=connection, criteria=mine),
        ):
            write("a").get()
        [wanted, *_] = backend.variables["sess-1"]["code-1"].wanted
        assert wanted == P.Criteria(perf=P.THROUGHPUT, deadline_s=9)
        assert wanted.perf is P.THROUGHPUT

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"perf": "speed"}, "perf must be one of LATENCY"),
            ({"deadline_s": -5}, "deadline_s must be seconds, above 0: -5"),
            ({"ttft_s": "soon"}, "ttft_s must be seconds"),
        ],
        ids=str,
    )
    def test_criteria_of_the_session_are_checked(
        self, fields: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            P.Session(connection=fake_connection(FakeBackend()), criteria=P.Criteria(**fields))

    def test_unknown_criteria_are_named(self, desk: Desk) -> None:
        with pytest.raises(ValueError, match="perf must be one of LATENCY, TTFT"):
            write("a").get(perf="speed")
        with pytest.raises(ValueError, match="perf must be one of"):
            P.Session(connection=fake_connection(FakeBackend()), criteria="speed")
        with pytest.raises(ValueError, match="sharing must be one of tenant, session, not 'all'"):
            P.Session(connection=fake_connection(FakeBackend()), sharing="all")

    def test_want_does_not_wait(self, desk: Desk) -> None:
        task = P.SemanticVariable()
        code = write(task)
        code.want(perf=P.THROUGHPUT)
        assert ("want", code.id, "throughput") in desk.backend.operations
        task.set("a")
        assert code.get() == code_of("a")

    def test_streams_give_the_value_in_pieces(self, desk: Desk) -> None:
        code = write("a")
        pieces = list(code.stream())
        assert len(pieces) > 1
        assert "".join(pieces) == code_of("a") == code.value
        assert list(code.stream()) == [code_of("a")]
        assert desk.backend.variables["sess-1"][code.id].wanted[0].perf is P.TTFT

    def test_a_stream_can_be_left_early(self, desk: Desk) -> None:
        code = write("a")
        pieces = code.stream()
        assert next(pieces) == "<"
        pieces.close()
        assert code.value is None
        assert code.get() == code_of("a")


class TestCoroutines:
    async def test_everything_has_a_form_for_coroutines(self) -> None:
        backend = FakeBackend()
        async with fake_connection(backend) as connection:
            async with P.Session(connection=connection) as session:
                task = P.SemanticVariable(name="task")
                code = write(task)
                await session.aflush()
                await task.aset("a")
                assert await code.aget(perf=P.LATENCY) == code_of("a")
                test = test_of("a", code)
                await test.awant()
                assert "".join([piece async for piece in test.astream()]) == await test.aget()
                assert await P.agather(code, write("b")) == [code_of("a"), code_of("b")]
                gone = write("c")
                await gone.acancel()
                with pytest.raises(P.UpstreamError):
                    await gone.aget()
                assert (await session.ainspect())["id"] == "sess-1"
        assert backend.deleted == ["sess-1"]

    async def test_what_would_block_the_loop_is_refused(self) -> None:
        async with fake_connection(FakeBackend()) as connection:
            with pytest.raises(RuntimeError, match="`async with` instead"):
                with P.Session(connection=connection):
                    pass
            async with P.Session(connection=connection) as session:
                code = write("a")
                with pytest.raises(RuntimeError, match="block .* `aget` instead"):
                    code.get()
                with pytest.raises(RuntimeError, match="`astream` instead"):
                    next(iter(code.stream()))
                with pytest.raises(RuntimeError, match="`aflush` instead"):
                    session.flush()
                assert await asyncio.to_thread(code.get) == code_of("a")

    async def test_a_session_can_be_left_in_another_task(self) -> None:
        """Which has a context of its own, as in fixtures and dependencies of web frameworks."""
        backend = FakeBackend()
        async with fake_connection(backend) as connection:
            session = P.Session(connection=connection)
            await asyncio.create_task(session.__aenter__())
            await session.__aexit__(None, None, None)
            assert session.closed and backend.deleted == ["sess-1"]

    async def test_an_interrupted_get_leaves_the_program_whole(self) -> None:
        backend = FakeBackend()
        async with fake_connection(backend) as connection, P.Session(connection=connection):
            task = P.SemanticVariable()
            code = write(task)
            waiting = asyncio.create_task(code.aget())
            while not backend.programs:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await task.aset("a")
            assert await code.aget() == code_of("a")

    async def test_who_is_interrupted_while_a_program_is_sent_does_not_undo_it(self) -> None:
        entered, go_on = threading.Event(), threading.Event()

        class SlowBackend(FakeBackend):
            async def submit(self, session_id: str, calls: Any, key: str) -> Any:
                entered.set()
                await asyncio.to_thread(go_on.wait)
                return await super().submit(session_id, calls, key)

        async with fake_connection(SlowBackend()) as connection, P.Session(connection=connection):
            code = write("a")
            waiting = asyncio.create_task(code.aget())
            await asyncio.to_thread(entered.wait)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            go_on.set()
            assert await code.aget() == code_of("a")


class TestThreads:
    def test_threads_use_one_session_at_once(self, desk: Desk) -> None:
        def work(number: int) -> list[str]:
            with desk.session.use():
                code = write(str(number))
                return [code.get(), test_of("t", code).get()]

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(40)))
        for number, (code, test) in enumerate(results):
            assert code == code_of(str(number))
            assert test == shout("test_of", "test", f"Task: t\nCode: {code}\nTest: ")
        assert sum(len(program) for program in desk.backend.programs) == 80

    def test_a_thread_that_waits_is_told_when_the_session_ends(self) -> None:
        backend = FakeBackend()
        connection = fake_connection(backend)
        session = P.Session(connection=connection)
        with session, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(write(P.SemanticVariable()).get)
            while not backend.programs:
                session.flush()
            session.close()
            with pytest.raises(P.SessionGoneError):
                waiting.result()
        connection.close()
        connection.close()

    def test_a_session_can_be_left_in_another_thread(self) -> None:
        backend = FakeBackend()
        with fake_connection(backend) as connection:
            session = P.Session(connection=connection)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(session.__enter__).result()
                session.__exit__(None, None, None)
                assert session.closed and backend.deleted == ["sess-1"]

    def test_threads_do_not_take_over_the_current_session(self, desk: Desk) -> None:
        made: list[P.SemanticVariable] = []
        thread = threading.Thread(target=lambda: made.append(write("a")))
        thread.start()
        thread.join()
        assert made[0].session is None
        assert made[0].get() == code_of("a")


class TestStreams:
    def test_a_stream_that_times_out_goes_on(self, desk: Desk) -> None:
        """The server ends one after minutes without a piece."""
        stream, ended = desk.backend.stream, []

        async def impatient(*arguments: Any) -> AsyncGenerator[str, None]:
            async for piece in stream(*arguments):
                if len(ended) < 3 and piece == code_of("a")[2 + len(ended)]:
                    ended.append(piece)
                    raise P.GetTimeoutError("no output in time")
                yield piece

        desk.backend.stream = impatient  # type: ignore[method-assign]
        answer = write("a")
        assert "".join(answer.stream()) == code_of("a") == answer.get()
        assert len(ended) == 3

    def test_one_that_is_dropped_after_its_session_ends_quietly(self) -> None:
        with fake_connection(FakeBackend()) as connection:
            with P.Session(connection=connection):
                pieces = write("a").stream()
                next(pieces)
            pieces.close()  # type: ignore[attr-defined]


class TestNative:
    def test_it_runs_between_calls_with_texts_for_variables(self, desk: Desk) -> None:
        clipped = clip(write("a"), 7)
        assert write(clipped).get() == code_of(code_of("a")[:7])
        [program] = desk.backend.programs
        assert [(call.name, call.native) for call in program] == [
            ("write", False),
            ("clip", True),
            ("write", False),
        ]
        roles = [(p.name, p.role) for p in program[1].parameters]
        assert roles == [("text", Role.INPUT), ("output", Role.OUTPUT)]

    def test_nothing_runs_before_a_client_requests_it(self, desk: Desk) -> None:
        ran: list[str] = []

        @P.native_function
        def note(text):
            ran.append(text)
            return text

        noted = note(write("a"))
        write("b").get()
        assert ran == [] and len(desk.backend.prompts) == 1
        assert noted.get() == code_of("a")
        assert ran == [code_of("a")]

    def test_it_runs_once_for_all_that_need_it(self, desk: Desk) -> None:
        ran: list[str] = []

        @P.native_function
        def note(text):
            ran.append(text)
            return text

        noted = note("a")
        assert write(noted).get() == code_of("a")
        assert judge(noted).verdict.get().startswith("<judge")
        assert ran == ["a"]

    def test_several_outputs_lists_and_coroutines(self, desk: Desk) -> None:
        @P.native_function(outputs=("longest", "lengths"))
        async def measure(texts):
            return max(texts, key=len), [len(text) for text in texts]

        measured = measure([write("a"), "bb", P.SemanticVariable("c")])
        assert measured.longest.get() == code_of("a")
        assert measured.lengths.get() == f"[{len(code_of('a'))}, 2, 1]"

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (None, "TypeError: it returned None"),
            (ZeroDivisionError("by 0"), "ZeroDivisionError: by"),
            (SystemExit(3), "the function raised SystemExit: 3"),
            (KeyboardInterrupt(), "the function raised KeyboardInterrupt"),
            (asyncio.CancelledError(), "the function raised CancelledError"),
            ("a\ud800", "its result has half a character .* at position 1"),
            ({"a": float("nan")}, "ValueError: .*JSON"),
            (Interrupt("now"), "the function raised Interrupt: now"),
            (P.SessionGoneError("of my own"), "SessionGoneError: of my own"),
            (ValueError("bad name \udcff"), r"ValueError: bad name \\udcff"),
            (Wordless(), "Wordless"),
            (StopIteration(), "StopIteration"),
        ],
        ids=repr,
    )
    def test_what_it_raises_is_what_failed(
        self, desk: Desk, returned: object, message: str
    ) -> None:
        def bad(text):
            if isinstance(returned, BaseException):
                raise returned
            return returned

        async def bad_too(text):
            return bad(text)

        for function in map(P.native_function, (bad, bad_too)):
            with pytest.raises(P.UpstreamError, match=message) as raised:
                write(function("a")).get(timeout=30)
            assert raised.value.cause.stage is P.FailedStage.NATIVE
        assert write("b").get(timeout=30) == code_of("b")  # the session goes on

    def test_variables_within_lists_and_dicts_are_replaced(self, desk: Desk) -> None:
        @P.native_function
        def show(parts):
            return parts

        first, second = write("a"), write("b")
        shown = show([[first], {"k": (second, "c")}, 5])
        assert json.loads(shown.get()) == [[code_of("a")], {"k": [code_of("b"), "c"]}, 5]

    def test_arguments_without_variables_arrive_as_they_are(self, desk: Desk) -> None:
        given: list[Any] = []

        @P.native_function
        def keep(text, store, counts, pair):
            given.extend((store, counts, pair))
            return text

        kept = OrderedDict(a=1), Counter("aab"), Pair(1, [2])
        assert keep(write("a"), *kept).get() == code_of("a")
        assert all(found is one for found, one in zip(given, kept, strict=True))

    @pytest.mark.parametrize("how", ["want", "get"])
    def test_it_runs_if_it_is_added_behind_a_value_that_is_requested(
        self, desk: Desk, how: str
    ) -> None:
        late = P.SemanticVariable(name="late")
        answer = write(late)
        if how == "want":
            answer.want()
        else:
            with pytest.raises(P.GetTimeoutError):
                answer.get(timeout=0.1)
        clip("python code", output=late)
        desk.session.flush()
        assert answer.get(timeout=30) == code_of("pyt")

    @pytest.mark.parametrize("error", [InvalidRequestError, P.SessionLimitError])
    def test_a_result_that_the_server_refuses_is_what_failed(
        self, desk: Desk, error: Callable[[str], Exception]
    ) -> None:
        @P.native_function
        def much(text):
            return "x" * 100

        async def refuse(session_id: str, variable_id: str, value: str) -> None:
            raise error("the value is too long")

        desk.backend.set = refuse  # type: ignore[method-assign]
        with pytest.raises(P.UpstreamError, match="the value is too long"):
            much("a").get(timeout=10)

    @pytest.mark.parametrize("where", ["the same session", "one of its own"])
    def test_a_failed_call_that_it_makes_itself_is_what_failed(
        self, desk: Desk, where: str
    ) -> None:
        def model(name: str, output: str, prompt: str) -> str:
            raise ValueError("no more ink")

        @P.native_function
        def refine(text):
            if where == "the same session":
                return write("better").get()
            other = FakeBackend(model)
            with fake_connection(other) as connection, P.Session(connection=connection):
                return write("better").get()

        desk.backend.model = model
        refined = refine("a")
        with pytest.raises(P.UpstreamError, match="no more ink") as raised:
            refined.get(timeout=30)
        assert raised.value.cause.stage is P.FailedStage.NATIVE
        assert raised.value.cause.request_id == refined.producer.request_id

    def test_a_failure_that_cannot_be_reported_is_logged(
        self, desk: Desk, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def refuse(session_id: str, request_id: str, message: str) -> None:
            raise InvalidRequestError("no failures today")

        desk.backend.fail = refuse  # type: ignore[method-assign]
        with pytest.raises(P.GetTimeoutError):
            divide("a").get(timeout=0.2)
        assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
            "divide() failed (ZeroDivisionError: division by zero), which cannot be reported: "
            "no failures today"
        ]

    def test_too_few_values_are_a_failure(self, desk: Desk) -> None:
        @P.native_function(outputs=("a", "b"))
        def pair(text):
            return [text]

        with pytest.raises(P.UpstreamError, match=r"it must return 2 values \(a, b\)"):
            pair("x").a.get()

    def test_a_failed_input_fails_it_without_running_it(self, desk: Desk) -> None:
        def model(name: str, output: str, prompt: str) -> str:
            raise ValueError("no more ink")

        desk.backend.model = model
        clipped = clip(write("a"))
        with pytest.raises(P.UpstreamError, match="no more ink"):
            clipped.get()
        assert not [op for op in desk.backend.operations if op[0] in ("set", "fail")]

    def test_it_may_call_functions_itself(self, desk: Desk) -> None:
        @P.native_function
        def refine(text):
            return write(f"better {text}").get()

        assert refine("a").get() == code_of("better a")

    def test_a_cancelled_one_does_not_run(self, desk: Desk) -> None:
        ran: list[str] = []

        @P.native_function
        def note(text):
            ran.append(text)
            return text

        task = P.SemanticVariable()
        cancelled, other = note(task), note(task)
        cancelled.want()
        other.want()
        cancelled.cancel()
        task.set("a")
        assert other.get(timeout=30) == "a"
        time.sleep(0.3)
        assert ran == ["a"]
        with pytest.raises(P.UpstreamError, match="was cancelled"):
            cancelled.get(timeout=30)

    def test_a_running_coroutine_function_is_cancelled(self, desk: Desk) -> None:
        slow, entered, left = endless()
        running = slow("a")
        running.want()
        assert entered.wait(20)
        running.cancel()
        assert left.wait(20)
        assert not [operation for operation in desk.backend.operations if operation[0] == "fail"]

    def test_each_has_a_thread(self, desk: Desk) -> None:
        """More of them than asyncio.to_thread has threads, which look-ups of names need, too."""
        all_run = threading.Barrier(40)

        @P.native_function
        def meet(text):
            all_run.wait(timeout=20)
            return text

        met = [meet(str(number)) for number in range(40)]
        assert P.gather(*met, timeout=30) == [str(number) for number in range(40)]

    def test_one_may_call_the_next_on_and_on(self, desk: Desk) -> None:
        @P.native_function
        def count_down(number):
            if number == "0":
                return "end"
            return "." + count_down(P.SemanticVariable(str(int(number) - 1))).get(timeout=20)

        assert count_down("40").get(timeout=30) == 40 * "." + "end"

    def test_so_many_run_at_the_same_time(self, desk: Desk) -> None:
        running, most, lock = Counter[str](), 0, threading.Lock()

        @P.native_function
        def work(text):
            nonlocal most
            with lock:
                running["now"] += 1
                most = max(most, running["now"])
            time.sleep(0.05)
            with lock:
                running["now"] -= 1
            return text

        P.gather(*(work(str(number)) for number in range(MAX_NATIVE_THREADS + 40)), timeout=60)
        assert most <= MAX_NATIVE_THREADS

    def test_the_end_of_the_program_does_not_wait_for_them(self) -> None:
        program = """
import time
import bros.semantic as P
from support.fake_sessions import FakeBackend, fake_connection

@P.native_function
def sleep(text):
    print("sleeps", flush=True)
    time.sleep(600)

with fake_connection(FakeBackend()) as connection, P.Session(connection=connection):
    try:
        sleep("a").get(timeout=2)
    except P.GetTimeoutError:
        print("ends")
"""
        ended = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert ended.stdout.split() == ["sleeps", "ends"]

    def test_closing_the_session_gives_them_up(self) -> None:
        backend = FakeBackend()
        slow, entered, left = endless()
        with fake_connection(backend) as connection:
            with P.Session(connection=connection):
                slow("a").want()
                assert entered.wait(60)
            assert left.is_set()
        assert not [operation for operation in backend.operations if operation[0] == "fail"]
