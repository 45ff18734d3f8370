"""Every route of /openapi.json is attacked with bodies, paths, queries and headers made from its
own schema, half of them valid and half with a mutation. A new route is attacked without being
listed here.

Whatever comes, the answer is one that the document describes, nothing is left of it afterwards (no
task, session, row or descriptor, nothing that counts to a tenant), and the event loop was never
held for 50 ms, neither by CPU time nor by wall time without waits for a core (see MeasuredLoop). A
long turn is tried again with all that came before it: one that the server causes comes each time,
one that its host causes does not, and is rare. In the long tier the same attacks are repeated, and
the repetitions leave no more objects than MOST_LEFT per attack.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bros.batch.rows import ENDPOINTS
from bros.server.operations.openapi import ApiRoute
from support.loops import HastyLoop
from support.processes import open_files
from support.schema_values import WRONG, Draw, SchemaValues, json_bodies, mostly
from support.tier import by_tier, examples
from support.whole_server import LIVE, ROWS, WholeServer, running_whole_server

EXAMPLES = examples(16, long=2000)
LONGEST_ANSWER_S = 3600.0
"""On the clock of HastyLoop; clients may wait up to MAX_WAIT_S for a value."""
SKIP_S = 30.0
"""Of HastyLoop."""
TRIES = 3
"""Of an attack in which a turn of the loop was long."""
MOST_AGAIN = 3 + EXAMPLES // 50
"""Attacks of a route that may be tried again: a long turn that comes now and then, because its
cause is not repeated, must not pass as the host's."""
REFRESH_EVERY = 50
"""Examples between two clean-ups: sessions and batches of many attacks meet each other."""

REPEATED = by_tier(fast=0, long=200)
"""Attacks that are repeated: the first time warms caches up, two more leave little."""
MOST_LEFT = 20.0
"""Objects of Python's garbage collector that one attack may leave on average, in bounded memories
such as traces, and in timers of the loop. The most that was measured is 12, by /v1/score."""

WORDS = (
    *(
        "",
        "x",
        "o",
        "y",
        "v",
        "scripted",
        "latency",
        "strip",
        "json",
        'join(", ")',
        "user",
        "batch",
    ),
    *("Say {{output:o}}", "{{input:x}} and {{output:o}}", "/v1/completions", "24h", "created_at"),
    *(f"@{name}" for name in LIVE),
)
TEMPLATES = ("Say {{output:o}}", "{{input:x}} and {{output:o}}", "Say {{output:o}} {{output:y}}")
NAMED: Mapping[str, tuple[Any, ...]] = {
    "input_file_id": ("@file",),
    "previous_response_id": ("@response",),
    "role": ("user", "assistant"),
    "endpoint": ("/v1/completions",),
    "completion_window": ("24h",),
    "template": TEMPLATES,
    "prompt": TEMPLATES,
    "model": ("scripted",),
    "text_1": ("a river",),
    "text_2": ("the loire", ["the loire", "a cat"]),
    "documents": (["the loire", "a cat"], [{"text": "a cat"}]),
    "session_id": ("@sid",),
    "semantic_var_id": ("@ready", "@vid", "new"),
    "variable": ("@ready", "@vid", "new"),
    "transforms": ("", "strip"),
    "parameters": ([], [{"name": "x", "value": "text"}]),
    "placeholders": (
        [{"name": "o", "in_out": True, "semantic_var_id": "new", "transforms": "strip"}],
    ),
}
"""Fields of bodies that only few values are good for."""
JUNK = ("", "0", "-1", "9" * 30, "a/b", "..", "%00", "\n", "é", "x" * 3000, "true", "NaN", "[]")

ALLOWED_5XX = {504: {"get_timeout"}}
"""The engine and the store are well, so that no other failure is the server's."""


# ---- What is sent.


