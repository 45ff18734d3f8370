"""What requests find in the prefix cache of each other: chats, sessions and batches of two keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.server_process import ServerProcess, running_server, wait_until
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BLOCK = 16
CHAT = "/v1/chat/completions"


PUBLIC = "Ice is what you know about. Be brief, be kind, never rude, and make nothing up, ever."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Objectives are loose, so that nothing depends on how fast this machine is."""
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_llama(folder)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ann ann-key\nbob bob-key\n")
    public = keys.with_name("public.txt")
    public.write_text(PUBLIC + "\n")
    options = ["--kernels", "reference", "--kv-blocks", "512", "--api-keys", str(keys)]
    options += ["--public-prefix", str(public)]
    options += ["--slo-ttft", "60000", "--slo-tpot", "60000"]
    options += ["--data-dir", str(tmp_path_factory.mktemp("data"))]  # steps are measured anew
    with running_server(str(folder), *options) as server:
        yield server


@pytest.fixture
def ann(server: ServerProcess) -> Iterator[httpx.Client]:
    with client_of(server, "ann") as client:
        yield client


@pytest.fixture
def bob(server: ServerProcess) -> Iterator[httpx.Client]:
    with client_of(server, "bob") as client:
        yield client


def client_of(server: ServerProcess, name: str) -> httpx.Client:
    headers = {"authorization": f"Bearer {name}-key"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=60)


def ok(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def messages_of(about: str) -> list[dict[str, str]]:
    """They begin differently for every `about`, so tests share nothing."""
    system = f"{about} is what you know about. Be brief, be kind, and never make anything up."
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is there to see in the town by the sea, if it rains?"},
    ]


def tokens_of(client: httpx.Client, messages: list[dict[str, str]]) -> list[int]:
    tokens: list[int] = ok(client.post("/tokenize", json={"messages": messages}))["tokens"]
    return tokens


def whole_blocks(tokens: list[int]) -> int:
    """The last token of a prompt is never looked up."""
    return (len(tokens) - 1) // BLOCK * BLOCK


