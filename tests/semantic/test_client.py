"""The front end on real sessions, over HTTP and in this process: what holds must hold for both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bros.semantic as P
from bros.core.errors import (
    AuthenticationError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
)
from bros.core.request import ServiceClass
from bros.semantic.schema import CallSpec, Role
from support.program_engine import ProgramEngine, echo
from support.program_server import (
    LossyBackend,
    local_connection,
    lossy_connection,
    program_server,
)
from support.tier import examples

STEP_S = 0.0001


class Place(NamedTuple):
    """Where programs run. do: something on the engine's own loop."""

    engine: ProgramEngine
    connection: P.Connection
    do: Callable[[Callable[[], Any]], Any]


@pytest.fixture(scope="module", params=["http", "local"])
def home(request: pytest.FixtureRequest) -> Iterator[Place]:
    engine = ProgramEngine(step_s=STEP_S)
    if request.param == "local":
        with local_connection(engine) as connection:

            def do(action: Callable[[], Any]) -> Any:
                async def act() -> Any:
                    return action()

                return connection.run(act(), "")

            yield Place(engine, connection, do)
        return
    with program_server(engine) as server, P.connect(server.url) as connection:
        yield Place(engine, connection, server.do)


@pytest.fixture
def place(home: Place) -> Place:
    """The same for all tests, but each begins with an engine that has no requests yet."""
    home.do(home.engine.submitted.clear)
    return home


@pytest.fixture
def session(place: Place) -> Iterator[P.Session]:
    with P.Session(connection=place.connection) as session:
        yield session


@P.semantic_function(sampling={"max_tokens": 40})
def ask(question: P.SemanticVariable):
    """Q {{input:question}} A {{output:answer}}"""


@P.semantic_function(transforms={"both": "upper"})
def join(parts: P.SemanticVariable):
    """Join {{parts}}: {{output:both}}"""


@P.semantic_function(sampling={"long": {"max_tokens": 30}})
def plan(goal: P.SemanticVariable):
    """Goal {{goal}} Plan {{output:steps:long}} Risk {{output:risk}}"""


@P.native_function
def first_letters(text: P.SemanticVariable, count: int = 4) -> P.SemanticVariable:
    return text[:count]  # type: ignore[index, return-value]


def answer_to(question: str) -> str:
    return echo(f"Q {question} A ")


def test_a_program_gives_its_values(session: P.Session) -> None:
    first, second = ask("one"), ask("two")
    both = join([first, first_letters(second)])
    steps = plan(both)
    expected = echo(f"Join {answer_to('one')}\n\n{answer_to('two')[:4]}: ").upper()
    assert both.get(perf=P.LATENCY) == expected
    planned = echo(f"Goal {expected} Plan ")
    assert P.gather(*steps) == [planned, echo(f"Goal {expected} Plan {planned} Risk ")]
    assert first.get() == answer_to("one")


def test_half_a_character_harms_nothing_else(session: P.Session) -> None:
    for half in ("a\udc80", ["a\udc80", P.SemanticVariable("b")], OSError("a\udc80")):
        with pytest.raises(ValueError, match=r"ask\(\): question has half a character"):
            ask(half)
    with pytest.raises(ValueError, match="the value of a variable has half a character"):
        P.SemanticVariable("a\udc80")
    variable = P.SemanticVariable()
    answer = ask(variable)
    with pytest.raises(ValueError, match="half a character"):
        variable.set("a\udc80")
    variable.set("one")
    assert answer.get() == answer_to("one")


def test_gather_takes_variables(session: P.Session) -> None:
    for wrong in ([ask("one")], "one"):
        with pytest.raises(TypeError, match="variables are arguments of their own, not a"):
            P.gather(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [{"deadline": -1}, {"deadline": 0}, {"ttft": "soon"}, {"tpot": float("nan")}, {"timeout": -3}],
    ids=str,
)
def test_a_get_that_makes_no_sense_harms_nothing_else(
    session: P.Session, wrong: dict[str, Any]
) -> None:
    first, second = ask("one"), ask("two")
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be seconds"):
        second.get(**wrong)
    assert [first.get(), second.get()] == [answer_to("one"), answer_to("two")]


