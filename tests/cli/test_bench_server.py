"""A server of our own, started and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest

from bros.cli.bench import ServerStartError, local_server
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, vocab_size=1000)
    return save_tokenizer(folder)


def children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


async def test_a_server_answers_inside_the_block_and_is_gone_after_it(model: Path) -> None:
    before = children()
    with pytest.raises(RuntimeError, match="on purpose"):
        async with local_server([str(model), "--policy", "fcfs", "--kv-blocks", "32"]) as url:
            async with httpx.AsyncClient() as client:
                assert (await client.get(f"{url}/health")).status_code == 200
            raise RuntimeError("on purpose")
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"{url}/health")
    assert children() == before


async def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(ServerStartError, match="--policy: 'bross' is not one of"):
        async with local_server(["--policy", "bross"]):
            raise AssertionError("it started")


def test_sigterm_ends_the_server_too(model: Path) -> None:
    before = children()

    async def terminated() -> None:
        options = [str(model), "--policy", "fcfs", "--kv-blocks", "32"]
        async with local_server(options):
            assert children() != before
            signal.raise_signal(signal.SIGTERM)
            await asyncio.sleep(60)

    before_sigint = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # workers of pytest-xdist ignore SIGINT
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(terminated())
    finally:
        signal.signal(signal.SIGINT, before_sigint)
    assert children() == before and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
