"""/v1/files: what the API promises of files, asked for by OpenAI's own client."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest

from bros.batch.objects import DAY_S
from support.batch_server import NOW, BatchServer, batch_server, jsonl, row
from support.scripted_server import Server, assert_envelope

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


# POST /v1/files


async def test_any_known_purpose_is_taken(server: BatchServer) -> None:
    """multipart `file`, `purpose` in {assistants, batch, fine-tune, vision, user_data, evals}"""
    for purpose in PURPOSES:
        assert (await server.upload(b"text", purpose=purpose)).purpose == purpose


async def test_other_purposes_are_refused(server: BatchServer) -> None:
    """batch_output is for results only"""
    for purpose in ("batch_output", "Batch", ""):
        with pytest.raises(openai.BadRequestError) as error:
            await server.upload(b"text", purpose=purpose)
        assert (error.value.param, error.value.code) == ("purpose", "invalid_value")
    assert not server.bodies() and not server.unplaced()


async def test_batch_files_expire_after_30_days(server: BatchServer) -> None:
    """purpose=batch files expire after 30 days by default; others do not"""
    assert (await server.upload(b"text")).expires_at == NOW + 30 * DAY_S
    assert (await server.upload(b"text", purpose="evals")).expires_at is None


async def test_expires_after(server: BatchServer) -> None:
    """Optional expires_after {anchor=created_at, seconds 3600..2592000}"""
    for seconds, purpose in itertools.product((3600, 2_592_000), ("batch", "evals")):
        anchor = {"anchor": "created_at", "seconds": seconds}
        file = await server.upload(b"text", purpose=purpose, expires_after=anchor)
        assert file.expires_at == NOW + seconds


WRONG_EXPIRY = [
    ({"anchor": "created_at", "seconds": 3599}, "expires_after.seconds"),
    ({"anchor": "created_at", "seconds": 2_592_001}, "expires_after.seconds"),
    ({"anchor": "created_at", "seconds": "soon"}, "expires_after.seconds"),
    ({"anchor": "created_at"}, "expires_after.seconds"),
    ({"anchor": "last_used_at", "seconds": 3600}, "expires_after.anchor"),
    ({"seconds": 3600}, "expires_after.anchor"),
]


async def test_other_times_of_expiry_are_refused(server: BatchServer) -> None:
    """expires_after has both fields, within their limits"""
    for expires_after, param in WRONG_EXPIRY:
        with pytest.raises(openai.BadRequestError) as error:
            await server.upload(b"text", expires_after=expires_after)
        assert error.value.param == param
    assert not server.bodies()


async def test_expired_files_are_gone(server: BatchServer) -> None:
    """Nothing finds a file after expires_at"""
    soon = {"anchor": "created_at", "seconds": 3600}
    file = await server.upload(jsonl(row(1)), expires_after=soon)
    server.clock.advance(3599)
    assert (await server.client.files.retrieve(file.id)).id == file.id
    server.clock.advance(1)
    for ask in (
        server.client.files.retrieve(file.id),
        server.client.files.content(file.id),
        server.client.files.delete(file.id),
        server.create(file.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    assert [found async for found in server.client.files.list()] == []


# The file object


async def test_file_object(server: BatchServer) -> None:
    """id, object, bytes, created_at, filename, purpose, status, expires_at, status_details"""
    sent = {"file": ("été.jsonl", b"12345"), "purpose": (None, "batch")}
    reply = (await server.http.post("/v1/files", files=sent)).json()
    assert reply.pop("id").startswith("file-")
    assert reply == {
        "object": "file",
        "bytes": 5,
        "created_at": NOW,
        "expires_at": NOW + 30 * DAY_S,
        "filename": "été.jsonl",
        "purpose": "batch",
        "status": "processed",
        "status_details": None,
    }


async def test_clients_that_wait_for_processing_need_not(server: BatchServer) -> None:
    """status is one of uploaded, processed, error: a file is processed at once"""
    file = await server.upload(b"text")
    waited = await server.client.files.wait_for_processing(file.id)
    assert waited == file


# GET /v1/files


async def test_list_has_all_five_keys(server: BatchServer) -> None:
    """{object:"list", data, first_id, last_id, has_more}, all five required"""
    empty = (await server.http.get("/v1/files")).json()
    assert empty == {
        "object": "list",
        "data": [],
        "first_id": None,
        "last_id": None,
        "has_more": False,
    }
    made = [await server.upload(b"text") for _ in range(3)]
    full = (await server.http.get("/v1/files", params={"limit": 2})).json()
    assert [file["id"] for file in full["data"]] == [made[2].id, made[1].id]
    assert (full["first_id"], full["last_id"]) == (made[2].id, made[1].id)
    assert full["has_more"] is True


async def test_pages_go_through_everything_once(server: BatchServer) -> None:
    """limit, after; order asc/desc, desc by default: the newest first"""
    made = [(await server.upload(b"%d" % i)).id for i in range(5)]
    for limit in (1, 2, 3, 5, 10_000):
        for wanted in ({}, {"order": "desc"}, {"order": "asc"}):
            listed = [file.id async for file in server.client.files.list(limit=limit, **wanted)]
            assert listed == (made if wanted == {"order": "asc"} else made[::-1])


async def test_pages_stay_in_place_while_files_come_and_go(server: BatchServer) -> None:
    """after names where the last page ended, not how many there were"""
    made = [(await server.upload(b"text")).id for _ in range(4)]
    first = await server.client.files.list(limit=2)
    await server.upload(b"text")
    await server.client.files.delete(made[3])
    second = await first.get_next_page()
    assert [file.id for file in second.data] == [made[1], made[0]]


async def test_list_by_purpose(server: BatchServer) -> None:
    """purpose: only files with it"""
    batch = await server.upload(b"text")
    await server.upload(b"text", purpose="evals")
    assert [file.id async for file in server.client.files.list(purpose="batch")] == [batch.id]
    assert [file async for file in server.client.files.list(purpose="vision")] == []
    strange = await server.http.get("/v1/files?purpose=%00")
    assert strange.status_code == 200 and strange.json()["data"] == []


async def test_wrong_queries_are_refused(server: BatchServer) -> None:
    """limit 1..10000, order asc or desc"""
    limits = ("limit=0", "limit=10001", "limit=ten", "limit=", "limit=-1")
    for query in (*limits, "order=up", "order="):
        error = assert_envelope(await server.http.get(f"/v1/files?{query}"), 400)
        assert error["type"] == "invalid_request_error"
        assert (error["param"], error["code"]) == (query.split("=")[0], "invalid_value")


async def test_unknown_places_to_begin_are_not_found(server: BatchServer) -> None:
    """after: the id of a file"""
    for after in ("file-unknown", "", "%00", "%F0%9F%98%80"):
        error = assert_envelope(await server.http.get(f"/v1/files?after={after}"), 404)
        assert error["param"] == "after"


# GET /v1/files/{id}, GET /v1/files/{id}/content, DELETE /v1/files/{id}


async def test_retrieve(server: BatchServer) -> None:
    """GET /v1/files/{id}: the object that the upload returned"""
    file = await server.upload(b"text", expires_after={"anchor": "created_at", "seconds": 3600})
    assert await server.client.files.retrieve(file.id) == file


async def test_content_is_what_was_sent(server: BatchServer) -> None:
    """GET /v1/files/{id}/content returns the raw body"""
    for content in (b"", b"\0\xff\r\n\n", b"line\n" * 50_000):
        file = await server.upload(content, purpose="user_data")
        assert file.bytes == len(content)
        reply = await server.client.files.content(file.id)
        assert reply.content == content
        assert reply.response.headers["content-type"] == "application/octet-stream"


async def test_content_in_parts(server: BatchServer) -> None:
    """A client that was disconnected can go on from where it was"""
    file = await server.upload(b"0123456789")
    path = f"/v1/files/{file.id}/content"
    part = await server.http.get(path, headers={"range": "bytes=4-6"})
    assert (part.status_code, part.content) == (206, b"456")
    part = await server.http.get(path, headers={"range": "Bytes= 4-6"})
    assert (part.status_code, part.content) == (206, b"456")
    # RFC 9110, 14.2. The last takes a regular expression with nested repetitions for ever.
    commas = "bytes=" + ", " * 400 + "x"
    for malformed in ("bytes=abc", "bytes=5-2", "lines=1-2", "bytes=", "bytes=,", commas):
        whole = await server.http.get(path, headers={"range": malformed})
        assert (whole.status_code, whole.content) == (200, b"0123456789")


async def test_delete(server: BatchServer) -> None:
    """DELETE -> {id, object:"file", deleted:true}"""
    file, other = await server.upload(b"same"), await server.upload(b"same")
    reply = await server.http.delete(f"/v1/files/{file.id}")
    assert reply.json() == {"id": file.id, "object": "file", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        await server.client.files.retrieve(file.id)
    assert [found.id async for found in server.client.files.list()] == [other.id]
    assert (await server.client.files.content(other.id)).content == b"same"
    assert (await server.client.files.delete(other.id)).deleted
    assert not server.bodies()


async def test_unknown_files_are_not_found(server: BatchServer) -> None:
    """An unknown id: 404 with an error body"""
    for file_id in ("file-unknown", "%00", "%ED%A0%80", "a" * 5000):
        for method, tail in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            reply = await server.http.request(method, f"/v1/files/{file_id}{tail}")
            error = assert_envelope(reply, 404)
            assert (error["type"], error["param"]) == ("invalid_request_error", "id")
            assert error["code"] == "file_not_found"


async def test_removed_content_is_not_found(server: BatchServer) -> None:
    """Not a fault of the server's"""
    file = await server.upload(b"text")
    (digest,) = server.bodies()
    server.store.files.bodies.path(digest).unlink()
    with pytest.raises(openai.NotFoundError, match="has been deleted"):
        await server.client.files.content(file.id)


async def test_other_paths_and_methods(server: BatchServer) -> None:
    """Always an error body"""
    for method, path, status in (
        ("PUT", "/v1/files", 405),
        ("POST", "/v1/files/file-1", 405),
        ("DELETE", "/v1/files/file-1/content", 405),
        ("GET", "/v1/files/", 404),
        ("GET", "/v1/files/file-1/", 404),
        ("GET", "/v1/files/file-1/other", 404),
    ):
        assert_envelope(await server.http.request(method, path), status)


async def test_a_server_without_a_store_has_no_files() -> None:
    """404, as for anything that is not there"""
    server = Server()
    async with server.http:
        for path in ("/v1/files", "/v1/batches"):
            assert_envelope(await server.http.get(path), 404)
