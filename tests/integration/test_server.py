"""The whole server with the embedded model, as clients see it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from bros.cli.main import main
from support.machine_speed import slowdown
from support.server_process import HTTP, ServerProcess, rss_mib, running_server, wait_until
from support.tier import by_tier
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
MODEL = "SmolLM2-135M-Instruct"
CROWD = by_tier(fast=4, long=24)
CLIENTS = by_tier(fast=12, long=300)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random model."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(save_chat_llama(folder))


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def metric(server: ServerProcess, name: str) -> float:
    text = HTTP.get(f"{server.url}/metrics").text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name} in\n{text}"
    return float(found[1])


def kv_blocks_used(server: ServerProcess) -> float:
    return sum(metric(server, f'bros_kv_blocks_used{{class="{name}"}}') for name in ("rt", "be"))


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.service_tier == "default"


def test_streamed_chat_gives_the_same_text(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert len([piece for piece in pieces if piece]) > 3
    told, asked = chunks[-1].usage, whole.usage
    assert told is not None and asked is not None
    # How many prompt tokens come from the cache depends on what was asked before.
    assert told.prompt_tokens == asked.prompt_tokens
    assert told.completion_tokens == asked.completion_tokens
    assert told.total_tokens == asked.total_tokens


def test_completion_with_logprobs_n_stop_and_seed(client: openai.OpenAI) -> None:
    def ask() -> openai.types.Completion:
        return client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=12, n=3, seed=7, logprobs=2
        )

    first, second = ask(), ask()
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices], "a seed repeats the text"
    assert len(set(texts)) == 3, "and the choices differ"
    logprobs = first.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == texts[0]
    stop = texts[0].split()[1]
    stopped = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=12, seed=7, stop=stop
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == texts[0].split(stop)[0]


async def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:

        async def ask(seed: int) -> str:
            answer = await client.completions.create(
                model=MODEL,
                prompt="My favourite animal",
                max_tokens=by_tier(fast=12, long=24),
                seed=seed,
            )
            return answer.choices[0].text

        alone = [await ask(seed) for seed in range(CROWD // 2)]
        crowd = await asyncio.gather(*(ask(seed) for seed in range(CROWD)))
    assert crowd[: CROWD // 2] == alone
    assert len(set(crowd)) == CROWD


@pytest.mark.long
async def test_many_streaming_clients_at_once_and_memory_is_flat_afterwards(
    server: ServerProcess,
) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=240) as client:

        async def stream(number: int) -> tuple[int, bool]:
            body = {
                "prompt": f"Item {number} of the list is",
                "max_tokens": 8,
                "temperature": 0,  # else each round would add new blocks to the prefix cache
                "stream": True,
                "ignore_eos": True,
                "service_tier": "flex" if number % 2 else "default",
                "stream_options": {"include_usage": True},
            }
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                lines = [line async for line in response.aiter_lines() if line]
            usage = re.search(r'"completion_tokens":(\d+)', lines[-2])
            assert usage
            return int(usage[1]), lines[-1] == "data: [DONE]"

        async def everyone() -> None:
            results = await asyncio.gather(*(stream(number) for number in range(CLIENTS)))
            assert results == [(8, True)] * CLIENTS

        for _ in range(2):  # the first rounds touch KV memory and compile for new row counts
            await everyone()
        before = {pid: rss_mib(pid) for pid in (server.pid, server.engine_pid)}
        await everyone()
    for pid, mib in before.items():
        assert rss_mib(pid) < mib + 24
    assert kv_blocks_used(server) == 0
    for service_class in ("rt", "be"):
        assert metric(server, f'bros_requests_running{{class="{service_class}"}}') == 0
        assert metric(server, f'bros_requests_waiting{{class="{service_class}"}}') == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_memory(server: ServerProcess, stream: bool) -> None:
    body = {"prompt": "Tell me", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = response.iter_lines()  # closing it would close the connection
                next(lines)
                wait_until(lambda: kv_blocks_used(server) > 0, 120, "it runs")
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=0.5)
    wait_until(lambda: kv_blocks_used(server) == 0, 120, "memory is freed")


def test_malformed_requests_are_refused_in_the_envelope(server: ServerProcess) -> None:
    wrong = [
        (b"{", "Content-Type"),
        (b'{"messages": 5}', "messages"),
        (b'{"messages": [], "temperature": "hot"}', "temperature"),
        (b"\xff\xfe", "utf"),
    ]
    for body, _ in wrong:
        response = HTTP.post(
            f"{server.url}/v1/chat/completions",
            content=body,
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code == 400
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    long = "word " * 20_000
    response = httpx.post(f"{server.url}/v1/completions", json={"prompt": long}, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded" and "8192" in error["message"]


def test_an_engine_that_dies_fails_open_requests_and_comes_back(server: ServerProcess) -> None:
    body = {"prompt": "Tell me", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = list(lines)
        assert any('"error"' in line for line in rest)
        assert not any("[DONE]" in line for line in rest)
        assert client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503 and refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        wait_until(lambda: client.get("/health").status_code == 200, 120, "the engine is back")
        answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
        assert answer.status_code == 200


@pytest.mark.long
def test_a_stopped_engine_is_noticed_within_ten_seconds(server: ServerProcess) -> None:
    """With the default --hang-timeout: a stream, a whole answer and a trace that are open."""
    body = {"prompt": "Tell me", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    ended_s: dict[str, float] = {}

    def ask(name: str, send: Callable[[], httpx.Response]) -> httpx.Response:
        response = send()
        ended_s[name] = time.monotonic()
        return response

    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor(3) as pool:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid, signal.SIGSTOP)
            began_s = time.monotonic()
            whole = {"prompt": "hi", "max_tokens": 2}
            answer = pool.submit(ask, "answer", lambda: client.post("/v1/completions", json=whole))
            trace = pool.submit(ask, "trace", lambda: client.get("/v1/requests/none/trace"))
            wait_until(lambda: client.get("/health/ready").status_code == 503, 60, "it is noticed")
            noticed_s = time.monotonic()
            rest = list(lines)
            ended_s["stream"] = time.monotonic()
        assert any('"error"' in line and "has not answered" in line for line in rest)
        for reply in (answer.result(), trace.result()):
            assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
        late_s = max(ended_s.values()) - noticed_s
        print(f"noticed after {noticed_s - began_s:.2f} s, answered {late_s:.2f} s later")
        slower = max(1.0, slowdown())
        assert noticed_s - began_s <= 10.0 * slower and late_s <= 1.0 * slower
        assert client.get("/health/live").status_code == 200
        wait_until(lambda: client.get("/health/ready").status_code == 200, 120, "it is back")
        assert client.post("/v1/completions", json=whole).status_code == 200


def test_ctrl_c_ends_the_server_with_status_0(server: ServerProcess) -> None:
    """Last in this module: the others share the server."""
    engine_pid = server.engine_pid
    assert server.stop() == 0
    assert not os.path.exists(f"/proc/{engine_pid}")
    assert "Traceback" not in server.output


def test_on_engine_death_exit_ends_the_server_with_an_error(tiny: str) -> None:
    options = ("--on-engine-death", "exit", "--policy", "fcfs", "--kv-blocks", "64")
    with running_server(tiny, *options) as server:
        assert server.url
        os.kill(server.engine_pid, signal.SIGKILL)
        assert server.wait(timeout_s=60) == 1
    assert "code -9" in server.output


def test_an_option_that_does_not_fit_the_model_ends_it_at_once(tiny: str) -> None:
    with running_server(tiny, "--max-model-len", "100000") as server:
        assert server.wait(timeout_s=240) == 1
    assert "--max-model-len: 100000 is more than" in server.output
    assert "Traceback" not in server.output


def test_little_kv_memory_is_a_warning_and_a_short_context() -> None:
    with running_server("--kv-memory", "2MiB") as server:
        url = f"{server.url}/v1/completions"
        short = {"prompt": "Once upon a time", "max_tokens": 2}
        answer = httpx.post(url, json=short, timeout=60)
        refused = httpx.post(url, json=short | {"prompt": "word " * 100}, timeout=60)
        assert server.stop() == 0
    (warning,) = (line for line in server.output.splitlines() if "give --kv-memory more" in line)
    found = re.search(r"only (\d+) tokens together", warning)
    assert found and int(found[1]) < 100
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 2
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {found[1]} tokens" in error["message"]
    assert "Traceback" not in server.output


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--max-num-seqs", "0"), 2, "--max-num-seqs: 0 must be at least 1"),
        (("/no/such/folder",), 1, "/no/such/folder"),
    ],
)
def test_a_wrong_option_and_a_missing_model_are_errors(
    arguments: tuple[str, ...], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments], {}) == status
    assert words in capsys.readouterr().err