def chat(client: httpx.Client, messages: list[dict[str, str]], **body: Any) -> dict[str, Any]:
    fields = {"messages": messages, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    return ok(client.post(CHAT, json={**fields, **body}))


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def call(
    client: httpx.Client, messages: list[dict[str, str]], session: dict[str, Any], **values: str
) -> dict[str, Any]:
    """The view of a finished call in a new session. values: of its placeholders."""
    session_id = ok(client.post("/v1/sessions", json=session))["id"]
    output = {"role": "assistant", "content": "{{output:o}}"}
    parameters = [{"name": name, "value": value} for name, value in values.items()]
    parameters.append({"name": "o", "sampling": {"max_tokens": 2, "temperature": 0}})
    body = {"messages": [*messages, output], "parameters": parameters}
    submitted = ok(client.post(f"/v1/sessions/{session_id}/requests", json=body))
    variable = submitted["requests"][0]["variables"]["o"]
    ok(
        client.get(
            f"/v1/sessions/{session_id}/variables/{variable}",
            params={"wait": "true", "timeout": 60},
        )
    )
    (view,) = ok(client.get(f"/v1/sessions/{session_id}"))["requests"]
    assert view["state"] == "finished"
    found: dict[str, Any] = view
    return found


def finished(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """The batch, once it is completed."""
    found: dict[str, Any] = {}

    def is_done() -> bool:
        found.update(ok(client.get(f"/v1/batches/{batch_id}")))
        return found["status"] == "completed"

    wait_until(is_done, 60, "the batch is done")
    return found


def test_keys_find_their_own_prompts_only(ann: httpx.Client, bob: httpx.Client) -> None:
    messages = messages_of("Rain")
    expected = whole_blocks(tokens_of(ann, messages))
    assert expected > 4 * BLOCK
    assert [cached(chat(client, messages)) for client in (ann, bob, ann, bob)] == [
        0, 0, expected, expected,
    ]  # fmt: skip
    # Neither another's name as user, nor a salt that looks like another tenant's, changes that.
    body = {"prompt": tokens_of(ann, messages_of("Wind")), "max_tokens": 1}
    for client, fields, found in (
        (ann, {}, False),
        (bob, {"user": "ann", "safety_identifier": "ann"}, False),
        (bob, {"cache_salt": "3:ann"}, False),
        (bob, {"cache_salt": "3:ann"}, True),
        (ann, {"cache_salt": "3:ann"}, False),
        (ann, {"user": "bob"}, True),
    ):
        answer = ok(client.post("/v1/completions", json={**body, **fields}))
        assert (cached(answer) > 0) == found, fields


def test_chats_and_sessions_share_what_is_the_same(ann: httpx.Client, bob: httpx.Client) -> None:
    messages = messages_of("Snow")
    tokens = tokens_of(ann, messages)
    assert cached(chat(ann, messages)) == 0
    view = call(ann, messages, {})
    assert (view["prompt_tokens"], view["cached_tokens"]) == (len(tokens), whole_blocks(tokens))
    assert call(bob, messages, {})["cached_tokens"] == 0
    assert cached(chat(bob, messages)) == whole_blocks(tokens)


def test_a_chat_finds_what_sessions_have_computed_of_values(ann: httpx.Client) -> None:
    """Pieces are tokenized one by one; here the borders are special tokens, so nothing differs."""
    messages = messages_of("Hail")
    tokens = tokens_of(ann, messages)
    template = [messages[0], {"role": "user", "content": "{{question}}"}]
    question = messages[1]["content"]
    first, second = (call(ann, template, {}, question=question) for _ in range(2))
    assert first["prompt_tokens"] == len(tokens)
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, whole_blocks(tokens))
    assert cached(chat(ann, messages)) == whole_blocks(tokens)


def test_private_content_is_found_by_its_session_or_scope_only(ann: httpx.Client) -> None:
    messages = messages_of("Fog")
    template = [messages[0], {"role": "user", "content": "{{question}}"}]
    question, whole = messages[1]["content"], whole_blocks(tokens_of(ann, messages))
    constant = len(tokens_of(ann, messages[:1])) // BLOCK * BLOCK

    def found(**session: str) -> int:
        tokens: int = call(ann, template, session, question=question)["cached_tokens"]
        return tokens

    assert BLOCK < constant < whole - BLOCK
    assert found(sharing="session") == 0
    for session, expected in (
        ({"sharing": "session"}, constant),
        ({"tenant": "team"}, constant),
        ({"tenant": "team"}, whole),
        ({"tenant": "team", "sharing": "session"}, constant),
    ):
        assert expected - BLOCK <= found(**session) <= expected, session
    assert cached(chat(ann, messages)) <= constant


def test_batches_share_with_their_key(ann: httpx.Client, bob: httpx.Client) -> None:
    messages = messages_of("Frost")
    expected = whole_blocks(tokens_of(ann, messages))
    chat(ann, messages)
    for client, found in ((bob, 0), (ann, expected)):
        body = {"messages": messages, "max_tokens": 2, "ignore_eos": True, "user": "ann"}
        row = {"custom_id": "1", "method": "POST", "url": CHAT, "body": body}
        files = {"file": ("rows.jsonl", json.dumps(row).encode())}
        uploaded = ok(client.post("/v1/files", files=files, data={"purpose": "batch"}))
        fields = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": uploaded["id"]}
        done = finished(client, ok(client.post("/v1/batches", json=fields))["id"])
        answer = json.loads(client.get(f"/v1/files/{done['output_file_id']}/content").text)
        assert cached(answer["response"]["body"]) == found


def test_traces_of_another_key_are_unknown(ann: httpx.Client, bob: httpx.Client) -> None:
    answer, view = chat(ann, messages_of("Sun")), call(ann, messages_of("Dew"), {})
    for request_id in (answer["id"], view["id"]):
        path = f"/v1/requests/{request_id}/trace"
        assert ok(ann.get(path))["choices"]
        refused = bob.get(path)
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "request_not_found"


def test_a_public_prefix_is_shared_and_what_follows_is_not(
    ann: httpx.Client, bob: httpx.Client
) -> None:
    messages = messages_of("")
    messages[0]["content"] = PUBLIC
    tokens, whole = tokens_of(ann, messages), whole_blocks(tokens_of(ann, messages))
    other = tokens_of(ann, [messages[0], {"role": "user", "content": "a"}])
    public = next(n for n, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b)
    shared = public // BLOCK * BLOCK
    assert BLOCK < shared < whole - BLOCK
    found = [cached(chat(client, messages)) for client in (ann, bob, ann, bob)]
    assert found == [0, shared, whole, whole]
    # In sessions, too, and a salt turns it off.
    assert call(bob, messages, {"sharing": "session"})["cached_tokens"] >= shared
    assert cached(chat(bob, messages, cache_salt="mine")) == 0