def test_calls_share_a_long_text(session: P.Session) -> None:
    document = "x" * 1200
    answers = [join([document, str(number)]) for number in range(20)]
    expected = [echo(f"Join {document}\n\n{number}: ").upper() for number in range(20)]
    assert P.gather(*answers) == expected
    long = [len(v["consumers"]) for v in session.inspect()["variables"] if v["value"] == document]
    assert long == [20]


def test_only_what_is_wanted_runs(place: Place, session: P.Session) -> None:
    wanted, unwanted = ask("one"), ask("two")
    wanted.get()
    ran = len(place.engine.llm_calls())
    assert ran == 1
    assert unwanted.value is None


def test_criteria_decide_the_class(place: Place, session: P.Session) -> None:
    ask("one").get(perf=P.THROUGHPUT)
    ask("two").get(perf=P.LATENCY, deadline=60)
    classes = [request.service_class for request in place.engine.llm_calls()]
    assert classes == [ServiceClass.BE, ServiceClass.RT]
    assert place.engine.llm_calls()[1].slo.deadline_s == pytest.approx(60, abs=50)


def test_sampling_reaches_the_engine_by_output(place: Place, session: P.Session) -> None:
    steps, risk = plan("a")
    risk.get()
    assert [llm_call.sampling.max_tokens for llm_call in place.engine.llm_calls()] == [30, 256]


def test_values_arrive_in_pieces(session: P.Session) -> None:
    answer = ask("one")
    pieces = list(answer.stream())
    assert "".join(pieces) == answer_to("one") == answer.value
    assert len(pieces) > 1
    # With a transform on it there is nothing to be seen before the end.
    assert list(join("x").stream()) == [echo("Join x: ").upper()]


def test_a_stream_can_be_left_early(session: P.Session) -> None:
    answer = ask("one")
    pieces = answer.stream()
    next(pieces)
    pieces.close()
    assert answer.get() == answer_to("one")


def test_inputs_may_come_later_from_elsewhere(session: P.Session) -> None:
    question = P.SemanticVariable(name="question")
    answer = ask(question)
    with pytest.raises(P.GetTimeoutError, match="'answer' was not there within 0.05 s") as late:
        answer.get(timeout=0.05)
    assert str(late.value).endswith(
        f"0.05 s. No client has set question of ask (variable {question.id}) so far."
    )
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(variable.get) for variable in (answer, question)]
        question.set("one")
        assert [future.result() for future in waiting] == [answer_to("one"), "one"]


def test_ids_name_variables_for_others(place: Place, session: P.Session) -> None:
    question = P.SemanticVariable("one", name="question")
    answer = ask(question)
    names = {question.id: "question", answer.id: "answer"}
    answer.get()
    variables = {v["id"]: v for v in session.inspect()["variables"]}
    assert {key: variables[key]["name"] for key in names} == names
    assert variables[answer.id]["value"] == answer_to("one")


def test_the_graph_can_be_seen(session: P.Session) -> None:
    summary = join([ask("one"), first_letters("two")])
    summary.get()
    requests = session.inspect()["requests"]
    assert [(r["name"], str(r["kind"]), str(r["state"])) for r in requests] == [
        ("ask", "llm", "finished"),
        ("first_letters", "native", "finished"),
        ("join", "llm", "finished"),
    ]
    assert requests[2]["stage"] == 0 and requests[0]["stage"] == 1


