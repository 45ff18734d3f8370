"""LangChain's prompts as functions of a session, and its chat models in one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

pytest.importorskip("langchain_core")

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import (
    ChatPromptTemplate,
    FewShotPromptTemplate,
    MessagesPlaceholder,
    PromptTemplate,
)
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

import bros.semantic as P
from bros.core.errors import InvalidRequestError
from bros.langchain import BrosChat, SemanticPrompt, Value
from support.fake_sessions import FakeBackend, fake_connection, shout
from support.program_engine import ProgramEngine, echo, text_of
from support.program_server import ProgramServer, program_server
from support.server_process import HTTP


@pytest.fixture
def backend() -> Iterator[FakeBackend]:
    backend = FakeBackend()
    with fake_connection(backend) as connection, P.Session(connection=connection):
        yield backend


def prompt(template: str, name: str = "prompt", **options: Any) -> SemanticPrompt:
    return SemanticPrompt(PromptTemplate.from_template(template), name=name, **options)


class TestPrompts:
    def test_nothing_is_rendered(self, backend: FakeBackend) -> None:
        write = prompt("Write {{{{ about {topic}, {topic}: ", "write")
        value = write.invoke({"topic": "a {game}"})
        assert isinstance(value, P.SemanticVariable)
        text = "Write {{ about a {game}, a {game}: "
        assert value.get() == shout("write", "output", text)
        [[call]] = backend.programs
        assert (
            call.template == r"Write \{{ about {{input:topic}}, {{input:topic}}: {{output:output}}"
        )

    def test_prompts_compose_and_are_sent_together(self, backend: FakeBackend) -> None:
        first, second = prompt("One {x}. ", "first"), prompt("Two {y}, {z}. ", "second")
        chain = {"y": first, "z": RunnablePassthrough()} | second | Value(perf=P.LATENCY)
        one = shout("first", "output", "One a. ")
        assert chain.invoke("a") == shout("second", "output", f"Two {one}, a. ")
        [program] = backend.programs
        assert [call.name for call in program] == ["first", "second"]

    async def test_coroutines_and_streams(self) -> None:
        backend = FakeBackend()
        chain = prompt("One {x}. ", "first") | prompt("Two {y}. ", "second") | Value()
        expected = shout("second", "output", f"Two {shout('first', 'output', 'One a. ')}. ")
        async with fake_connection(backend) as connection, P.Session(connection=connection):
            assert await chain.ainvoke("a") == expected
            pieces = [piece async for piece in chain.astream("a")]
        assert len(pieces) > 1 and "".join(pieces) == expected

    def test_streams_of_a_chain_are_in_pieces(self, backend: FakeBackend) -> None:
        pieces = list((prompt("One {x}. ") | Value()).stream("a"))
        assert len(pieces) > 1
        assert "".join(pieces) == shout("prompt", "output", "One a. ")

    def test_values_of_many_are_asked_for_at_once(self, backend: FakeBackend) -> None:
        chain = {"a": prompt("A {x}", "a"), "b": prompt("B {x}", "b")} | Value()
        expected = {name: shout(name, "output", f"{name.upper()} 1") for name in ("a", "b")}
        assert chain.invoke({"x": 1}) == expected
        listed = RunnableLambda(lambda x: [prompt("A {x}", "a").invoke(x)]) | Value()
        assert listed.invoke("1") == [expected["a"]]

    def test_conversations_keep_their_roles(self, backend: FakeBackend) -> None:
        template = ChatPromptTemplate.from_messages(
            [
                ("system", "Be {mood}."),
                SystemMessage("Say {{ or {x}."),
                MessagesPlaceholder("history"),
                ("human", "{question}"),
            ]
        )
        history = [HumanMessage("Hi"), AIMessage("Yes?")]
        given = {"mood": "kind", "history": history, "question": "Why {{?"}
        SemanticPrompt(template, name="talk").invoke(given).get()
        [[call]] = backend.programs
        assert [(message.role, message.content) for message in call.messages or ()] == [
            ("system", "Be {{input:mood}}."),
            ("system", r"Say \{{ or {x}."),
            ("user", "Hi"),
            ("assistant", "Yes?"),
            ("user", "{{input:question}}"),
            ("assistant", "{{output:output}}"),
        ]

    def test_what_the_assistant_began_is_continued(self, backend: FakeBackend) -> None:
        template = ChatPromptTemplate.from_messages([("human", "{x}"), ("ai", "Well, ")])
        SemanticPrompt(template).invoke({"x": "1"}).get()
        [[call]] = backend.programs
        assert (call.messages or ())[-1].content == "Well, {{output:output}}"

    def test_partial_variables_and_other_formats(self, backend: FakeBackend) -> None:
        template = PromptTemplate(
            template="{{a}} {{ b }} {{c}}",
            template_format="mustache",
            input_variables=["a"],
            partial_variables={"b": "two", "c": lambda: "three"},
        )
        value = SemanticPrompt(template).invoke({"a": 1, "unused": object()})
        assert value.get() == shout("prompt", "output", "1 two three")

    def test_sampling_transforms_and_the_name_of_the_output(self, backend: FakeBackend) -> None:
        asked = prompt(
            "{x}", sampling={"max_tokens": 3}, transforms={"verdict": "strip"}, output="verdict"
        )
        asked.invoke("a").get()
        [[call]] = backend.programs
        assert dict(call.sampling) == {"max_tokens": 3}
        assert [(p.name, p.transforms) for p in call.parameters] == [
            ("x", None),
            ("verdict", "strip"),
        ]

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (PromptTemplate.from_template("{x:>3}"), "only plain names"),
            (PromptTemplate.from_template("{{#x}}y{{/x}}", template_format="mustache"), "mustache"),
            (PromptTemplate.from_template("{output}"), "name the output otherwise"),
            (
                FewShotPromptTemplate(
                    examples=[],
                    example_prompt=PromptTemplate.from_template("x"),
                    suffix="{x}",
                    input_variables=["x"],
                ),
                "FewShotPromptTemplate cannot be sent unrendered",
            ),
        ],
    )
    def test_what_has_to_be_rendered_is_refused(
        self, template: PromptTemplate, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            SemanticPrompt(template)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"sampling": {"temperatur": 1}}, "sampling: 'temperatur' is neither"),
            ({"sampling": {"max_tokens": -1}}, "max_tokens"),
            ({"sampling": "hot"}, "sampling must be a mapping, got 'hot'"),
            ({"transforms": "strip"}, "transforms must be a mapping, got 'strip'"),
            ({"transforms": {"output": "srtip"}}, "srtip"),
            ({"transforms": {"other": "strip"}}, "'other' does not occur"),
        ],
    )
    def test_invalid_options_are_refused_at_once(
        self, options: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            prompt("{x}", **options)

    def test_arguments_of_other_types_are_their_texts(self, backend: FakeBackend) -> None:
        """As in LangChain: a retriever gives a list of documents, for instance."""
        asked = prompt("{a} {b} {c}")
        asked.invoke({"a": [1, 2], "b": None, "c": {"k": "v"}}).get()
        assert backend.prompts == ["[1, 2] None {'k': 'v'}"]

    def test_a_conversation_without_messages_is_refused(self, backend: FakeBackend) -> None:
        place = MessagesPlaceholder("history", optional=True)
        empty = SemanticPrompt(ChatPromptTemplate.from_messages([place]))
        with pytest.raises(ValueError, match="the conversation has no messages"):
            empty.invoke({})

    @pytest.mark.parametrize("source", ["A {{{x}}} B", "A {{& x}} B", "A {{x}} B", "{{{x}}}"])
    def test_variables_of_mustache(self, backend: FakeBackend, source: str) -> None:
        template = PromptTemplate.from_template(source, template_format="mustache")
        SemanticPrompt(template).invoke({"x": "V"}).get()
        assert backend.prompts == [template.format(x="V")]

    def test_values_that_are_there_already_stay(self, backend: FakeBackend) -> None:
        answer = prompt("{x}").invoke("a")
        assert Value().invoke({"a": answer, "b": "text", "c": 5}) == {
            "a": answer.get(), "b": "text", "c": 5,
        }  # fmt: skip
        assert Value().invoke(["text"]) == ["text"]

    def test_wrong_arguments(self, backend: FakeBackend) -> None:
        two = prompt("{x} {y}")
        with pytest.raises(TypeError, match="a mapping with x, y is needed"):
            two.invoke("a")
        with pytest.raises(KeyError, match="y is missing"):
            two.invoke({"x": "a"})
        with pytest.raises(TypeError, match="Value needs variables, not str"):
            Value().invoke("a")


@pytest.fixture(scope="module")
def server() -> Iterator[ProgramServer]:
    engine = ProgramEngine(lambda prompt: "Two seals.", step_s=0.0001)
    with program_server(engine, api_key="key") as server:
        yield server


def long_echo(prompt: str) -> str:
    return f"{echo(prompt)} is the answer to this prompt."


def edges(graph: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(producer, consumer) by name, of all variables."""
    names = {request["id"]: request["name"] for request in graph["requests"]}
    return [
        (names[variable["producer"]], names[consumer])
        for variable in graph["variables"]
        for consumer in variable["consumers"]
    ]


