"""Streaming: the text of server-sent events, down to the byte."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from bros.core.clock import ManualClock
from bros.core.request import (
    FinishReason,
    IdGenerator,
    RequestOutput,
    SamplingParams,
    ServiceClass,
)
from bros.engine.client import MessageClient
from bros.engine.messages import Accepted, Command, Outputs, Ready
from bros.server.errors import GenerationFailedError
from bros.server.http import ChunkedBody
from bros.server.openai.stream import (
    DIRECT_SEND,
    Answer,
    AnswerStream,
    ChatChunkWriter,
    ChunkFrame,
    ChunkWriter,
    CompletionChunkWriter,
)
from bros.server.state import StopSignal
from bros.text.generation import TextDelta, TextGenerator
from support.outputs import outputs_of
from support.scripted_server import LiveServer, Server, chunks, events
from support.tiny_tokenizer import tiny_tokenizer
from support.wire import INFO


async def test_chat_stream_byte_for_byte(server: Server) -> None:
    server.engine.text = "hé\u2028"
    response = await server.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    response_id = json.loads(events(response.text)[0])["id"]
    head = (
        f'data: {{"id":"{response_id}","object":"chat.completion.chunk","created":1700000000,'
        '"model":"scripted","service_tier":"default",'
        '"system_fingerprint":"bros-0.1.0-fp32-reference-fp32","choices":['
    )
    rest = '"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
    assert response.content.decode("ascii") == (
        head + '{"index":0,"delta":{"role":"assistant","content":"","refusal":null},' + rest
        + head + '{"index":0,"delta":{"content":"h"},' + rest
        + head + '{"index":0,"delta":{"content":"\\u00e9"},' + rest
        + head + '{"index":0,"delta":{"content":"\\u2028"},' + rest
        + head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null}],"usage":null}\n\n'
        + head + '],"usage":{"prompt_tokens":21,"completion_tokens":7,"total_tokens":28,'
        '"prompt_tokens_details":{"cached_tokens":0}}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


async def test_completion_stream_byte_for_byte(server: Server) -> None:
    server.engine.text = "ab"
    response = await server.complete(stream=True)
    response_id = json.loads(events(response.text)[0])["id"]
    head = (
        f'data: {{"id":"{response_id}","object":"text_completion","created":1700000000,'
        '"model":"scripted","service_tier":"default",'
        '"system_fingerprint":"bros-0.1.0-fp32-reference-fp32","choices":['
    )
    assert response.content.decode("ascii") == (
        head + '{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":0,"text":"b","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":0,"text":"","logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null}]}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": "wor"}, {"max_tokens": 4}])
async def test_stream_says_the_same_as_a_whole_answer(
    server: Server, fields: dict[str, Any]
) -> None:
    whole = (await server.chat(**fields)).json()
    stream = await server.chat(stream=True, stream_options={"include_usage": True}, **fields)
    *body, last = chunks(stream.text)
    assert last["usage"] == whole["usage"]
    for choice in whole["choices"]:
        mine = [
            chunk["choices"][0] for chunk in body if chunk["choices"][0]["index"] == choice["index"]
        ]
        assert mine[0]["delta"]["role"] == "assistant"
        text = "".join(piece["delta"].get("content", "") for piece in mine)
        assert text == choice["message"]["content"]
        assert [piece["finish_reason"] for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]


async def test_streamed_completions_of_several_prompts(server: Server) -> None:
    response = await server.complete(prompt=["a", "b"], n=2, echo=True, stream=True)
    texts = dict.fromkeys(range(4), "")
    for chunk in chunks(response.text):
        choice = chunk["choices"][0]
        texts[choice["index"]] += choice["text"]
    assert texts == {0: "aHello world", 1: "aHello world", 2: "bHello world", 3: "bHello world"}


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_streamed_completion_logprobs_add_up(server: Server, logprobs: int) -> None:
    server.engine.text = "hé!"
    whole = (await server.complete(logprobs=logprobs)).json()["choices"][0]["logprobs"]
    response = await server.complete(logprobs=logprobs, stream=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks(response.text)]
    for name, values in whole.items():
        pieces = [part[name] for part in parts if part is not None]
        if values is None:
            assert pieces == [None] * len(pieces)
        else:
            assert [value for piece in pieces for value in piece] == values


async def test_streamed_chat_logprobs_add_up(server: Server) -> None:
    server.engine.text = "hé!"
    whole = (await server.chat(logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]
    response = await server.chat(logprobs=True, top_logprobs=2, stream=True)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks(response.text)]
    assert [entry for part in parts if part for entry in part["content"]] == whole["content"]


async def test_without_include_usage_there_is_no_usage(server: Server) -> None:
    for chunk in chunks((await server.chat(stream=True)).text):
        assert chunk["choices"]
        assert "usage" not in chunk


async def test_tier_is_in_every_chunk(server: Server) -> None:
    response = await server.chat(stream=True, service_tier="flex")
    assert {chunk["service_tier"] for chunk in chunks(response.text)} == {"flex"}


@pytest.mark.parametrize(
    ("trouble", "code", "message"),
    [
        ("die_after", "engine_unavailable", "The engine died."),
        ("fail_after", "engine_error", "The numbers overflowed."),
    ],
)
async def test_error_on_the_way_is_an_event_and_no_done_follows(
    server: Server, trouble: str, code: str, message: str
) -> None:
    setattr(server.engine, trouble, 2)
    response = await server.chat(stream=True)
    assert response.status_code == 200
    *body, last = [json.loads(item) for item in events(response.text)]
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in body)
    assert text == "He"
    assert last == {
        "error": {"message": message, "type": "server_error", "param": None, "code": code}
    }


async def test_a_grammar_that_cannot_go_on_is_an_event_that_names_the_field(server: Server) -> None:
    server.engine.fail_after, server.engine.to_blame = 2, "response_format"
    response = await server.chat(stream=True)
    error = json.loads(events(response.text)[-1])["error"]
    assert (error["type"], error["param"], error["code"]) == (
        "invalid_request_error",
        "response_format",
        "invalid_grammar",
    )


async def test_death_ends_the_stream_of_several_prompts(server: Server) -> None:
    server.engine.die_after = 2
    response = await server.complete(prompt=["a", "b"], stream=True)
    last = json.loads(events(response.text)[-1])
    assert last["error"]["code"] == "engine_unavailable"


async def test_bug_of_ours_in_a_stream_is_logged_and_not_described(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.die_after, server.engine.death = 2, ZeroDivisionError("secret detail")
    response = await server.chat(stream=True)
    last = json.loads(events(response.text)[-1])
    assert last["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "ZeroDivisionError: secret detail" in caplog.text


async def test_error_before_the_first_token_has_a_status(server: Server) -> None:
    response = await server.chat(stream=True, messages=[{"role": "user", "content": "x" * 600}])
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/json"


class SlowReader:
    """A client whose connection takes one message at a time, each when it is told to."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self._request = [{"type": "http.request", "body": json.dumps(body).encode()}]
        self._server = server
        self._may_take = asyncio.Semaphore(0)
        self.body = b""
        self.messages = 0

    async def call(self) -> None:
        path = "/v1/chat/completions"
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "scheme": "http",
            "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
            "query_string": b"", "headers": [], "server": ("test", 80),
        }  # fmt: skip
        await self._server.app(scope, self._receive, self._send)

    def take(self, messages: int) -> None:
        for _ in range(messages):
            self._may_take.release()

    async def _receive(self) -> dict[str, Any]:
        if self._request:
            return self._request.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def _send(self, message: Any) -> None:
        await self._may_take.acquire()
        self.messages += 1
        self.body += message.get("body", b"")