class TestErrors:
    def test_a_failure_names_the_first_cause_to_all(self, place: Place, session: P.Session) -> None:
        @P.semantic_function(transforms={"number": "int"})
        def count(text):
            """Count {{text}}: {{output:number}}"""

        number = count(ask("one"))
        after, sibling = join(number), ask("two")
        for variable in (after, number):
            with pytest.raises(P.UpstreamError) as raised:
                variable.get()
            assert raised.value.cause.stage is P.FailedStage.TRANSFORM
            assert raised.value.cause.request_id == number.producer.request_id
        assert sibling.get() == answer_to("two")

    def test_a_native_failure_is_told_in_its_own_words(self, session: P.Session) -> None:
        @P.native_function
        def divide(text):
            return 1 // 0

        with pytest.raises(P.UpstreamError, match="ZeroDivisionError") as raised:
            join(divide(ask("one"))).get()
        assert raised.value.cause.stage is P.FailedStage.NATIVE

    def test_a_native_function_after_a_failure_does_not_run(self, session: P.Session) -> None:
        ran = threading.Event()

        @P.native_function
        def note(text):
            ran.set()
            return text

        failed = ask("one")
        session.flush()
        failed.cancel()
        with pytest.raises(P.UpstreamError):
            note(failed).get()
        assert not ran.is_set()

    def test_a_call_that_cannot_be_sent_fails_alone(self, session: P.Session) -> None:
        good, bad = ask("one"), ask("two")
        assert bad.producer is not None
        bad.producer.arguments = {"question": object()}
        with pytest.raises(AttributeError):
            bad.get()
        assert good.get() == answer_to("one")

    def test_a_reader_that_was_made_before_the_writer_fails_with_it(
        self, session: P.Session
    ) -> None:
        read, written = P.SemanticVariable(), P.SemanticVariable()
        last = ask(read)
        ask(written, answer=read)
        ask("q", answer=written)
        written.cancel()
        with pytest.raises(P.UpstreamError, match="was cancelled"):
            last.get(timeout=30)

    def test_cancelled_calls_fail_what_needs_them(self, session: P.Session) -> None:
        question = P.SemanticVariable()
        answer = ask(question)
        summary = join(answer)
        session.flush()
        answer.cancel()
        for variable in (summary, answer):
            with pytest.raises(P.UpstreamError, match="was cancelled") as raised:
                variable.get()
            assert raised.value.cause.stage is P.FailedStage.CANCELLED

    def test_cycles_are_refused_at_once(self, session: P.Session) -> None:
        first = P.SemanticVariable(name="first")
        second = ask(first)
        ask(second, answer=first)
        with pytest.raises(P.ConflictError) as raised:
            second.get()
        assert raised.value.code == "cyclic"
        assert ask("one").get() == answer_to("one")

    def test_the_server_has_the_last_word_on_values(self, session: P.Session) -> None:
        question = P.SemanticVariable(name="question")
        ask(question)
        session.flush()
        # As a client does that has only heard the id.
        other = P.SemanticVariable(name="question")
        question.set("one")
        with pytest.raises(P.ConflictError):
            question.set("two")
        assert other.value is None

    def test_the_value_of_another_client_counts(self, place: Place, session: P.Session) -> None:
        question = P.SemanticVariable(name="question")
        answer = ask(question)
        session.flush()
        backend = place.connection.run(place.connection.backend(), "")
        place.connection.run(backend.set(session.id, question.id, "one"), "")
        with pytest.raises(P.ConflictError):
            question.set("two")
        assert question.get(timeout=30) == "one"
        assert answer.get(timeout=30) == answer_to("one")

    def test_a_session_that_is_gone_says_so(self, place: Place) -> None:
        with P.Session(connection=place.connection) as session:
            waiting = ask(P.SemanticVariable())
            session.flush()
            with ThreadPoolExecutor(1) as pool:
                waits = pool.submit(waiting.get)
                session.close()
                with pytest.raises(P.SessionGoneError):
                    waits.result()

    def test_prompts_that_are_too_long_fail_their_call_only(self, session: P.Session) -> None:
        long, short = ask("x" * 5000), ask("one")
        with pytest.raises((P.UpstreamError, InvalidRequestError), match="context length"):
            long.get()
        assert short.get() == answer_to("one")


def test_no_request_outlives_its_session(place: Place) -> None:
    with P.Session(connection=place.connection) as session:
        for number in range(5):
            ask(str(number)).want()
        assert session.id
    assert place.do(lambda: dict(place.engine.open)) == {}


