"""The engine in a process of its own: same answers, and nothing hangs when it dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bros.core.errors import EngineDeadError, PromptTooLongError
from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest, FinishReason, SamplingParams, ServiceClass
from bros.core.stop_signals import STOP_SIGNALS
from bros.executor.model_store import ModelFiles
from bros.transport.process_client import ProcessEngineClient
from support.process_engine import TINY_ENGINE, ask, tokens_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(files: ModelFiles) -> AsyncIterator[ProcessEngineClient]:
    """For tests that leave it as it was, or wait until it is back."""
    client = ProcessEngineClient(TINY_ENGINE, files, log_level="error")
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def client(shared: ProcessEngineClient) -> ProcessEngineClient:
    async with asyncio.timeout(60):
        await shared.wait_ready()
    return shared


async def test_answers_stats_refusals_and_aborts_pass_the_socket(
    client: ProcessEngineClient,
) -> None:
    assert client.alive and client.info.num_kv_blocks == 64
    answers = await asyncio.gather(*(tokens_of(client, ask(f"r{n}")) for n in range(5)))
    assert len(answers[0]) == 8 and answers.count(answers[0]) == 5
    with pytest.raises(PromptTooLongError) as caught:
        await client.submit(
            EngineRequest(request_id="long", prompt_token_ids=[1] * 5000, sampling=SamplingParams())
        )
    assert caught.value.prompt_tokens == 5000
    stream = await client.submit(ask("endless", max_tokens=200))
    await client.abort("endless")
    reasons = [output.finish_reason async for output in stream]
    assert reasons[-1] in (FinishReason.ABORT, FinishReason.LENGTH)
    assert (await client.stats()).kv_blocks_used == 0
    assert await client.trace("never heard of") is None
    relaxed = await client.submit(
        dataclasses.replace(ask("relaxed"), service_class=ServiceClass.BE)
    )
    assert relaxed.service_class is ServiceClass.BE
    assert [output async for output in relaxed][-1].finish_reason is FinishReason.LENGTH


async def test_cache_salts_and_cached_tokens_pass_the_socket(client: ProcessEngineClient) -> None:
    before = await client.stats()
    found = []
    for number, salt in enumerate(("", "a", "b", "a", "")):
        asked = dataclasses.replace(
            ask(f"r{number}"), prompt_token_ids=list(range(31, 71)), cache_salt=salt
        )
        outputs = [output async for output in await client.submit(asked)]
        assert not any(output.cached_tokens for output in outputs[1:])
        found.append(outputs[0].cached_tokens)
    assert found == [0, 0, 0, 32, 32]
    stats = await client.stats()
    # Of each of the three: 47 tokens were computed, which is two full blocks.
    cached = stats.kv_blocks_cached - before.kv_blocks_cached
    assert (cached, stats.kv_blocks_shared, stats.kv_blocks_used) == (6, 0, 0)
    of_class = ServiceClass.RT
    prefix_tokens = [each.by_class[of_class].prefix_tokens for each in (before, stats)]
    assert prefix_tokens[1] - prefix_tokens[0] == 64


async def test_a_killed_engine_fails_open_requests_at_once_and_comes_back(
    client: ProcessEngineClient,
) -> None:
    before = await tokens_of(client, ask("before"))
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # so that the request is certainly open when the engine dies
    submission = asyncio.create_task(client.submit(ask("open", max_tokens=200)))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="ended unexpectedly"):
        await asyncio.wait_for(submission, timeout=60)
    assert not client.alive
    with pytest.raises(EngineDeadError):
        await client.submit(ask("too early"))
    await asyncio.wait_for(client.wait_ready(), timeout=60)
    assert client.alive and client.pid != pid
    assert await tokens_of(client, ask("after")) == before


@pytest.mark.long
async def test_an_engine_that_is_alive_has_a_process(client: ProcessEngineClient) -> None:
    """At every turn of the loop: who waits for another process would else take none for one."""
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        while client.alive:
            assert client.pid == pid
            await asyncio.sleep(0)
        while not client.alive:
            await asyncio.sleep(0)
    assert client.pid not in (None, pid)


async def test_a_watcher_is_told_by_every_engine_that_comes_up(client: ProcessEngineClient) -> None:
    heard = asyncio.Queue[EngineReport]()
    client.subscribe(heard.put_nowait)
    asked = dataclasses.replace(ask("r", max_tokens=1), prompt_token_ids=list(range(1, 41)))
    for killed in (True, False):
        async with asyncio.timeout(60):
            assert await heard.get() == EngineReport(version=1, full=True)
            await tokens_of(client, asked)
            while not (report := await heard.get()).cached_prefixes:
                pass
        assert report.cached_prefixes == (("r", 32),) and not report.full
        if killed:
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            while client.alive:  # what it said before is still heard
                await asyncio.sleep(0.01)
            while not heard.empty():
                heard.get_nowait()


@pytest.mark.long
async def test_an_engine_is_restarted_when_it_is_asked_to_and_not_when_it_dies(
    files: ModelFiles,
) -> None:
    deaths: list[str] = []
    client = ProcessEngineClient(
        TINY_ENGINE, files, log_level="error", restart=False, on_final_death=deaths.append
    )
    await client.start()
    before, pid = await tokens_of(client, ask("before")), client.pid
    async with asyncio.timeout(60):
        await client.restart()
        assert client.alive and client.pid != pid
        assert await tokens_of(client, ask("after")) == before
        pid = client.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # one that does not end by itself is killed
        await client.restart()
    assert await tokens_of(client, ask("at last")) == before
    assert deaths == [] and not _exists(pid)
    assert client.pid is not None and client.num_lost == 0
    os.kill(client.pid, signal.SIGKILL)  # unasked: its owner is told
    async with asyncio.timeout(60):
        while not deaths:
            await asyncio.sleep(0.01)
    assert "code -9" in deaths[0] and not client.alive
    assert (client.num_lost, client.num_hung) == (1, 0)
    await client.close()


async def test_an_engine_that_replaces_another_one_measures_no_steps(files: ModelFiles) -> None:
    """There is no folder to store their times in."""
    config = dataclasses.replace(TINY_ENGINE, policy="bros")
    client = ProcessEngineClient(config, files, log_level="error")
    await client.start()
    measured = client.info.profile
    assert measured and client.pid is not None
    async with asyncio.timeout(60):
        os.kill(client.pid, signal.SIGKILL)
        while client.alive:
            await asyncio.sleep(0.01)
        await client.wait_ready()
    assert client.info.profile == measured
    await client.close()


async def test_an_engine_that_is_closed_ends_by_itself_and_quietly(
    files: ModelFiles, capfd: pytest.CaptureFixture[str]
) -> None:
    client = ProcessEngineClient(TINY_ENGINE, files, log_level="info")
    await client.start()
    pid = client.pid
    await client.close()
    assert pid is not None and not _exists(pid)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("ticks", range(6))
async def test_closing_while_the_process_is_being_started_does_not_hang(
    files: ModelFiles, ticks: int
) -> None:
    client = ProcessEngineClient(TINY_ENGINE, files, log_level="error")
    starting = asyncio.create_task(client.start())
    for _ in range(ticks):
        await asyncio.sleep(0)
    starting.cancel()
    async with asyncio.timeout(30):
        await asyncio.gather(starting, client.close(), return_exceptions=True)
    assert client.pid is None and not client.alive


async def test_an_engine_that_cannot_even_be_started_says_why(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    deaths: list[str] = []
    client = ProcessEngineClient(
        TINY_ENGINE, files, log_level="error", on_final_death=deaths.append
    )
    async with asyncio.timeout(60):
        with pytest.raises(EngineDeadError, match="could not be started"):
            await client.start()
    assert len(deaths) == 1
    await client.close()


async def test_a_signal_to_the_whole_group_leaves_the_engine_to_its_server(
    client: ProcessEngineClient,
) -> None:
    pid = client.pid
    assert pid is not None
    for number in STOP_SIGNALS:
        os.kill(pid, number)
    assert len(await tokens_of(client, ask("still here"))) == 8 and client.pid == pid


async def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    files = ModelFiles(folder=tmp_path, name="broken")
    deaths: list[str] = []
    client = ProcessEngineClient(
        TINY_ENGINE, files, log_level="error", on_final_death=deaths.append
    )
    with pytest.raises(EngineDeadError, match="NoSuchModel"):
        await client.start()
    await client.close()


OWNER = """
import asyncio, sys
from pathlib import Path
from bros.core.config import EngineConfig
from bros.transport.process_client import ProcessEngineClient
from bros.executor.model_store import ModelFiles

async def main():
    files = ModelFiles(folder=Path(sys.argv[1]), name="tiny")
    config = EngineConfig(policy="fcfs", kernels="reference", kv_blocks=64, threads=1)
    client = ProcessEngineClient(config, files, log_level="error")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_engine_ends_when_its_server_is_gone(files: ModelFiles) -> None:
    await asyncio.to_thread(_kill_an_owner, files)


def _kill_an_owner(files: ModelFiles) -> None:
    """Kill a process that owns an engine without giving it a chance to clean up."""
    command = [sys.executable, "-c", OWNER, str(files.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        engine_pid = int(owner.stdout.readline())
        assert _exists(engine_pid)
        owner.kill()
    deadline = time.monotonic() + 60
    while _exists(engine_pid):
        assert time.monotonic() < deadline, "the engine outlives its server"
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
