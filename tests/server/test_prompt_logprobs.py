"""`prompt_logprobs`, `echo` with `logprobs`, and `max_tokens: 0`, from a real model over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from bros.core.request import SamplingParams, TokenLogprobs
from bros.llm import LLM
from bros.server.openai.prompt_logprobs import Echo, token_offsets
from bros.server.openai.stream import CompletionLogprobsWriter
from support.checkpoints import all_logits
from support.model_server import ModelServer, model_server
from support.scripted_server import EOS_TEXT, assert_envelope, make_tokenizer
from support.tier import examples
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer, sentencepiece_backend

TOLERANCE = 1e-4
TEXT = "The dog stops here, naïve 😀."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(made, vocab_size=440)  # of the tokenizer: names of tokens differ
    chat = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    return save_tokenizer(made, chat_template=chat)


@pytest.fixture
async def server(folder: Path, tmp_path: Path) -> AsyncIterator[ModelServer]:
    async with model_server(folder, tmp_path, max_batch_tokens=7) as made:
        yield made


async def test_an_echo_with_sentencepiece_goes_on_with_its_space(tmp_path: Path) -> None:
    backend = sentencepiece_backend()
    save_tiny_llama(tmp_path, vocab_size=backend.get_vocab_size())
    the = backend.token_to_id("▁the")
    save_tokenizer(tmp_path, backend, bos_token="<s>", eos_token="</s>")
    async with model_server(tmp_path, tmp_path / "data") as server:
        reply = await server.post(
            "/v1/completions",
            **{"prompt": "the the", "echo": True, "logprobs": 0, "max_tokens": 2},
            logit_bias={str(the): 100},
        )
    (choice,) = reply.json()["choices"]
    assert choice["text"] == "the the the the"
    assert choice["logprobs"]["text_offset"] == [0, 3, 7, 11]


async def test_a_value_with_sentencepiece_keeps_the_tokens_that_were_generated(
    tmp_path: Path,
) -> None:
    """Two spaces at the beginning of an output, which are one token where they are encoded."""
    backend = sentencepiece_backend()
    save_tiny_llama(tmp_path, vocab_size=backend.get_vocab_size())
    save_tokenizer(tmp_path, backend, bos_token="<s>", eos_token="</s>")
    sampling = {"logit_bias": {str(backend.token_to_id("▁")): 100}, "max_tokens": 2}
    value = {"name": "x", "variable": "x"}
    calls = [
        {"template": "the{{output:x}}", "parameters": [value], "sampling": sampling},
        {"template": "a{{input:x}}b{{output:y}}", "parameters": [value, {"name": "y"}]},
    ]
    async with model_server(tmp_path, tmp_path / "data") as server:
        await server.post("/v1/sessions", id="s")
        await server.post("/v1/sessions/s/requests", requests=calls, wait=True)
        requests = (await server.http.get("/v1/sessions/s")).json()["requests"]
    assert [request["prompt_tokens"] for request in requests] == [1, len("▁a  b")]


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    loaded: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder).eval()
    return loaded


def expected(model: torch.nn.Module, prompt: list[int]) -> Tensor:
    """Log-probabilities [tokens, vocab] of what comes after each token."""
    return torch.log_softmax(all_logits(model, prompt).double(), dim=1)


def check_echo(
    lists: dict[str, Any], prompt: list[int], text: str, table: Tensor, top: int
) -> None:
    """The first elements of the lists are those of the prompt. text: prompt and answer."""
    count = len(prompt)
    values = lists["token_logprobs"]
    assert values[0] is None
    wanted = [table[i, token].item() for i, token in enumerate(prompt[1:])]
    assert values[1:count] == pytest.approx(wanted, abs=TOLERANCE)
    offsets = lists["text_offset"]
    assert offsets[0] == 0 and offsets == sorted(offsets)
    for name, offset in zip(lists["tokens"], offsets, strict=True):
        if not name.startswith("bytes:"):
            assert text[offset:].startswith(name)
    best = lists["top_logprobs"]
    if not top:
        assert best is None
        return
    assert best[0] is None and all(len(each) == top for each in best[1:])
    for position, each in enumerate(best[1:count]):
        largest = table[position].topk(top).values.tolist()
        assert sorted(each.values(), reverse=True) == pytest.approx(largest, abs=TOLERANCE)


@pytest.mark.parametrize("top", [0, 3])
@pytest.mark.parametrize("max_tokens", [0, 4])
async def test_echo_with_logprobs(
    server: ModelServer, model: torch.nn.Module, top: int, max_tokens: int
) -> None:
    prompt = server.engine.tokenizer.encode(TEXT)
    options = {"echo": True, "logprobs": top, "max_tokens": max_tokens, "temperature": 0}
    for sent in (TEXT, prompt):
        answer = await server.post("/v1/completions", prompt=sent, **options)
        (choice,) = answer.json()["choices"]
        assert choice["text"].startswith(TEXT)
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + max_tokens
        assert choice["finish_reason"] == "length"
        check_echo(choice["logprobs"], prompt, choice["text"], expected(model, prompt), top)
        usage = answer.json()["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), max_tokens)


async def test_the_lists_of_a_stream_joined_are_those_of_the_whole_answer(
    server: ModelServer,
) -> None:
    body = {
        "prompt": [TEXT, "x"], "echo": True, "logprobs": 2, "max_tokens": 3, "temperature": 0,
        "prompt_logprobs": 1, "n": 2, "seed": 1,
    }  # fmt: skip
    whole = (await server.post("/v1/completions", **body)).json()["choices"]
    reply = await server.post("/v1/completions", **body, stream=True)
    joined: list[dict[str, Any]] = [{"text": "", "logprobs": {}, "prompt": []} for _ in whole]
    pieces = 0
    for line in reply.text.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            into = joined[choice["index"]]
            into["text"] += choice["text"]
            into["prompt"] += choice.get("prompt_logprobs") or []
            pieces += bool(choice.get("prompt_logprobs"))
            for name, values in (choice["logprobs"] or {}).items():
                into["logprobs"].setdefault(name, []).extend(values)
    # A long prompt comes in several pieces, unless they are all computed before the first is sent.
    assert pieces >= len(whole)
    for choice, into in zip(whole, joined, strict=True):
        assert into["text"] == choice["text"]
        assert into["logprobs"].keys() == choice["logprobs"].keys()
        for name in ("tokens", "text_offset"):
            assert into["logprobs"][name] == choice["logprobs"][name]
        values = choice["logprobs"]["token_logprobs"]
        assert into["logprobs"]["token_logprobs"][1:] == pytest.approx(values[1:], abs=TOLERANCE)
        assert [list(e or ()) for e in into["prompt"]] == [
            list(e or ()) for e in choice["prompt_logprobs"]
        ]


async def test_a_chat_has_those_of_its_whole_prompt(
    server: ModelServer, model: torch.nn.Module
) -> None:
    messages = [{"role": "user", "content": TEXT}]
    options = {"messages": messages, "max_tokens": 2, "temperature": 0, "prompt_logprobs": 2}
    body = (await server.post("/v1/chat/completions", **options)).json()
    prompt = server.engine.tokenizer.apply_chat_template(messages)
    elements, table = body["prompt_logprobs"], expected(model, prompt)
    assert len(elements) == len(prompt) == body["usage"]["prompt_tokens"]
    assert elements[0] is None
    for position, (element, token) in enumerate(zip(elements[1:], prompt[1:], strict=True)):
        entry = element[str(token)]
        assert entry["logprob"] == pytest.approx(table[position, token].item(), abs=TOLERANCE)
        assert entry["decoded_token"] == server.engine.tokenizer.token_text(token)
        assert {e["rank"] for e in element.values()} >= {1, 2} and len(element) in (2, 3)
    assert body["choices"][0]["message"]["content"] is not None
    reply = await server.post("/v1/chat/completions", **options, stream=True)
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if "data: {" in line]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    streamed = [
        element for chunk in chunks for element in chunk["choices"][0].get("prompt_logprobs") or []
    ]
    assert [list(e or ()) for e in streamed] == [list(e or ()) for e in elements]


async def test_zero_alternatives_leave_the_prompt_token(server: ModelServer) -> None:
    answer = await server.post("/v1/completions", prompt="Stop", prompt_logprobs=0, max_tokens=0)
    (choice,) = answer.json()["choices"]
    prompt = server.engine.tokenizer.encode("Stop")
    assert [list(e) for e in choice["prompt_logprobs"][1:]] == [[str(t)] for t in prompt[1:]]
    assert choice["text"] == "" and choice["logprobs"] is None


async def test_best_effort_and_cached_prompts_have_them_too(
    server: ModelServer, model: torch.nn.Module
) -> None:
    prompt = server.engine.tokenizer.encode(TEXT * 3)
    options = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1}
    await server.post("/v1/completions", prompt=prompt, max_tokens=1)
    answer = await server.post("/v1/completions", **options, service_tier="flex")
    body = answer.json()
    assert body["service_tier"] == "flex"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    (choice,) = body["choices"]
    check_echo(choice["logprobs"], prompt, choice["text"], expected(model, prompt), 1)


async def test_openai_s_client_reads_them(server: ModelServer) -> None:
    answer = await server.client.completions.create(
        model="tiny", prompt=TEXT, echo=True, logprobs=1, max_tokens=0
    )
    lists = answer.choices[0].logprobs
    assert lists is not None and lists.token_logprobs is not None
    assert lists.token_logprobs[0] is None and lists.token_logprobs[1] < 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": "1"}, "prompt_logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"),
        ({"prompt": [[1] * 400] * 128, "prompt_logprobs": 20}, "prompt_logprobs"),
    ],
)
async def test_what_cannot_be_scored_is_refused(
    server: ModelServer, fields: dict[str, Any], param: str
) -> None:
    reply = await server.post("/v1/completions", **{"prompt": "a", **fields})
    assert assert_envelope(reply, 400)["param"] == param


async def test_a_chat_generates_at_least_one_token(server: ModelServer) -> None:
    messages = [{"role": "user", "content": "a"}]
    reply = await server.post("/v1/chat/completions", messages=messages, max_tokens=0)
    assert assert_envelope(reply, 400)["param"] == "max_tokens"


def test_offline(folder: Path, model: torch.nn.Module) -> None:
    options = {"weights": "fp32", "kv_blocks": 64, "threads": 1, "max_batch_tokens": 9}
    with LLM(str(folder), **options) as llm:
        params = SamplingParams(max_tokens=0, prompt_logprobs=1)
        prompt = [7, 300, 21, 9] * 5
        ((result,),) = llm.generate([prompt], params)
    found = [entry for piece in result.prompt_logprobs for entry in piece]
    table = expected(model, prompt)
    assert result.token_ids == () and len(found) == len(prompt) - 1
    for position, entry in enumerate(found):
        assert entry.token_id == prompt[position + 1]
        assert entry.logprob == pytest.approx(table[position, entry.token_id].item(), abs=TOLERANCE)


class Bytes:
    """A tokenizer whose tokens are these bytes."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.token_bytes = tokens.__getitem__