@settings(max_examples=examples(15))
@given(data=st.data())
def test_random_programs_equal_calling_one_by_one(data: st.DataObject) -> None:
    """With native functions in between, over the service, in any order of asking."""
    known: list[tuple[Any, str]] = [("c", "c")]
    with (
        local_connection(ProgramEngine(step_s=STEP_S)) as connection,
        P.Session(connection=connection),
    ):
        for _ in range(data.draw(st.integers(1, 7))):
            argument, text = data.draw(st.sampled_from(known))
            kind = data.draw(st.sampled_from(["ask", "native", "join"]))
            if kind == "ask":
                known.append((ask(argument), answer_to(text)))
            elif kind == "native":
                known.append((first_letters(argument), text[:4]))
            else:
                value = echo(f"Join {text}\n\n{text}: ").upper()
                known.append((join([argument, argument]), value))
        for variable, value in data.draw(st.permutations(known[1:])):
            assert variable.get() == value


async def test_coroutines(place: Place) -> None:
    async with P.Session(connection=place.connection) as session:
        answers = [ask(str(number)) for number in range(10)]
        summary = join(answers)
        assert await P.agather(*answers) == [answer_to(str(number)) for number in range(10)]
        pieces = [piece async for piece in ask("one").astream()]
        assert "".join(pieces) == answer_to("one")
        waiting = asyncio.create_task(summary.aget(perf=P.TPOT, tpot=0.5))
        assert (await waiting) == summary.value
        assert len((await session.ainspect())["requests"]) == 12


def test_what_comes_again_is_known_by_its_key(place: Place, session: P.Session) -> None:
    backend = place.connection.run(place.connection.backend(), "")
    program = [CallSpec(template="A {{output:a}}")]
    first, again = (
        list(place.connection.run(backend.submit(session.id, program, "key"), "")) for _ in range(2)
    )
    assert first == again
    assert len(session.inspect()["requests"]) == 1


@pytest.fixture
def lossy() -> Iterator[LossyBackend]:
    """What the current session talks through."""
    with lossy_connection(ProgramEngine(step_s=STEP_S)) as (connection, backend):
        with P.Session(connection=connection):
            yield backend


@pytest.mark.parametrize("half", ["request", "answer"])
class TestLostConnections:
    def test_a_program_is_taken_once(self, lossy: LossyBackend, half: str) -> None:
        first = ask("one")
        lossy.lost = ("submit", half)
        with pytest.raises(P.ServerUnreachableError):
            first.get()
        second = join(first)
        assert second.get() == echo(f"Join {answer_to('one')}: ").upper()
        assert first.get() == answer_to("one")
        assert first.producer is not None and second.producer is not None
        requests = [request["id"] for request in second.session.inspect()["requests"]]
        assert requests == [first.producer.request_id, second.producer.request_id]

    def test_a_call_can_be_cancelled(self, lossy: LossyBackend, half: str) -> None:
        question = P.SemanticVariable()
        answer = ask(question)
        lossy.lost = ("submit", half)
        with pytest.raises(P.ServerUnreachableError):
            answer.want()
        answer.cancel()
        with pytest.raises(P.UpstreamError, match="was cancelled"):
            answer.get()
        states = [str(request["state"]) for request in answer.session.inspect()["requests"]]
        assert states == ["cancelled"]

    def test_an_input_can_be_set(self, lossy: LossyBackend, half: str) -> None:
        question = P.SemanticVariable()
        answer = ask(question)
        lossy.lost = ("submit", half)
        with pytest.raises(P.ServerUnreachableError):
            answer.want()
        question.set("one")
        assert answer.get() == answer_to("one")

    @pytest.mark.parametrize("again", [False, True])
    def test_a_value_is_set(self, lossy: LossyBackend, half: str, again: bool) -> None:
        question = P.SemanticVariable()
        answer = ask(question)
        answer.want()
        lossy.lost = ("set", half)
        with pytest.raises(P.ServerUnreachableError):
            question.set("one")
        with pytest.raises(P.ConflictError):
            question.set("two")  # the server may have the other one
        if again:
            question.set("one")
            with pytest.raises(P.ConflictError):
                question.set("one")
        assert answer.get(timeout=60) == answer_to("one")

    @pytest.mark.parametrize("late", [False, True])
    def test_a_variable_is_declared(self, lossy: LossyBackend, half: str, late: bool) -> None:
        question = P.SemanticVariable(None if late else "one", name="question")
        answer = ask(question)
        assert question.id
        lossy.lost = ("declare", half)
        with pytest.raises(P.ServerUnreachableError):
            answer.get()
        if late:
            question.set("one")
        assert answer.get(timeout=60) == answer_to("one")

    def test_a_server_that_is_busy_is_asked_again(self, lossy: LossyBackend, half: str) -> None:
        """503 comes of too many connections, too."""
        lossy.lost, lossy.error = ("submit", half), EngineDeadError("The server is busy.")
        first = ask("one")
        with pytest.raises(EngineDeadError):
            first.get()
        assert first.get(timeout=60) == answer_to("one")

    def test_a_variable_that_is_asked_for_is_declared(self, lossy: LossyBackend, half: str) -> None:
        question = P.SemanticVariable(name="question")
        lossy.lost = ("declare", half)
        with pytest.raises(P.ServerUnreachableError):
            question.want()
        question.want()
        question.set("one")
        assert ask(question).get(timeout=60) == answer_to("one")

    @pytest.mark.parametrize("operation", ["get", "set"])
    def test_a_native_result_arrives(self, lossy: LossyBackend, half: str, operation: str) -> None:
        letters = first_letters(ask("one"))
        lossy.lost = (operation, half)
        assert letters.get(timeout=60) == answer_to("one")[:4]
        assert lossy.lost is None

    def test_a_native_failure_is_told(self, lossy: LossyBackend, half: str) -> None:
        @P.native_function
        def divide(text):
            return 1 // 0

        failed = divide(ask("one"))
        lossy.lost = ("fail", half)
        with pytest.raises(P.UpstreamError, match="ZeroDivisionError"):
            failed.get(timeout=60)
        assert lossy.lost is None


