"""Uploads: forms in any pieces, forms that are broken, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from python_multipart.multipart import MultipartParser
from starlette.requests import Request

from bros.batch.files import Bodies
from bros.batch.objects import StoreFullError
from bros.core.errors import InvalidRequestError
from bros.server.batches import routes as file_routes
from bros.server.batches import routes as uploads
from bros.server.batches.routes import Upload, read_upload
from bros.server.build import set_up_logging
from bros.server.errors import BodyTooLargeError
from support.batch_server import BatchServer, batch_server, until
from support.scripted_server import assert_envelope

BOUNDARY = "xYz"
TYPE = f"multipart/form-data; boundary={BOUNDARY}"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def bodies(tmp_path_factory: pytest.TempPathFactory) -> Bodies:
    return Bodies(tmp_path_factory.mktemp("bodies"))


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    named = f'; filename="{filename}"' if filename is not None else ""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
    return head.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


FILE = part("file", b"text", "rows.jsonl")
PURPOSE = part("purpose", b"batch")


def pieces(data: bytes, cuts: Sequence[int]) -> Iterator[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return (data[begin:end] for begin, end in zip(places, places[1:], strict=False))


async def read(
    bodies: Bodies,
    chunks: Iterator[bytes],
    kind: str = TYPE,
    spend: Callable[[float], None] = lambda cpu_s: None,
) -> tuple[Upload, bytes]:
    """What comes of a request whose body arrives in these chunks."""

    async def receive() -> dict[str, Any]:
        chunk = next(chunks, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    scope = {"type": "http", "headers": [(b"content-type", kind.encode("latin-1"))]}
    with bodies.new() as body:
        upload = await read_upload(Request(scope, receive), body, spend=spend)
        body.finish()
        return upload, body.path.read_bytes()


def read_now(bodies: Bodies, chunks: Iterator[bytes], kind: str = TYPE) -> tuple[Upload, bytes]:
    return asyncio.run(read(bodies, chunks, kind))


# Nothing depends on where the network cuts

_NASTY = st.lists(
    st.sampled_from([b"\r", b"\n", b"-", b"--", BOUNDARY.encode(), b"x", b"\0", b"\xff", b"\r\n--"])
).map(b"".join)


@example(content=b"\r\n--xY", cuts=list(range(200)), file_first=True)
@example(content=b"", cuts=[], file_first=False)
@given(
    content=_NASTY.filter(lambda c: b"--" + BOUNDARY.encode() not in c),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    file_first=st.booleans(),
)
def test_chunks_are_of_no_consequence(
    bodies: Bodies, content: bytes, cuts: list[int], file_first: bool
) -> None:
    parts = [part("file", content, "a.jsonl"), part("purpose", "bätch".encode())]
    data = form(*(parts if file_first else parts[::-1]))
    upload, written = read_now(bodies, pieces(data, cuts))
    assert written == content
    assert upload == Upload({"purpose": "bätch"}, "a.jsonl")


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_any_bytes_are_a_form_or_refused(bodies: Bodies, data: bytes, cuts: list[int]) -> None:
    for content in (data, part("file", data, "a") + data, form(data, FILE, data)):
        try:
            read_now(bodies, pieces(content, cuts))
        except InvalidRequestError as error:
            assert error.code == "invalid_form"


@given(cut=st.integers(0, len(form(PURPOSE, FILE)) - len("--\r\n") - 1))
def test_a_form_that_ends_early_is_refused(bodies: Bodies, cut: int) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_now(bodies, iter([form(PURPOSE, FILE)[:cut]]))
    assert error.value.code == "invalid_form"


# What is sent, and what it is called


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "application/json",
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/mixed; boundary=xYz",
        "text/\xff; \xfe",
    ],
)
def test_other_content_types_are_refused(bodies: Bodies, kind: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_now(bodies, iter([form(FILE)]), kind)
    assert error.value.code == "invalid_content_type"


def test_an_endless_boundary_is_refused(bodies: Bodies) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_now(bodies, iter([b""]), f"multipart/form-data; boundary={'x' * 5000}")
    assert error.value.code == "invalid_form"


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ((FILE, FILE), "file"),
        ((part("file", b"text"),), "file"),
        ((PURPOSE, PURPOSE), "purpose"),
        ((part("purpose", b"x" * 5000),), "purpose"),
        (tuple(part(f"field{i}", b"") for i in range(17)), "field16"),
        ((part("x" * 400, b"x" * 5000),), "x" * 50),
    ],
)
def test_forms_with_too_much_are_refused(
    bodies: Bodies, parts: tuple[bytes, ...], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as error:
        read_now(bodies, iter([form(*parts)]))
    assert (error.value.param, error.value.code) == (param, "invalid_form")


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Disposition: " + b"x" * 10_000,
        b"\r\n".join(b"X-%d: y" % i for i in range(100)),
        b"no header",
        b": empty",
    ],
)
def test_broken_headers_are_refused(bodies: Bodies, head: bytes) -> None:
    data = f"--{BOUNDARY}\r\n".encode() + head + b"\r\n\r\ntext\r\n" + form(FILE)
    with pytest.raises(InvalidRequestError) as error:
        read_now(bodies, iter([data]))
    assert error.value.code == "invalid_form"


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("a b.jsonl", "a b.jsonl"),
        ("", ""),
        ("../../etc/passwd", "../../etc/passwd"),
        ("é漢", "é漢"),
        ("n\0ul", "nul"),
        ("x" * 1000, "x" * 255),
    ],
)
def test_file_names_are_only_names(bodies: Bodies, sent: str, kept: str) -> None:
    upload, content = read_now(bodies, iter([form(part("file", b"text", sent), PURPOSE)]))
    assert (upload.filename, content) == (kept, b"text")


# Limits


def test_the_limit_is_that_of_the_file(bodies: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", 1000)
    _, content = read_now(bodies, iter([form(PURPOSE, part("file", b"x" * 1000, "a"))]))
    assert len(content) == 1000
    with pytest.raises(BodyTooLargeError, match="1000"):
        read_now(bodies, iter([form(PURPOSE, part("file", b"x" * 1001, "a"))]))


def test_what_is_no_file_is_limited_too(bodies: Bodies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", 1000)
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        yield form(PURPOSE, FILE)
        while True:
            taken += 1
            yield b"x" * 1000

    with pytest.raises(BodyTooLargeError):
        read_now(bodies, endless())
    assert taken < 100


def test_the_limits_are_those_of_the_api() -> None:
    """512 MB for a file, 200 MB for the input of a batch"""
    assert uploads.MAX_UPLOAD_BYTES == 512 * 2**20
    assert file_routes.MAX_INPUT_BYTES == 200 * 2**20


async def test_a_large_file_takes_no_more_memory_than_a_small_one(bodies: Bodies) -> None:
    chunk = b"x" * 65_536

    def chunks() -> Iterator[bytes]:
        yield PURPOSE + part("file", b"", "a")[:-2]
        for _ in range(480):  # 30 MiB
            yield chunk
        yield b"\r\n" + form()

    tracemalloc.start()
    try:
        with bodies.new() as body:
            stream = chunks()

            async def receive() -> dict[str, Any]:
                data = next(stream, None)
                return {"type": "http.request", "body": data or b"", "more_body": data is not None}

            scope = {"type": "http", "headers": [(b"content-type", TYPE.encode())]}
            await read_upload(Request(scope, receive), body)
            _, peak = tracemalloc.get_traced_memory()
            assert body.num_bytes == 480 * len(chunk)
    finally:
        tracemalloc.stop()
    assert peak < 6 * 2**20


# Over real HTTP


async def test_missing_parts(server: BatchServer) -> None:
    for sent, param in ((FILE, "purpose"), (PURPOSE, "file"), (b"", "purpose")):
        reply = await server.http.post(
            "/v1/files", content=form(sent), headers={"content-type": TYPE}
        )
        error = assert_envelope(reply, 400)
        assert (error["param"], error["code"]) == (param, "missing_required_parameter")
    assert not server.bodies() and not server.unplaced()


async def test_json_instead_of_a_form(server: BatchServer) -> None:
    reply = await server.http.post("/v1/files", json={"purpose": "batch", "file": "text"})
    assert assert_envelope(reply, 400)["code"] == "invalid_content_type"


async def test_a_large_file_arrives_whole(server: BatchServer) -> None:
    content = b"".join(b"%d\n" % i for i in range(1_000_000))
    file = await server.upload(content, purpose="user_data")
    assert file.bytes == len(content)
    assert (await server.client.files.content(file.id)).content == content
    assert not server.unplaced()


async def test_input_of_a_batch_has_a_limit_of_its_own(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch input: at most 200 MB"""
    monkeypatch.setattr(file_routes, "MAX_INPUT_BYTES", 1000)
    assert (await server.upload(b"x" * 1000)).bytes == 1000
    assert (await server.upload(b"x" * 1001, purpose="evals")).bytes == 1001
    with pytest.raises(openai.BadRequestError) as error:
        await server.upload(b"y" * 1001)
    assert (error.value.param, error.value.code) == ("file", "file_too_large")
    assert len(server.bodies()) == 2 and not server.unplaced()