@dataclasses.dataclass(frozen=True)
class Attack:
    """path, query, headers, content: with @names, see LIVE."""

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    content: bytes | None

    async def send(self, method: str, server: WholeServer) -> httpx.Response:
        def alive(text: str) -> str:
            for name, value in server.live.items():
                text = text.replace(f"@{name}", value)
            return text

        content = self.content
        if content is not None:
            for name, value in server.live.items():
                content = content.replace(f"@{name}".encode(), value.encode())
        query = "&".join(
            f"{quote(name)}={quote(alive(value))}" for name, value in self.query.items()
        )
        path = alive(self.path)
        headers = {name: alive(value).encode() for name, value in self.headers.items()}
        async with asyncio.timeout(LONGEST_ANSWER_S):
            return await server.http.request(
                method, f"{path}?{query}" if query else path, headers=headers, content=content
            )


def make_attacks(document: Mapping[str, Any], route: ApiRoute) -> SearchStrategy[Attack]:
    operation = document["paths"][route.path_format][route.method]
    values = SchemaValues(document, WORDS, NAMED)
    parameters: dict[str, dict[str, SearchStrategy[str]]] = {"path": {}, "query": {}, "header": {}}
    for each in operation.get("parameters", ()):
        texts = _ids(route, each["name"]) if each["in"] == "path" else _texts(values, each)
        parameters[each["in"]][each["name"]] = texts
    bodies: SearchStrategy[tuple[str, bytes] | None] = st.none()
    for kind, content in operation.get("requestBody", {}).get("content", {}).items():
        valid = values.of(content["schema"])
        bodies = {"application/json": _json, "multipart/form-data": _forms}[kind](valid)

    @st.composite
    def draw_attack(draw: Draw) -> Attack:
        path = route.path_format
        for name, texts in parameters["path"].items():
            # Clients resolve `.` and `..`, and would ask another route.
            value = quote(draw(texts), safe="@").replace(".", "%2E")
            path = path.replace(f"{{{name}}}", value)
        body = draw(bodies)
        headers = draw(_some(parameters["header"]))
        if body is not None:
            headers["content-type"] = body[0]
        query = draw(_some(parameters["query"]))
        return Attack(path, query, headers, None if body is None else body[1])

    return draw_attack()


def _ids(route: ApiRoute, name: str) -> SearchStrategy[str]:
    """Mostly what exists. `id` is that of what the path is about."""
    about = [each for each in LIVE if each == name] or [e for e in LIVE if e in route.path_format]
    live = st.just(f"@{about[0]}" if about else "@number")
    return mostly(live, st.sampled_from([f"@{each}" for each in LIVE]), _junk())


def _texts(values: SchemaValues, parameter: Mapping[str, Any]) -> SearchStrategy[str]:
    """Mostly what is valid."""
    valid = values.of(parameter["schema"]).map(_written)
    if parameter["in"] == "header":
        valid = valid.filter(lambda text: text.isprintable() and text.isascii())
        return mostly(valid, st.sampled_from([each for each in JUNK if each.isprintable()]))
    return mostly(valid, _junk())


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _junk() -> SearchStrategy[str]:
    return st.one_of(st.sampled_from(JUNK), st.text(st.characters(codec="utf-8"), max_size=5))


@st.composite
def _some(draw: Draw, found: Mapping[str, SearchStrategy[str]]) -> dict[str, str]:
    """Values of a few of the parameters."""
    names = draw(st.lists(st.sampled_from(sorted(found) or [""]), max_size=3, unique=True))
    return {name: draw(found[name]) for name in names if name in found}


def _json(valid: SearchStrategy[Any]) -> SearchStrategy[tuple[str, bytes]]:
    kinds = mostly(st.just("application/json"), st.just("text/plain"))
    return st.tuples(kinds, json_bodies(valid))


@st.composite
def _forms(draw: Draw, valid: SearchStrategy[dict[str, Any]]) -> tuple[str, bytes]:
    fields = draw(valid)
    rows = [ROWS % 1, ROWS % 1 + ROWS % 2, b"", b"{", b"\xff\n", b"x" * 3000]
    fields["file"] = draw(st.sampled_from(rows))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        del fields[draw(st.sampled_from(sorted(fields)))]
    elif kind == 1:
        fields[draw(st.sampled_from([*fields, "extra"]))] = draw(st.sampled_from(WRONG))
    content = b""
    for name, value in fields.items():
        data = value if isinstance(value, bytes) else _written(value).encode(errors="replace")
        file = b'; filename="rows.jsonl"' if name == "file" and kind != 2 else b""
        head = b'--b\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n'
        content += head % (name.encode(), file) + data + b"\r\n"
    content += b"--b--\r\n"
    end = draw(st.integers(0, len(content))) if kind == 3 else len(content)
    return "multipart/form-data; boundary=b", content[:end]