class TestHttp:
    def test_no_server_at_the_address(self) -> None:
        with pytest.raises(P.ServerUnreachableError, match="http://127.0.0.1:9 does not answer"):
            with P.Session("http://127.0.0.1:9"):
                pass

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://a\x00b"])
    def test_what_is_no_url(self, url: str) -> None:
        with pytest.raises(ConfigError):
            P.Session(url)

    @pytest.mark.parametrize("key", ["secret\n", "sécret", "sec\x00ret"])
    def test_a_key_that_fits_no_header_is_not_shown(self, key: str) -> None:
        with pytest.raises(ConfigError, match="^api_key: .* printable ASCII") as raised:
            P.connect("http://localhost:1", api_key=key)
        assert key.strip() not in str(raised.value)

    def test_options_of_an_engine_need_one(self) -> None:
        with pytest.raises(TypeError, match="model, kv_blocks: options of an engine"):
            P.Session("http://localhost:1", model="x", kv_blocks=3)

    def test_keys_are_sent(self) -> None:
        with program_server(ProgramEngine(step_s=STEP_S), api_key="secret") as server:
            with pytest.raises(AuthenticationError):
                with P.Session(server.url):
                    pass
            with P.Session(server.url + "/v1", api_key="secret"):
                assert ask("one").get() == answer_to("one")

    def test_the_server_goes_away(self) -> None:
        with program_server(ProgramEngine(step_s=STEP_S)) as server:
            session = P.Session(server.url)
            with session.use():
                ask("one").get()
                unasked = ask("two")
        with pytest.raises(P.ServerUnreachableError):
            unasked.get()
        session.close()

    def test_a_variable_of_a_finished_server_session_is_not_found(self) -> None:
        with program_server(ProgramEngine(step_s=STEP_S)) as server:
            with P.connect(server.url) as connection:
                with pytest.raises(NotFoundError):
                    backend = connection.run(connection.backend(), "")
                    connection.run(backend.inspect("sess-nothing"), "")


def test_spec_of_a_call_has_roles_for_all(place: Place, session: P.Session) -> None:
    call = plan("a").steps.producer
    assert call is not None
    roles = {p.name: p.role for p in call.to_spec(session, {}).parameters}
    assert roles == {"goal": Role.INPUT, "steps": Role.OUTPUT, "risk": Role.OUTPUT}