async def test_a_file_beyond_the_limit_is_413(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client reads the answer although it has not sent everything when it comes"""
    monkeypatch.setattr(uploads, "MAX_UPLOAD_BYTES", 2**16)
    for _ in range(3):
        with pytest.raises(openai.APIStatusError) as error:
            await server.upload(b"x" * 2**24)
        assert (error.value.status_code, error.value.code) == (413, "request_too_large")
    assert not server.bodies() and not server.unplaced()


async def test_a_client_that_leaves_leaves_nothing_behind(server: BatchServer) -> None:
    async def content() -> AsyncIterator[bytes]:
        yield PURPOSE + part("file", b"", "a")[:-2] + b"x" * 2**22
        await until(lambda: bool(server.unplaced()))
        raise ConnectionError("the client falls over")

    with pytest.raises(ConnectionError):
        await server.http.post("/v1/files", content=content(), headers={"content-type": TYPE})
    await until(lambda: not server.unplaced())
    assert not server.bodies()
    assert [file async for file in server.client.files.list()] == []


async def test_a_full_disk_is_507_and_nothing_is_kept(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the content comes, and when it is done"""

    def full(*_: object) -> None:
        raise StoreFullError("there is no room on the disk of --data-dir")

    for work in ("write", "finish"):
        with monkeypatch.context() as patch:
            patch.setattr(f"bros.batch.files.BodyWriter.{work}", full)
            reply = await server.http.post(
                "/v1/files", content=form(PURPOSE, FILE), headers={"content-type": TYPE}
            )
        error = assert_envelope(reply, 507)
        assert (error["type"], error["code"]) == ("server_error", "insufficient_storage")
        assert reply.headers["retry-after"] == "60"
    assert not server.bodies() and not server.unplaced()
    assert [file async for file in server.client.files.list()] == []


async def test_many_uploads_at_once(server: BatchServer) -> None:
    contents = [b"%d" % i * 1000 for i in range(1, 21)]
    made = await asyncio.gather(*(server.upload(content) for content in contents))
    assert len({file.id for file in made}) == 20
    for file, content in zip(made, contents, strict=True):
        assert (await server.client.files.content(file.id)).content == content


async def test_a_form_of_another_client(server: BatchServer) -> None:
    """Quoted boundaries, headers in any case, a preamble as curl and others write them"""
    boundary = "----Form Boundary'1"
    lines = (
        f"--{boundary}",
        "content-type: text/plain",
        "CONTENT-DISPOSITION: form-data; name=purpose",
        "",
        "batch",
        f"--{boundary}",
        'Content-Disposition: form-data; name="file"; filename="a \\"b\\".jsonl"',
        "Content-Type: application/json",
        "",
        "text",
        f"--{boundary}--",
        "",
    )
    reply: httpx.Response = await server.http.post(
        "/v1/files",
        content="\r\n".join(lines).encode(),
        headers={"content-type": f'Multipart/Form-Data; boundary="{boundary}"; charset=utf-8'},
    )
    assert reply.status_code == 200, reply.text
    assert json.loads(reply.text)["filename"] == 'a "b".jsonl'
    assert reply.json()["bytes"] == 4


async def test_a_form_of_near_boundaries_is_parsed_in_turns(
    bodies: Bodies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes as long to parse as a hundred bytes of a usual file."""
    parsed: list[int] = []
    write = uploads.MultipartParser.write

    def noted(parser: MultipartParser, data: bytes) -> int:
        parsed.append(len(data))
        return write(parser, data)

    monkeypatch.setattr(uploads.MultipartParser, "write", noted)
    turns, spent = 0, list[float]()

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    content = f"\r\n--{BOUNDARY}-".encode() * 30_000
    chunks = iter([form(part("file", content, "f"), PURPOSE)])
    counting = asyncio.create_task(count_turns())
    upload, written = await read(bodies, chunks, spend=spent.append)
    counting.cancel()
    assert written == content and upload.fields == {"purpose": "batch"}
    assert max(parsed) <= 2**14 and turns >= len(parsed) == len(spent)
    assert sum(spent) > 0


def test_malformed_forms_are_not_logged(caplog: pytest.LogCaptureFixture, bodies: Bodies) -> None:
    """Clients could fill a disk with such lines."""
    with caplog.at_level(logging.WARNING, logger="python_multipart"):  # restores the level
        set_up_logging("info")
        with pytest.raises(InvalidRequestError, match="malformed"):
            read_now(bodies, iter([b"no form"]))
    assert not caplog.records