@given(
    st.lists(st.sampled_from([b"a", b" b", *(bytes([n]) for n in "\ufffdé😀".encode()), b"\xe0"]))
)
@settings(max_examples=examples(100))
def test_offsets_are_those_of_the_text_whatever_the_bytes(tokens: list[bytes]) -> None:
    writer = CompletionLogprobsWriter(Bytes(tokens), 0)  # type: ignore[arg-type]
    lists = writer.write([TokenLogprobs(i, -1.0, ()) for i in range(len(tokens))])
    text = b"".join(tokens).decode("utf-8", "replace")
    assert lists.text_offset == sorted(lists.text_offset)
    for name, offset in zip(lists.tokens, lists.text_offset, strict=True):
        if not name.startswith("bytes:"):
            assert text[offset:].startswith(name)


TOKENIZER = make_tokenizer()
SPECIAL = TOKENIZER.encode(EOS_TEXT)[0]
TOKEN_OF = {TOKENIZER.token_bytes(token): token for token in range(256)}


def tokens_of(data: bytes) -> list[int]:
    return [TOKEN_OF[bytes([byte])] for byte in data]


PIECES = [
    [SPECIAL],
    tokens_of(EOS_TEXT.encode()),
    tokens_of(b" b"),
    *([token] for token in tokens_of("a\ufffdé😀".encode() + b"\xe0")),
]


@given(st.lists(st.sampled_from(PIECES)))
@settings(max_examples=examples(100))
def test_offsets_in_a_prompt_of_tokens_are_those_of_its_text(pieces: list[list[int]]) -> None:
    """Which shows no special token, and may have the name of one."""
    ids = [token for piece in pieces for token in piece]
    text, shown = TOKENIZER.decode(ids), [token for token in ids if token != SPECIAL]
    offsets = token_offsets(TOKENIZER, Echo(text, ids, shows_special=False))
    assert offsets == sorted(offsets)
    of_shown = [o for token, o in zip(ids, offsets, strict=True) if token != SPECIAL]
    for token, offset in zip(shown, of_shown, strict=True):
        name = TOKENIZER.token_bytes(token)
        assert not name.isascii() or text[offset:].startswith(name.decode())
    if text.isascii():
        assert of_shown == list(range(len(shown)))
