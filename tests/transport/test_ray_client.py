"""An engine in an actor of a Ray instance of this machine: the same answers as one without, and
what happens when any of its parts ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bros.core.clock import SystemClock
from bros.core.errors import EngineDeadError, PromptTooLongError
from bros.core.request import FinishReason, ServiceClass, Slo
from bros.engine.build import build_engine
from bros.engine.thread_client import ThreadEngineClient
from bros.executor.model_store import ModelFiles
from support.process_engine import TINY_ENGINE, ask, tokens_of
from support.processes import descendants, stop, wait_until_gone
from support.ray_cluster import connected
from support.tiny_models import save_tiny_llama

if TYPE_CHECKING:
    from bros.transport.ray import Cluster, RayEngineClient

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

GONE_S = 20.0
"""Within which everything has ended. It takes less, but the machine may be busy."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return ModelFiles(folder=folder, name=folder.name)


@pytest.fixture(scope="module")
def cluster(ray_address: str) -> Iterator[Cluster]:
    with connected(ray_address) as cluster:
        yield cluster


def make_client(
    cluster: Cluster, files: ModelFiles, *, heartbeat_timeout_s: float = 5.0, **options: object
) -> RayEngineClient:
    from bros.transport.node_allocation import NodeAllocation
    from bros.transport.ray import RayEngineClient

    config = dataclasses.replace(TINY_ENGINE, model=str(files.folder), **options)
    share = NodeAllocation(cpus=config.tp, gpus=0)
    return RayEngineClient(
        cluster, share, config, log_level="error", heartbeat_timeout_s=heartbeat_timeout_s
    )


@pytest.fixture
async def client(cluster: Cluster, files: ModelFiles) -> AsyncIterator[RayEngineClient]:
    client = make_client(cluster, files)
    await client.start()
    yield client
    await client.close()


async def expected_tokens(files: ModelFiles) -> list[int]:
    """What an engine of this process answers."""
    client = ThreadEngineClient(lambda: build_engine(TINY_ENGINE, files, SystemClock()))
    await client.wait_ready()
    try:
        stream = await client.submit(ask("here"))
        return [token async for output in stream for token in output.token_ids]
    finally:
        await client.close()


@pytest.mark.long
async def test_all_of_an_engine_client_passes_the_cluster(
    client: RayEngineClient, files: ModelFiles
) -> None:
    assert client.info.max_model_len == 512
    assert await tokens_of(client, ask("there")) == await expected_tokens(files)

    best_effort = dataclasses.replace(ask("be", 400), service_class=ServiceClass.BE)
    stream = await client.submit(best_effort)
    outputs = aiter(stream)
    first = await anext(outputs)
    assert first.token_ids and first.finish_reason is None
    await client.promote("be", Slo(ttft_s=1.0))
    async with asyncio.timeout(GONE_S):
        while (await client.stats()).by_class[ServiceClass.RT].promoted == 0:
            pass
    trace = await client.trace("be")
    assert trace is not None and trace.service_class is ServiceClass.RT
    await client.abort("be")
    last = [output async for output in outputs][-1]
    assert last.finish_reason is FinishReason.ABORT

    with pytest.raises(PromptTooLongError):
        await client.submit(dataclasses.replace(ask("long"), prompt_token_ids=[5] * 600))
    await client.release("be")
    assert await client.trace("unknown") is None
    assert client.alive and client.num_open == 0


async def test_what_is_killed_fails_open_requests_at_once_and_comes_back(
    client: RayEngineClient,
) -> None:
    before = await tokens_of(client, ask("before"))
    actor = client.pid
    assert actor is not None
    [engine] = descendants(actor)
    stop(engine)  # so that the request is certainly open
    submission = asyncio.create_task(client.submit(ask("lost", 400)))
    question = asyncio.create_task(client.stats())
    await asyncio.sleep(0)
    os.kill(actor, signal.SIGKILL)
    async with asyncio.timeout(120):  # it takes 0.2 s
        # The engine wakes up to end with its actor, and on a slow machine answers before it does.
        with pytest.raises(EngineDeadError, match="actor ended"):
            async for _ in await submission:
                pass
        with contextlib.suppress(EngineDeadError):
            await question
    assert not client.alive
    os.kill(engine, signal.SIGCONT)
    await asyncio.to_thread(wait_until_gone, [engine], GONE_S)
    async with asyncio.timeout(120):
        await client.wait_ready()
    assert client.pid is not None and client.pid != actor
    assert await tokens_of(client, ask("after")) == before

    # The engine alone: its actor ends with it.
    actor = client.pid
    [engine] = descendants(actor)
    stream = await client.submit(ask("lost", 500))
    killed = False
    with pytest.raises(EngineDeadError, match="code -9"):
        async for _ in stream:
            if not killed:
                os.kill(engine, signal.SIGKILL)
            killed = True
    await asyncio.to_thread(wait_until_gone, [actor], GONE_S)


@pytest.mark.long
async def test_silence_is_taken_for_death(cluster: Cluster, files: ModelFiles) -> None:
    """A node that is cut off: what runs there may go on, but its messages are lost."""
    client = make_client(cluster, files, heartbeat_timeout_s=1.0)
    await client.start()
    try:
        actor = client.pid
        assert actor is not None
        everything = [actor, *descendants(actor)]
        for pid in everything:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="has not answered for 1 s"):
            async with asyncio.timeout(120):
                await client.stats()
        assert not client.alive
        for pid in everything:
            os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(wait_until_gone, everything, GONE_S)
    finally:
        await client.close()


@pytest.mark.long
async def test_ranks_share_a_replica(cluster: Cluster, files: ModelFiles) -> None:
    client = make_client(cluster, files, tp=2)
    await client.start()
    try:
        assert client.info.tp == 2
        assert await tokens_of(client, ask("both")) == await expected_tokens(files)
        assert client.pid is not None
        everything = [client.pid, *descendants(client.pid)]
        assert len(everything) >= 4  # actor, launcher, two ranks
    finally:
        await client.close()
    await asyncio.to_thread(wait_until_gone, everything, GONE_S)


@pytest.mark.long
async def test_a_model_that_cannot_be_loaded_says_why(cluster: Cluster, tmp_path: Path) -> None:
    client = make_client(cluster, ModelFiles(folder=tmp_path / "none", name="none"))
    with pytest.raises(EngineDeadError, match="none"):
        await client.start()


@pytest.mark.long
async def test_a_path_in_the_working_directory_is_the_same_for_an_actor(
    cluster: Cluster, files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files.folder.parent)
    client = make_client(cluster, ModelFiles(folder=Path(files.folder.name), name="tiny"))
    await client.start()
    assert client.info.model == files.name
    await client.close()


_SERVER = """
import asyncio, sys
from bros.core.config import EngineConfig
from bros.transport.ray import RayEngineClient
from bros.transport.ray import Cluster
from bros.transport.node_allocation import NodeAllocation

async def main():
    config = EngineConfig(
        model=sys.argv[2], policy="fcfs", kernels="reference", kv_blocks=64, threads=1
    )
    client = RayEngineClient(Cluster(sys.argv[1]), NodeAllocation(1, 0), config, log_level="error")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.long
def test_nothing_outlives_a_server_that_is_killed(ray_address: str, files: ModelFiles) -> None:
    command = [sys.executable, "-c", _SERVER, ray_address, str(files.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        actor = int(server.stdout.readline())
        everything = [actor, *descendants(actor)]
        assert len(everything) == 2
        server.kill()
    wait_until_gone(everything, GONE_S)
