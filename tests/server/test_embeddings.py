"""Embeddings, scores and rerank over HTTP, from real models: equal to transformers' numbers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModel, PreTrainedModel

from bros.core.errors import QueueFullError
from bros.core.interfaces import RequestStream
from bros.core.request import EngineRequest
from bros.server.embeddings.schema import MAX_INPUTS
from bros.text.pooling import cosine
from support.encoders import hidden_states, save_encoder
from support.model_server import ModelServer, model_server
from support.scripted_server import assert_envelope
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

TOLERANCE = 1e-5
pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["the loire is a long river in france.", "a cat sleeps", "what ?", "the " * 30]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("bert")
    return save_encoder(folder), folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_tiny_llama(folder, vocab_size=512)
    return save_tokenizer(folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(
    bert: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ModelServer]:
    """For tests that only ask it."""
    async with model_server(bert[1], tmp_path_factory.mktemp("server")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def new_server(
    bert: tuple[PreTrainedModel, Path], tmp_path: Path
) -> AsyncIterator[ModelServer]:
    """For tests that count what it has done."""
    async with model_server(bert[1], tmp_path) as made:
        yield made


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def mean_of(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    return unit(hidden_states(model, list(tokens)).mean(0).numpy())


async def embed(server: ModelServer, given: Any, **fields: Any) -> list[np.ndarray]:
    reply = await server.post("/v1/embeddings", input=given, **fields)
    assert reply.status_code == 200, reply.text
    body = reply.json()
    assert body["object"] == "list" and body["model"] == "tiny"
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [np.array(each["embedding"]) for each in body["data"]]


async def test_texts_and_tokens_one_or_many(
    server: ModelServer, bert: tuple[PreTrainedModel, Path]
) -> None:
    tokens = [server.engine.tokenizer.encode(text) for text in TEXTS]
    expected = [mean_of(bert[0], ids) for ids in tokens]
    for given in (TEXTS, tokens):
        found = await embed(server, given)
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    for given in (TEXTS[0], tokens[0]):
        (one,) = await embed(server, given)
        np.testing.assert_allclose(one, expected[0], atol=TOLERANCE)
    reply = (await server.post("/v1/embeddings", input=TEXTS)).json()
    count = sum(map(len, tokens))
    assert reply["usage"] == {"prompt_tokens": count, "total_tokens": count}
    assert reply["id"].startswith("embd-")


async def test_openai_s_client_reads_base64_and_floats(server: ModelServer) -> None:
    default = await server.client.embeddings.create(model="tiny", input=TEXTS)
    floats = await server.client.embeddings.create(
        model="tiny", input=TEXTS, encoding_format="float"
    )
    for one, other in zip(default.data, floats.data, strict=True):
        np.testing.assert_allclose(one.embedding, other.embedding, atol=1e-7)
    raw = (await server.post("/v1/embeddings", input="a", encoding_format="base64")).json()
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    assert len(vector) == 48 and abs(np.linalg.norm(vector) - 1) < 1e-6


async def test_langchain_s_embeddings(server: ModelServer) -> None:
    openai = pytest.importorskip("langchain_openai")
    async with httpx.AsyncClient() as http:
        client = openai.OpenAIEmbeddings(
            model="tiny",
            base_url=f"{server.url}/v1",
            api_key="none",
            check_embedding_ctx_length=False,
            http_async_client=http,
        )
        found = await client.aembed_documents(TEXTS)
        one = await client.aembed_query(TEXTS[1])
    np.testing.assert_allclose(found, await embed(server, TEXTS), atol=1e-6)
    np.testing.assert_allclose(one, found[1], atol=1e-6)


async def test_many_texts_in_one_request(
    new_server: ModelServer, bert: tuple[PreTrainedModel, Path]
) -> None:
    """More than fit a step, or the queue; those of both classes together."""
    texts = [" ".join(["the river flow"] * (1 + i % 7)) for i in range(300)]
    both = await asyncio.gather(
        embed(new_server, texts), embed(new_server, texts, service_tier="flex")
    )
    expected = [
        mean_of(bert[0], new_server.engine.tokenizer.encode(text)) for text in dict.fromkeys(texts)
    ]
    for found in both:
        for index, vector in enumerate(found):
            np.testing.assert_allclose(vector, expected[index % 7], atol=TOLERANCE)
    metrics = (await new_server.http.get("/metrics")).text
    for line in ('bros_requests_finished_total{class="rt"} 300.0',
                 'bros_requests_finished_total{class="be"} 300.0',
                 'bros_slo_met_total{class="rt",objective="ttft"}',
                 'bros_requests_total{class="rt",finish_reason="length"} 300.0'):  # fmt: skip
        assert line in metrics


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "the " * 70}, "input"),
        ({"input": [[1] * 65]}, "input"),
        ({"input": [[5_000]]}, "input"),
        ({"input": [[1, -1]]}, "input"),
        ({"dimensions": 10}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
        ({"service_tier": "cheap"}, "service_tier"),
        ({"slo": {"ttft_ms": -1}}, "slo.ttft_ms"),
    ],
)
async def test_what_is_wrong_is_named(
    server: ModelServer, fields: dict[str, Any], param: str
) -> None:
    reply = await server.post("/v1/embeddings", **{"input": "a", **fields})
    assert assert_envelope(reply, 400)["param"] == param


async def test_an_encoder_generates_nothing(server: ModelServer) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ):
        error = assert_envelope(await server.post(path, **fields), 400)
        assert error["param"] == "model" and "/v1/embeddings" in error["message"]
    reply = await server.post("/v1/score", text_1="a", text_2="the")
    assert reply.status_code == 200


async def test_longer_texts_are_cut_if_asked_for(
    server: ModelServer, bert: tuple[PreTrainedModel, Path]
) -> None:
    (found,) = await embed(server, "river " * 100, truncate_prompt_tokens=-1)
    whole = server.engine.tokenizer.encode("river " * 62)
    assert len(whole) == 64
    np.testing.assert_allclose(found, mean_of(bert[0], whole), atol=TOLERANCE)
    (found,) = await embed(server, "river " * 100, truncate_prompt_tokens=7)
    short = server.engine.tokenizer.encode("river " * 5)
    np.testing.assert_allclose(found, mean_of(bert[0], short), atol=TOLERANCE)


async def test_special_tokens_in_texts_stay_text(server: ModelServer) -> None:
    plain, special, asked = [
        (await server.post("/v1/embeddings", input=text, **fields)).json()["usage"]["total_tokens"]
        for text, fields in (
            ("a cat", {}),
            ("a [SEP] cat", {}),
            ("a [SEP] cat", {"allow_special_tokens": True}),
        )
    ]
    assert (plain, special, asked) == (4, 7, 5)


async def test_rows_of_a_batch(server: ModelServer) -> None:
    bodies = [{"input": TEXTS}, {"input": "a cat", "encoding_format": "base64"}]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": body})
        for i, body in enumerate(bodies)
    ]
    client = server.client
    file = await client.files.create(file=("rows", "\n".join(lines).encode()), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    for _ in range(400):
        batch = await client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed"):
            break
        await asyncio.sleep(0.02)
    assert batch.status == "completed" and batch.output_file_id is not None
    text = (await client.files.content(batch.output_file_id)).text
    rows = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, text.splitlines())}
    expected = await embed(server, TEXTS)
    found = [each["embedding"] for each in rows["0"]["data"]]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert isinstance(rows["1"]["data"][0]["embedding"], str)


async def test_a_wrong_row_is_named_before_anything_runs(server: ModelServer) -> None:
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}},
        {"custom_id": "b", "method": "POST", "url": "/v1/embeddings", "body": {"input": []}},
        {"custom_id": "c", "method": "POST", "url": "/v1/embeddings",
         "body": {"input": "a", "dimensions": 3}},
    ]  # fmt: skip
    content = "\n".join(map(json.dumps, lines)).encode()
    file = await server.client.files.create(file=("rows", content), purpose="batch")
    batch = await server.client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    for _ in range(400):
        batch = await server.client.batches.retrieve(batch.id)
        if batch.status == "failed":
            break
        await asyncio.sleep(0.02)
    assert batch.errors is not None and batch.errors.data is not None
    assert [(error.line, error.param) for error in batch.errors.data] == [
        (2, "body.input"),
        (3, "body.dimensions"),
    ]


async def test_a_client_that_leaves_aborts_its_texts(new_server: ModelServer) -> None:
    texts = ["the " * 60] * 2000
    reading = asyncio.create_task(new_server.post("/v1/embeddings", input=texts))
    engine = new_server.state.engine
    while not (await engine.stats()).by_class["rt"].prompt_tokens:  # type: ignore[index]
        await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    while (stats := (await engine.stats()).by_class["rt"]).running or stats.waiting:  # type: ignore[index]
        await asyncio.sleep(0.01)
    assert stats.finished < len(texts)
    assert not new_server.state.accounts.held


async def test_score_and_rerank_by_embeddings(server: ModelServer) -> None:
    query, documents = "a river", ["the cat sleeps", "the river is long", "mountain"]
    q, *vectors = await embed(server, [query, *documents])
    expected = [float(q @ vector) for vector in vectors]
    reply = await server.post("/v1/score", text_1=query, text_2=documents)
    scores = [each["score"] for each in reply.json()["data"]]
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
    pairs = await server.post("/v1/score", text_1=[query] * 3, text_2=documents)
    assert [each["score"] for each in pairs.json()["data"]] == pytest.approx(scores)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        body = (await server.post(path, query=query, documents=documents)).json()
        order = [each["index"] for each in body["results"]]
        assert order == list(np.argsort(-np.array(expected)))
        for each in body["results"]:
            assert each["document"]["text"] == documents[each["index"]]
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-5)
    objects = [{"text": text} for text in documents]
    fields = {"query": query, "documents": objects, "top_n": 1, "return_documents": False}
    (best,) = (await server.post("/v1/rerank", **fields)).json()["results"]
    assert best["index"] == order[0] and best["document"] is None


async def test_texts_that_are_equal_have_a_score_of_one_at_most(server: ModelServer) -> None:
    reply = await server.post("/v1/score", text_1=TEXTS, text_2=TEXTS)
    scores = [each["score"] for each in reply.json()["data"]]
    assert scores == pytest.approx([1.0] * len(TEXTS)) and max(scores) <= 1.0
    rng = np.random.default_rng(0)
    for _ in range(1000):
        vector = rng.normal(size=384).astype(np.float32)
        assert -1.0 <= cosine(vector, -vector) <= -1.0 + 1e-12
        assert 1.0 - 1e-12 <= cosine(vector, 3 * vector) <= 1.0
    assert cosine(vector, np.zeros_like(vector)) == 0.0


async def test_the_field_that_is_ranked_may_be_named(server: ModelServer) -> None:
    fields = {"query": "a", "documents": [{"text": "a cat"}], "rank_fields": ["text"]}
    assert (await server.post("/v1/rerank", **fields)).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/score", {"text_1": ["a", "a"], "text_2": ["a"]}, "text_1"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": ""}, "text_2"),
        ("/v1/score", {"text_1": "", "text_2": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", "b", ""]}, "text_2[2]"),
        ("/v1/rerank", {"query": "", "documents": ["a", "b"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"text": ""}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [3]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        (
            "/v1/rerank",
            {"query": "a", "documents": [{"text": "a", "b": "c"}], "rank_fields": ["b", "text"]},
            "rank_fields",
        ),
    ],
)
async def test_wrong_pairs_are_named(
    server: ModelServer, path: str, fields: dict[str, Any], param: str
) -> None:
    assert assert_envelope(await server.post(path, **fields), 400)["param"] == param


async def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = save_encoder(folder, scores=True)
    query, documents = "what is a river ?", ["the loire", "a cat on the mat.", "the " * 100]
    async with model_server(folder, tmp_path) as server:
        fields = {"query": query, "documents": documents, "truncate_prompt_tokens": -1}
        results = (await server.post("/v1/rerank", **fields)).json()["results"]
        refused = await server.post("/v1/rerank", query=query, documents=documents)
        embeddings = await server.post("/v1/embeddings", input="a")
        backend = server.engine.tokenizer
        found = {each["index"]: each["relevance_score"] for each in results}
        for index, document in enumerate(documents):
            ids, second = backend.encode_texts(query, document, cut=64)
            assert len(ids) <= 64 and second is not None
            types = torch.tensor([[int(i >= second) for i in range(len(ids))]])
            with torch.inference_mode():
                logit = model(torch.tensor([ids]), token_type_ids=types).logits[0, 0]
            assert found[index] == pytest.approx(torch.sigmoid(logit).item(), abs=TOLERANCE)
    assert assert_envelope(refused, 400)["param"] == "documents"
    assert "/v1/rerank" in assert_envelope(embeddings, 400)["message"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
async def test_a_decoder_embeds_and_chats(llama: Path, tmp_path: Path, pooling: str) -> None:
    model = AutoModel.from_pretrained(llama).eval()
    texts = ["The dog", "The quick brown fox jumps over the lazy dog, and stops." * 3]
    async with model_server(llama, tmp_path, pooling=pooling, max_batch_tokens=9) as server:
        expected = []
        for text in texts:
            ids = server.engine.tokenizer.encode(text)
            with torch.inference_mode():
                states = model(torch.tensor([ids])).last_hidden_state[0]
            expected.append(unit((states.mean(0) if pooling == "mean" else states[-1]).numpy()))
        chat = server.post("/v1/completions", prompt=texts[1], max_tokens=20)
        generated, *found = await asyncio.gather(chat, embed(server, texts), embed(server, texts))
        assert generated.status_code == 200
        for each in (*found, await embed(server, texts)):  # the last one finds cached KV
            np.testing.assert_allclose(each, expected, atol=TOLERANCE)
        stats = (await server.state.engine.stats()).by_class["rt"]  # type: ignore[index]
        assert (stats.prefix_tokens > 0) is (pooling == "last")


async def test_dimensions_of_a_model_that_was_trained_for_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_encoder(folder, matryoshka_dimensions=[8, 16])
    async with model_server(folder, tmp_path) as server:
        (whole,) = await embed(server, "a river")
        (short,) = await embed(server, "a river", dimensions=16)
        refused = await server.post("/v1/embeddings", input="a", dimensions=9)
    np.testing.assert_allclose(short, unit(whole[:16]), atol=TOLERANCE)
    assert "8, 16" in assert_envelope(refused, 400)["message"]


async def test_limits_of_a_tenant_hold(bert: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("small key-a max_requests=2\nother key-b\n")
    async with model_server(bert[1], tmp_path, server={"api_keys": str(keys)}) as server:
        headers = {"Authorization": "Bearer key-a"}
        body = {"input": TEXTS * 3}
        reply = await server.http.post("/v1/embeddings", json=body, headers=headers)
        assert reply.status_code == 200 and len(reply.json()["data"]) == 12
        held = server.state.accounts.count("small", "rt_requests", 2)  # type: ignore[arg-type]
        reply = await server.http.post("/v1/embeddings", json=body, headers=headers)
        assert_envelope(reply, 429)
        held.release()


async def test_what_the_engine_refuses_does_not_count_for_the_limits_per_minute(
    bert: tuple[PreTrainedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann key-a max_requests_per_minute=2\n")
    async with model_server(bert[1], tmp_path, server={"api_keys": str(keys)}) as server:
        headers, engine = {"Authorization": "Bearer key-a"}, server.state.engine
        submit = engine.submit

        async def full(request: EngineRequest) -> RequestStream:
            raise QueueFullError(1, 1.0)

        monkeypatch.setattr(engine, "submit", full)
        for _ in range(3):
            reply = await server.http.post("/v1/embeddings", json={"input": "a"}, headers=headers)
            assert reply.status_code in (429, 503)
        monkeypatch.setattr(engine, "submit", submit)
        for status in (200, 200, 429):
            reply = await server.http.post("/v1/embeddings", json={"input": "a"}, headers=headers)
            assert reply.status_code == status
