"""What the client writes is what the server reads, and what the server raises is what it raises."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.errors import (
    AuthenticationError,
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from bros.semantic.client.http_backend import HttpBackend
from bros.semantic.errors import (
    Cause,
    ConflictError,
    FailedStage,
    GetTimeoutError,
    ServerUnreachableError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import (
    CallSpec,
    Criteria,
    Message,
    Parameter,
    Perf,
    Role,
    SubmitProgram,
    to_json,
)
from bros.server.errors import describe
from bros.server.sessions.wire import check_call, read

NAMES = st.from_regex(r"[a-z][a-z_0-9]{0,8}", fullmatch=True)
SECONDS = st.none() | st.integers(1, 10**6).map(lambda ms: ms / 1000)
CRITERIA = st.builds(
    Criteria,
    perf=st.sampled_from(Perf),
    ttft_s=SECONDS,
    tpot_s=SECONDS,
    deadline_s=SECONDS,
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "max_tokens": st.integers(1, 100),
        "seed": st.integers(-9, 9),
        "logit_bias": st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, 99), max_size=2),
    },
)
PARAMETERS = st.builds(
    Parameter,
    name=NAMES,
    role=st.none() | st.sampled_from(Role),
    variable=st.none() | NAMES,
    value=st.none() | st.text(),
    transforms=st.none() | st.just("strip | lower"),
    sampling=st.none() | SAMPLING,
    criteria=st.none() | CRITERIA,
)
MESSAGES = st.builds(
    Message, role=st.sampled_from(["system", "user", "assistant"]), content=st.text()
)
BODIES = st.one_of(
    st.fixed_dictionaries({"template": st.text(), "chat": st.booleans()}),
    st.fixed_dictionaries({"messages": st.lists(MESSAGES, min_size=1, max_size=3)}),
    st.just({"native": True}),
)


@st.composite
def calls(draw: st.DrawFn) -> CallSpec:
    return CallSpec(
        name=draw(NAMES),
        parameters=draw(st.lists(PARAMETERS, max_size=3)),
        sampling=draw(SAMPLING),
        **draw(BODIES),
    )


def backend(answer: Callable[[httpx.Request], httpx.Response]) -> HttpBackend:
    transport = httpx.MockTransport(answer)
    return HttpBackend(httpx.AsyncClient(base_url="http://test/v1/", transport=transport))


@given(program=st.lists(calls(), min_size=1, max_size=3))
async def test_calls_survive_the_wire(program: list[CallSpec]) -> None:
    received: list[CallSpec] = []

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/sessions/sess-1/requests"
        fields = read(SubmitProgram, json.loads(request.content))
        assert fields.key == "key"
        for call in fields.requests:
            check_call(call, "")
        received.extend(fields.requests)
        answers = [{"id": str(i), "variables": {"a": "b"}} for i in range(len(received))]
        return httpx.Response(200, json={"requests": answers})

    submitted = await backend(answer).submit("sess-1", program, "key")
    assert [call.request_id for call in submitted] == [str(i) for i in range(len(program))]
    assert received == program


CAUSE = Cause("req-1", FailedStage.TRANSFORM, "int: 'x' is no number", "var-2", "count")
ERRORS: list[tuple[BrosError, tuple[str, ...]]] = [
    (InvalidRequestError("Wrong.", "requests[0].name", "invalid_value"), ("param", "code")),
    (AuthenticationError("No key."), ()),
    (NotFoundError("No such variable.", "vid", "variable_not_found"), ("param", "code")),
    (ConflictError("It has a value.", "already_set", "value"), ("param", "code")),
    (SessionGoneError("It was deleted."), ()),
    (UpstreamError(CAUSE), ("cause",)),
    (SessionLimitError("Too many sessions."), ()),
    (OverloadedError("Later.", 7.0), ("retry_after_s",)),
    (EngineDeadError("It stopped."), ()),
    (GetTimeoutError("Not yet."), ()),
]


@pytest.mark.parametrize(("error", "fields"), ERRORS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("ask", ["get", "stream"])
async def test_errors_survive_the_wire(error: BrosError, fields: tuple[str, ...], ask: str) -> None:
    described = describe(error)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(described.status, text=described.to_json(), headers=described.headers)

    with pytest.raises(type(error)) as raised:
        await _ask(backend(answer), ask)
    assert type(raised.value) is type(error)
    assert str(raised.value) == str(error)
    for field in fields:
        assert getattr(raised.value, field) == getattr(error, field)


@pytest.mark.parametrize(
    "error", [UpstreamError(CAUSE), SessionGoneError("Gone."), GetTimeoutError("Not yet.")]
)
async def test_errors_in_the_middle_of_a_stream(error: BrosError) -> None:
    body = b': waiting\n\ndata: {"delta": "a"}\n\n' + describe(error).to_event()
    pieces: list[str] = []
    with pytest.raises(type(error), match=str(error)[:5]):
        async for piece in backend(lambda request: httpx.Response(200, content=body)).stream(
            "sess-1", "v", Criteria()
        ):
            pieces.append(piece)
    assert pieces == ["a"]


@given(pieces=st.lists(st.text(min_size=1), max_size=4), data=st.data())
async def test_streams_arrive_however_they_are_cut(pieces: list[str], data: st.DataObject) -> None:
    events = [{"delta": piece} for piece in pieces] + [{"value": "".join(pieces), "state": "ready"}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
    body += b"data: [DONE]\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=5)))
    borders = list(zip([0, *cuts], [*cuts, len(body)], strict=True))

    async def parts() -> Any:
        for begin, end in borders:
            yield body[begin:end]

    stream = backend(lambda request: httpx.Response(200, content=parts())).stream(
        "sess-1", "v", Criteria()
    )
    assert [piece async for piece in stream] == pieces


@pytest.mark.parametrize("ask", ["get", "stream"])
@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(200, text="<html>"),
        httpx.Response(502, text="Bad gateway"),
        httpx.Response(404, json={"detail": "Not Found"}),
    ],
    ids=["page", "gateway", "other server"],
)
async def test_other_servers_are_called_by_name(response: httpx.Response, ask: str) -> None:
    with pytest.raises(ServerUnreachableError, match="http://test"):
        await _ask(backend(lambda request: response), ask)


async def test_a_stream_that_breaks_off_is_no_value() -> None:
    body = b'data: {"delta": "a"}\n\n'
    with pytest.raises(ServerUnreachableError, match="ended the stream in the middle"):
        await _ask(backend(lambda request: httpx.Response(200, content=body)), "stream")


async def _ask(server: HttpBackend, ask: str) -> None:
    if ask == "get":
        await server.get("sess-1", "v", Criteria(), 1.0)
    else:
        async for _ in server.stream("sess-1", "v", Criteria()):
            pass


def test_none_in_a_mapping_is_a_value_that_is_sent() -> None:
    schema = {"properties": {"end": {"const": None}}}
    sampling = {"top_p": None, "structured_outputs": {"json": schema}}
    sent = to_json(SubmitProgram(requests=[CallSpec(sampling=sampling)]), defaults=False)
    assert sent["requests"][0]["sampling"] == sampling