# ---- What must come back.


class Answers:
    """Checks the responses of a route against the document."""

    def __init__(self, document: Mapping[str, Any], route: ApiRoute) -> None:
        self._responses = document["paths"][route.path_format][route.method]["responses"]
        self._components = {"components": document["components"]}
        self._validators: dict[str, jsonschema.protocols.Validator] = {}

    def check(self, response: httpx.Response) -> None:
        status = response.status_code
        described = self._responses.get(str(status), self._responses["default"])
        kind = response.headers.get("content-type", "").partition(";")[0]
        assert kind in described["content"], (status, kind)
        if kind == "text/event-stream":
            assert response.text.endswith("\n\n")
        elif kind == "application/json":
            schema = described["content"][kind]["schema"]
            name = json.dumps(schema)
            if name not in self._validators:
                made = jsonschema.Draft202012Validator({**schema, **self._components})
                self._validators[name] = made
            self._validators[name].validate(response.json())
        if status >= 400:
            error = response.json()["error"]
            assert error.keys() >= {"message", "type", "param", "code"}
            assert error["message"]
            code = error["code"]
            assert status < 500 or code in ALLOWED_5XX.get(status, ()), error
        else:
            assert status == 200


# ---- Sending them.


class Attacker:
    """Sends attacks to a route, one after the other; all answers are checked.

    statuses: number of answers by status. refusals: those by the beginning of an error's message.
    again: how many attacks were tried again, because a turn of the loop was long.
    """

    def __init__(
        self,
        runner: asyncio.Runner,
        server: WholeServer,
        document: Mapping[str, Any],
        route: ApiRoute,
    ) -> None:
        loop = runner.get_loop()
        assert isinstance(loop, HastyLoop)
        self.statuses: Counter[int] = Counter()
        self.refusals: Counter[str] = Counter()
        self.again = 0
        self._runner = runner
        self._loop = loop
        self._server = server
        self._route = route
        self._answers = Answers(document, route)
        self._since: list[Attack] = []  # since the last refresh
        self._consumed = True

    def attack(self, attack: Attack) -> None:
        if self._consumed or len(self._since) == REFRESH_EVERY:
            self._refresh()
            self._since.clear()
        self._since.append(attack)
        self._measure(attack)
        if self._loop.is_quick:
            return
        self.again += 1
        for _ in range(TRIES - 1):
            self._server.live.clear()  # the attack may have deleted what it was about
            self._refresh()
            for before in self._since[:-1]:
                self._send(before)
            self._measure(attack)
            if self._loop.is_quick:
                return
        self._loop.check_turns()

    def clear(self) -> None:
        self._runner.run(self._server.clear())

    def _refresh(self) -> None:
        self.clear()
        self._runner.run(self._server.populate())

    def _measure(self, attack: Attack) -> None:
        with self._loop.measuring():
            response = self._send(attack)
        self._answers.check(response)
        self.statuses[response.status_code] += 1
        if response.status_code >= 400:
            self.refusals[response.json()["error"]["message"][:80]] += 1
        self._consumed = self._route.method == "delete" and response.status_code == 200
        self._consumed |= self._route.path_format.endswith("/cancel")  # it would end by itself
        if self._consumed:
            self._server.live.clear()

    def _send(self, attack: Attack) -> httpx.Response:
        return self._runner.run(attack.send(self._route.method.upper(), self._server))


# ---- The attacks.


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=lambda: HastyLoop(SKIP_S)) as made:
        yield made


@pytest.fixture(scope="module")
def server(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeServer]:
    with running_whole_server(runner, tmp_path_factory.mktemp("store")) as made:
        yield made