class TestChatModel:
    def test_answers_and_counts(self, server: ProgramServer) -> None:
        model = BrosChat(url=server.url, api_key="key", max_tokens=20)
        answer = model.invoke("How many?")
        assert answer.content == "Two seals."
        assert answer.response_metadata["finish_reason"] == "stop"
        usage = answer.usage_metadata
        assert usage is not None
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert "".join(str(chunk.content) for chunk in model.stream("How many?")) == "Two seals."

    async def test_coroutines(self, server: ProgramServer) -> None:
        model = BrosChat(url=server.url + "/v1", api_key="key")
        assert (await model.ainvoke([HumanMessage("How many?")])).content == "Two seals."
        pieces = [str(chunk.content) async for chunk in model.astream("How many?")]
        assert len(pieces) > 1 and "".join(pieces) == "Two seals."

    def test_requests_join_a_session(self, server: ProgramServer) -> None:
        with P.Session(server.url, api_key="key") as session:
            model = BrosChat(url=server.url, api_key="key", session=session.id, node="count")
            model.invoke("How many?")
            list(model.stream("How many?"))
            prompt("Describe {x}: ", "describe").invoke("two seals").get()
            calls = [(r["name"], r["kind"], r["state"]) for r in session.inspect()["requests"]]
        assert calls == [
            ("count", "plain", "finished"),
            ("count", "plain", "finished"),
            ("describe", "llm", "finished"),
        ]

    @pytest.mark.parametrize("streamed", [False, True])
    def test_a_chain_of_texts_has_edges(self, streamed: bool) -> None:
        with program_server(ProgramEngine(long_echo, step_s=0.0001)) as server:

            def model(node: str) -> BrosChat:
                return BrosChat(url=server.url, session="app", node=node)

            outline = PromptTemplate.from_template("An outline of {topic}:") | model("outline")
            story = PromptTemplate.from_template("Tell it: {text}") | model("story")
            chain = {"text": outline | StrOutputParser()} | story | StrOutputParser()
            told = (
                "".join(chain.stream("a lighthouse")) if streamed else chain.invoke("a lighthouse")
            )
            model("unrelated").invoke("What do seals eat?")
            prompt = server.engine.llm_calls()[1].prompt_token_ids
            assert told == long_echo(text_of(prompt))
            graph = HTTP.get(f"{server.url}/v1/sessions/app").json()
            drawn = HTTP.get(f"{server.url}/v1/sessions/app/graph.dot").text
            page = HTTP.get(f"{server.url}/v1/sessions/app/graph").text
        assert edges(graph) == [("outline", "story")]
        assert [r["depth"] for r in graph["requests"]] == [0, 1, 0]
        assert "c0 -> c1" in drawn and "c0 -> c2" not in drawn and "c1 -> c2" not in drawn
        assert '<a href="#c0">outline</a>' in page and '<a href="#c1">story</a>' in page

    @pytest.mark.parametrize("streamed", [False, True])
    def test_messages_of_a_conversation_are_inputs(
        self, server: ProgramServer, streamed: bool
    ) -> None:
        """However short they are: their ids say where they came from."""
        with P.Session(server.url, api_key="key") as session:
            first, second = (
                BrosChat(url=server.url, api_key="key", session=session.id, node=node)
                for node in ("first", "second")
            )
            history: list[BaseMessage] = [HumanMessage("How many?")]
            for _ in range(2):
                chunks = list(first.stream(history)) if streamed else [first.invoke(history)]
                answer = functools.reduce(operator.add, chunks)
                assert answer.response_metadata["id"].startswith("chatcmpl-")
                history += [answer, HumanMessage("And now?")]
            second.invoke([*history[:2], AIMessage("x", response_metadata={"id": "no id, here"})])
            other = BrosChat(url=server.url, api_key="key", session="another", node="other")
            other.invoke(history)
            graph = session.inspect()
        assert edges(graph) == [("first", "first"), ("first", "second")]
        assert [len(r["inputs"]) for r in graph["requests"]] == [0, 1, 1]

    def test_stop_and_other_fields_reach_the_engine(self, server: ProgramServer) -> None:
        model = BrosChat(url=server.url, api_key="key", temperature=0.0, extra_body={"top_k": 3})
        model.invoke("How many?", stop=["!"], seed=4)
        sampling = server.engine.llm_calls()[-1].sampling
        assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.0, 3, 4)

    @pytest.mark.parametrize("stream", [False, True])
    def test_errors_are_those_of_bros(self, server: ProgramServer, stream: bool) -> None:
        model = BrosChat(url=server.url, api_key="key", temperature=-1)
        with pytest.raises(InvalidRequestError) as raised:
            list(model.stream("Hi")) if stream else model.invoke("Hi")
        assert raised.value.param == "temperature"
        with pytest.raises(P.ServerUnreachableError):
            BrosChat(url="http://127.0.0.1:9").invoke("Hi")

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_body_that_is_no_json_is_not_the_fault_of_the_server(
        self, server: ProgramServer, stream: bool
    ) -> None:
        bound = BrosChat(url=server.url, api_key="key").bind(response_format=dict)
        with pytest.raises(TypeError, match="not JSON serializable"):
            list(bound.stream("Hi")) if stream else bound.invoke("Hi")
        with pytest.raises(TypeError, match="not JSON serializable"):
            [_ async for _ in bound.astream("Hi")] if stream else await bound.ainvoke("Hi")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temprature": 1.0}, "temprature"),
            ({"node": "gr\u00fcn"}, "node\n.*must be printable ASCII"),
            ({"session": "a\nb"}, "session\n.*must be printable ASCII"),
            ({"api_key": "secret\n"}, "api_key\n.*must be printable ASCII"),
        ],
    )
    def test_invalid_arguments_are_named(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message) as raised:
            BrosChat(**options)
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize("empty", [False, True])
    def test_streams_say_how_they_ended(self, server: ProgramServer, empty: bool) -> None:
        """Also without any text: LangChain refuses streams without chunks."""
        model = BrosChat(url=server.url, api_key="key", max_tokens=3)
        chunks = list(model.stream("How many?", stop=["Two" if empty else "!"]))
        answer = functools.reduce(operator.add, chunks)
        assert answer.content == ("" if empty else "Two")
        assert answer.response_metadata["finish_reason"] == ("stop" if empty else "length")
        assert answer.response_metadata["model_name"]
        assert answer.usage_metadata is not None and answer.usage_metadata["input_tokens"] > 0

    def test_the_key_is_not_shown(self) -> None:
        assert "secret" not in repr(BrosChat(api_key="secret"))