async def test_a_slow_reader_gets_everything_in_few_messages(server: Server) -> None:
    server.engine.text, server.engine.hold_after = "0123456789" * 20, 200
    user = {"role": "user", "content": "Hi"}
    reader = SlowReader(server, {"messages": [user, user], "stream": True, "n": 2})
    calling = asyncio.ensure_future(reader.call())
    await server.engine.holding.wait()
    reader.take(2)  # the beginning, and the first of the text
    for _ in range(50):
        await asyncio.sleep(0)
    server.engine.go_on.set()
    while len(server.engine.ended) < 2:
        await asyncio.sleep(0)
    assert reader.messages == 2, "the engine does not wait for the client"
    reader.take(100)
    await calling
    assert reader.messages <= 5
    sent = chunks(reader.body.decode())
    for index in range(2):
        own = [c for chunk in sent for c in chunk["choices"] if c["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in own) == "0123456789" * 20
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    assert len(sent) <= 2 * 4, "the role, two texts and the end of each"
    assert server.engine.aborted == []


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"stop": "wor"}, {"max_tokens": 4}, {"logprobs": True}]
)
async def test_a_socket_carries_the_same_stream(live: LiveServer, fields: dict[str, Any]) -> None:
    """Deltas are written to the socket directly there, without ASGI messages."""
    live.server.engine.text = "Hello wörld, hello"
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, **fields}
    async with live.client() as client:
        over_socket = await client.post("/v1/chat/completions", json=body)
    over_asgi = await live.server.chat(**body)
    streams = []
    for response in (over_socket, over_asgi):
        told = [choice for chunk in chunks(response.text) for choice in chunk["choices"]]
        streams.append(sorted(told, key=lambda choice: choice["index"]))
    assert _texts(streams[0]) == _texts(streams[1])
    assert [c["finish_reason"] for c in streams[0] if c["finish_reason"]] == [
        c["finish_reason"] for c in streams[1] if c["finish_reason"]
    ]