@pytest.fixture(scope="module")
def document(runner: asyncio.Runner, server: WholeServer) -> Any:
    return runner.run(server.ask("GET", "/openapi.json"))


def all_routes() -> list[ApiRoute]:
    """As the app has them."""
    import tempfile

    async def find() -> list[ApiRoute]:
        with tempfile.TemporaryDirectory() as folder:
            server = WholeServer(Path(folder))
            server.store.close()
            await server.router.close()
        found = server.app.routes
        assert all(isinstance(route, ApiRoute) for route in found)
        return found  # type: ignore[return-value]

    return asyncio.run(find())


ROUTES = all_routes()


@pytest.mark.timeout(by_tier(fast=300, long=3600))
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.path_format}")
def test_a_route_is_attacked(
    runner: asyncio.Runner,
    server: WholeServer,
    document: Mapping[str, Any],
    route: ApiRoute,
    caplog: pytest.LogCaptureFixture,
) -> None:
    attacker = Attacker(runner, server, document, route)
    tasks, descriptors = runner.run(server.idle(0)), _descriptors()

    @settings(max_examples=EXAMPLES)
    @given(make_attacks(document, route))
    def attack(attack: Attack) -> None:
        attacker.attack(attack)

    with caplog.at_level(logging.ERROR, logger="bros"):
        try:
            attack()
            left = _left_by_repeating(document, route, runner, server)
        finally:
            attacker.clear()
            server.live.clear()  # an attack may have deleted what later ones are about
    assert caplog.records == []
    assert left <= MOST_LEFT, f"each attack leaves {left:.1f} objects"
    assert attacker.statuses[200], (
        f"no attack was good enough to be served: {attacker.statuses}, {attacker.refusals}"
    )
    assert attacker.again <= MOST_AGAIN, f"{attacker.again} attacks had a long turn at first"
    assert runner.run(server.idle(tasks)) <= tasks, "tasks are left"
    assert server.state.sessions is not None and server.state.jobs is not None
    assert server.state.sessions.figures().sessions == 0
    assert server.state.jobs.runner.rows_in_flight == 0
    assert server.accounts.held == {}
    assert not _left_open(descriptors), "descriptors are left"


def test_a_turn_that_is_long_only_after_other_attacks_is_found(
    runner: asyncio.Runner,
    server: WholeServer,
    document: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent, populate = 0, server.populate

    class HeavyTogether(Attack):
        async def send(self, method: str, server: WholeServer) -> httpx.Response:
            nonlocal sent
            sent += 1
            if sent == 3:
                time.sleep(0.5)
            return await super().send(method, server)

    async def populate_anew() -> None:
        nonlocal sent
        sent = 0
        await populate()

    monkeypatch.setattr(server, "populate", populate_anew)
    (route,) = (route for route in ROUTES if route.path_format == "/version")
    attacker, attack = (
        Attacker(runner, server, document, route),
        HeavyTogether("/version", {}, {}, None),
    )
    attacker.attack(attack)
    attacker.attack(attack)
    with pytest.raises(AssertionError):
        attacker.attack(attack)
    assert attacker.statuses == {200: 2 + TRIES}
    attacker.clear()


def _left_open(before: Counter[str]) -> Counter[str]:
    """What is open now and was not before, also once the threads that search the folders of the
    store for unused files have had time to close these."""
    for _ in range(1000):
        if not (left := _descriptors() - before):
            break
        time.sleep(0.001)
    return left


def _descriptors() -> Counter[str]:
    """What this process has open, but for the database: it has a connection for each thread that
    has asked it."""
    found = open_files(os.getpid()).items()
    return Counter({name: count for name, count in found if "jobs.db" not in name})


def _left_by_repeating(
    document: Mapping[str, Any], route: ApiRoute, runner: asyncio.Runner, server: WholeServer
) -> float:
    """Mean number of objects that each attack leaves when all of them are repeated."""
    attacks: list[Attack] = []
    if REPEATED:

        @settings(max_examples=REPEATED)
        @given(make_attacks(document, route))
        def collect(attack: Attack) -> None:
            attacks.append(attack)

        collect()
    counts: list[int] = []
    for _ in range(3 if attacks else 0):
        for number, attack in enumerate(attacks):
            if number % REFRESH_EVERY == 0:
                runner.run(server.clear())
                runner.run(server.populate())
            runner.run(attack.send(route.method.upper(), server))
        runner.run(server.clear())
        gc.collect()
        counts.append(len(gc.get_objects()))
    return (counts[-1] - counts[0]) / (2 * len(attacks)) if attacks else 0.0


ROWS_OF_A_BATCH = 10

_CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
PLAIN: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": _CHAT,
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
}
"""A body that each endpoint accepts in a batch."""