def _texts(choices: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for choice in choices:
        texts.setdefault(choice["index"], "")
        texts[choice["index"]] += choice["delta"].get("content") or ""
    return texts


class Flood(Response):
    """Writes chunks directly until the client is too slow for more, and one more with `send`."""

    chunk = bytes(range(256)) * 256

    def __init__(self) -> None:
        self.paused = asyncio.Event()
        self.written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        direct = scope[DIRECT_SEND]
        body = ChunkedBody.behind(direct)
        assert body is not None, "the server's own protocol"
        assert not body.ready(), "nothing has been sent"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while body.ready():
            body.write(self.chunk)
            self.written += 1
        self.paused.set()
        await direct({"type": "http.response.body", "body": b"more", "more_body": True})
        assert body.ready(), "`send` has waited for the client"
        await direct({"type": "http.response.body", "body": b"end", "more_body": False})
        assert not body.ready(), "the response is complete"


async def test_a_client_that_does_not_read_stops_direct_writing(live: LiveServer) -> None:
    flood = Flood()
    live.server.app.router.routes.append(Route("/flood", lambda request: flood))
    async with (
        live.client() as client,
        client.stream("GET", "/flood") as response,
    ):
        await flood.paused.wait()
        received = await response.aread()
    assert received == flood.chunk * flood.written + b"moreend"


async def test_without_the_servers_protocol_there_is_no_direct_body() -> None:
    async def send(message: Any) -> None:
        raise AssertionError

    assert ChunkedBody.behind(send) is None


class HeldConnection:
    """Uvicorn's end of a connection, without a socket; `received` are its bytes. The test says when
    the client reads too slowly."""

    def __init__(self) -> None:
        self.received = b""
        self.flow = FlowControl(self)  # type: ignore[arg-type]
        self._message = asyncio.Event()
        logger = logging.getLogger("test")
        scope: Any = {"type": "http", "method": "POST", "http_version": "1.1"}
        self.cycle = RequestResponseCycle(
            scope, self, self.flow, logger, logger, False, [], self._message, False, True,
            lambda: None,
        )  # type: ignore[arg-type]  # fmt: skip
        self.cycle.more_body = False

    def write(self, data: bytes) -> None:
        self.received += data

    async def do(self, action: str) -> None:
        """Let the client pause or resume reading, or let some turns of the event loop pass."""
        match action:
            case "pause":
                self.flow.pause_writing()
            case "resume":
                self.flow.resume_writing()
            case "turn" | "turns":
                for _ in range(1 if action == "turn" else 10):
                    await asyncio.sleep(0)

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    def body(self) -> str:
        """Raises ValueError if the chunks are not well-formed."""
        data, parts = self.received.partition(b"\r\n\r\n")[2], []
        while True:
            size, _, data = data.partition(b"\r\n")
            length = int(size, 16)
            if data[length : length + 2] != b"\r\n":
                raise ValueError("a chunk has another length than it says")
            if not length:
                return b"".join(parts).decode("ascii")
            parts.append(data[:length])
            data = data[length + 2 :]


STREAM_TOKENIZER = tiny_tokenizer()
WORDS = ("Hello", " w\u00f6rld", "\u2028", '"\\', "\U0001f680", " STOP", "a")


@given(
    words=st.lists(st.tuples(st.integers(0, 1), st.sampled_from(WORDS)), max_size=12),
    actions=st.lists(st.sampled_from(("pause", "resume", "turn", "turns", "")), max_size=60),
    full=st.sets(st.integers(0, 60)),
    stop=st.sampled_from(((), (" STOP",))),
    chat=st.booleans(),
)
def test_any_interleaving_of_tokens_pauses_and_slow_reading_gives_the_same_text(
    words: list[tuple[int, str]],
    actions: list[str],
    full: set[int],
    stop: tuple[str, ...],
    chat: bool,
) -> None:
    """actions: one before each token. full: numbers of the tokens that have a full output."""
    script = [(i, id_) for i, word in words for id_ in STREAM_TOKENIZER.encode(word)]
    expected = ["", ""]
    for index in range(2):
        text = "".join(word for i, word in words if i == index)
        expected[index] = text.partition(stop[0])[0] if stop else text

    async def run() -> str:
        commands: list[Command] = []
        client, connection = MessageClient(commands.append), HeldConnection()
        client.on_reply(Ready(INFO))
        ids, clock = IdGenerator(random.Random(0)), ManualClock()
        generator = TextGenerator(client, STREAM_TOKENIZER, clock, ids)
        sampling = SamplingParams(n=2, stop=stop)
        starting = asyncio.ensure_future(generator.start([[5]], sampling, request_id="r"))
        await asyncio.sleep(0)
        for index in range(2):
            await asyncio.sleep(0)
            client.on_reply(Accepted(f"r-{index}", ServiceClass.RT))
        answer = Answer(await starting, lambda classes: IdleObserver())
        frame = ChunkFrame("kind", {"id": "r"}, include_usage=True)
        writer: ChunkWriter = ChatChunkWriter(frame, STREAM_TOKENIZER, lambda: "call")
        if not chat:
            writer = CompletionChunkWriter(frame, STREAM_TOKENIZER, None, {})
        stream = AnswerStream(answer, writer, StopSignal(), heartbeat_s=60.0)
        scope = {"type": "http"}
        serving = asyncio.ensure_future(stream(scope, connection.receive, connection.cycle.send))
        for number, (index, token_id) in enumerate(script):
            await connection.do(actions[number] if number < len(actions) else "")
            output = RequestOutput(request_id=f"r-{index}", token_ids=(token_id,))
            client.on_reply(Outputs((output,)) if number in full else outputs_of([output]))
        ends = [
            RequestOutput(request_id=f"r-{index}", finish_reason=FinishReason.LENGTH)
            for index in range(2)
        ]
        client.on_reply(outputs_of(ends))
        connection.flow.resume_writing()
        await serving
        return connection.body()

    *told, last = chunks(asyncio.run(run()))
    choices = [choice for chunk in told for choice in chunk["choices"]]
    for index in range(2):
        own = [choice for choice in choices if choice["index"] == index]
        parts = [c["delta"].get("content", "") if chat else c["text"] for c in own]
        assert "".join(parts) == expected[index]
        assert [bool(choice["finish_reason"]) for choice in own] == [False] * (len(own) - 1) + [
            True
        ]
    if not stop:
        assert last["usage"]["completion_tokens"] == len(script)


class OneTurnGeneration:
    """All of its deltas arrive in the same turn of the event loop."""

    service_classes = (ServiceClass.RT,) * 2

    def __init__(self, *deltas: TextDelta) -> None:
        self._deltas = list(deltas)

    async def ready(self) -> list[TextDelta]:
        return self._deltas


class IdleObserver:
    def on_delta(self, delta: TextDelta) -> None: ...

    def on_text(self, index: int, text: str, num_tokens: int) -> None: ...

    def on_error(self, message: str) -> None: ...

    def close(self) -> None: ...


async def test_deltas_that_arrive_with_a_failure_are_returned_before_it_is_raised() -> None:
    text = TextDelta(0, "Hi", (5,), (), None, None, 1, 0)
    failure = TextDelta(1, "", (), (), FinishReason.ERROR, None, 0, 0, error="NaN!")
    generation = OneTurnGeneration(text, failure)
    answer = Answer(generation, lambda classes: IdleObserver())  # type: ignore[arg-type]
    assert list(await answer.deltas()) == [text]
    with pytest.raises(GenerationFailedError, match="NaN!"):
        await answer.deltas()


class CountingObserver(IdleObserver):
    """Counts what it sees."""

    def __init__(self) -> None:
        self.deltas = self.texts = 0

    def on_delta(self, delta: TextDelta) -> None:
        self.deltas += 1

    def on_text(self, index: int, text: str, num_tokens: int) -> None:
        self.texts += num_tokens


async def test_an_answer_that_is_not_streamed_is_collected_without_a_delta_per_token() -> None:
    client = MessageClient(lambda command: None)
    client.on_reply(Ready(INFO))
    generator = TextGenerator(
        client, STREAM_TOKENIZER, ManualClock(), IdGenerator(random.Random(0))
    )
    starting = asyncio.ensure_future(generator.start([[5]], SamplingParams(n=2), request_id="r"))
    await asyncio.sleep(0)
    for index in range(2):
        await asyncio.sleep(0)
        client.on_reply(Accepted(f"r-{index}", ServiceClass.RT))
    observer = CountingObserver()
    collecting = asyncio.ensure_future(Answer(await starting, lambda classes: observer).collect())
    token_ids = [id_ for word in WORDS for id_ in STREAM_TOKENIZER.encode(word)]
    for token_id in token_ids:
        outputs = [RequestOutput(request_id=f"r-{i}", token_ids=(token_id,)) for i in range(2)]
        client.on_reply(outputs_of(outputs))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    ends = [RequestOutput(request_id=f"r-{i}", finish_reason=FinishReason.LENGTH) for i in range(2)]
    client.on_reply(outputs_of(ends))
    choices = await collecting
    assert [choice.text for choice in choices] == ["".join(WORDS)] * 2
    assert [choice.finish_reason for choice in choices] == ["length"] * 2
    assert observer.deltas <= 4  # the first and the last one of each choice
    assert observer.texts >= 2 * (len(token_ids) - 2)