@st.composite
def rows_of(draw: Draw, values: SearchStrategy[Any], endpoint: str) -> bytes:
    """The lines of a batch, whose bodies are valid for the endpoint; one may have a mutation."""
    frame = json.dumps({"custom_id": "@n", "method": "POST", "url": endpoint, "body": "@body"})
    bodies = draw(st.lists(values.map(json.dumps).map(str.encode), max_size=ROWS_OF_A_BATCH))
    bodies += draw(st.lists(json_bodies(values), min_size=not bodies, max_size=1))
    lines = []
    for number, body in enumerate(bodies):
        line = frame.replace("@n", f"{number}").encode()
        lines.append(line.replace(b'"@body"', re.sub(rb"[\r\n]", b" ", body) or b"null"))
    return b"\n".join(lines)


@pytest.mark.timeout(by_tier(fast=300, long=3600))
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_rows_of_batches_are_attacked(
    runner: asyncio.Runner,
    server: WholeServer,
    document: Mapping[str, Any],
    endpoint: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each valid file becomes a batch, in which each row has one outcome that the route of its
    endpoint describes."""
    values = SchemaValues(document, WORDS, NAMED)
    operation = document["paths"][endpoint]["post"]
    bodies = values.of(operation["requestBody"]["content"]["application/json"]["schema"])
    allowed = {int(status) for status in operation["responses"] if status.isdigit()}
    ended: Counter[str] = Counter()

    async def run(content: bytes) -> None:
        files = {"file": ("rows.jsonl", content)}
        file = await server.ask("POST", "/v1/files", files=files, data={"purpose": "batch"})
        wanted = {"endpoint": endpoint, "completion_window": "24h", "input_file_id": file["id"]}
        path = f"/v1/batches/{(await server.ask('POST', '/v1/batches', json=wanted))['id']}"
        while (batch := await server.ask("GET", path))["status"] not in FINAL:
            await asyncio.sleep(0.001)
        ended[batch["status"]] += 1
        if batch["status"] == "failed":  # the file is none
            assert batch["errors"]["data"]
            return
        found: Counter[str] = Counter()
        for kind in ("output_file_id", "error_file_id"):
            if batch[kind] is not None:
                response = await server.http.get(f"/v1/files/{batch[kind]}/content")
                for line in response.text.splitlines():
                    row = json.loads(line)
                    found[row["custom_id"]] += 1
                    status = row["response"]["status_code"]
                    assert status < 500 and (status == 200 or status in allowed | {400}), row
        assert found == Counter(str(number) for number in range(content.count(b"\n") + 1))

    # One file that becomes a batch in any case: six random ones may all have a row that is refused.
    plain = {"custom_id": "0", "method": "POST", "url": endpoint, "body": PLAIN[endpoint]}

    @settings(max_examples=examples(6, long=200))
    @example(json.dumps(plain).encode())
    @given(rows_of(bodies, endpoint))
    def attack(content: bytes) -> None:
        runner.run(run(content))

    with caplog.at_level(logging.ERROR, logger="bros"):
        attack()
    assert caplog.records == []
    assert ended["completed"], ended
    assert server.accounts.held == {}


FINAL = ("completed", "failed", "expired", "cancelled")


def test_every_operation_of_the_document_is_attacked(document: Mapping[str, Any]) -> None:
    described = {(method, path) for path, each in document["paths"].items() for method in each}
    assert described == {(route.method, route.path_format) for route in ROUTES}
