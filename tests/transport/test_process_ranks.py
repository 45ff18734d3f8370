"""The engine in several processes: same answers, and none is left when any of them dies."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bros.core.clock import SystemClock
from bros.core.errors import EngineDeadError
from bros.core.request import expanded
from bros.core.stop_signals import STOP_SIGNALS
from bros.engine.build import build_engine
from bros.executor.model_store import ModelFiles
from bros.transport.process_client import ProcessEngineClient
from support.process_engine import TINY_ENGINE, ask, tokens_of
from support.processes import (
    LOOPBACK,
    descendants,
    exists,
    listening_at,
    ranks_below,
    wait_until_gone,
)

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RANKS = dataclasses.replace(TINY_ENGINE, tp=2, tp_timeout=4.0)
GONE_S = 20.0
"""Within which everything has ended. It takes less, but the machine may be busy."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(files: ModelFiles) -> AsyncIterator[ProcessEngineClient]:
    """For tests that leave it as it was, or wait until it is back."""
    client = ProcessEngineClient(RANKS, files, log_level="error")
    await client.start()
    yield client
    await client.close()


@pytest.fixture
async def client(shared: ProcessEngineClient) -> ProcessEngineClient:
    async with asyncio.timeout(60):
        await shared.wait_ready()
    return shared


def processes_of(client: ProcessEngineClient) -> list[int]:
    """The launcher and its ranks."""
    assert client.pid is not None
    return [client.pid, *descendants(client.pid)]


async def lose_in_a_stream(client: ProcessEngineClient, pid: int, number: signal.Signals) -> str:
    """Send a signal while tokens come; returns why no more do."""
    stream = await client.submit(ask("long", max_tokens=500))
    sent = False
    with pytest.raises(EngineDeadError) as caught:
        async with asyncio.timeout(GONE_S + RANKS.tp_timeout):
            async for _ in stream:
                if not sent:
                    os.kill(pid, number)
                sent = True
    assert sent
    return str(caught.value)


async def gone(group: list[int]) -> None:
    """While the client goes on."""
    await asyncio.to_thread(wait_until_gone, group, GONE_S)


async def back(client: ProcessEngineClient, before: list[int]) -> None:
    """Wait for other processes than those."""
    async with asyncio.timeout(60):
        while not client.alive or client.pid in before:
            await asyncio.sleep(0.02)


async def test_ranks_answer_as_one_process_does(
    client: ProcessEngineClient, files: ModelFiles
) -> None:
    assert client.info.tp == 2 and client.info.num_kv_blocks == 64
    assert list(ranks_below(os.getpid())) == [0, 1]
    answers = await asyncio.gather(
        *(tokens_of(client, ask(f"r{n}", max_tokens=24)) for n in range(5))
    )
    alone = build_engine(TINY_ENGINE, files, SystemClock())
    alone.submit(ask("alone", max_tokens=24))
    expected: list[int] = []
    while alone.has_work:
        expected += (token for output in map(expanded, alone.step()) for token in output.token_ids)
    alone.close()
    assert answers == [expected] * 5


async def test_ranks_meet_where_only_this_machine_can_reach_them(
    client: ProcessEngineClient,
) -> None:
    assert listening_at(processes_of(client)) == {LOOPBACK}


@pytest.mark.long
async def test_whatever_happens_to_a_rank_ends_the_group_and_a_new_one_comes(
    client: ProcessEngineClient,
) -> None:
    before = await tokens_of(client, ask("before", max_tokens=24))
    events = [
        (1, signal.SIGKILL, False),
        (0, signal.SIGSTOP, True),
        (1, signal.SIGSTOP, False),
        (0, signal.SIGKILL, False),
        (1, signal.SIGKILL, True),
    ]
    for rank, number, idle in events:
        group, ranks = processes_of(client), ranks_below(os.getpid())
        if idle:
            os.kill(ranks[rank], number)
        else:
            reason = await lose_in_a_stream(client, ranks[rank], number)
            # Who reports first is a matter of luck: another rank, the launcher, or the server.
            assert re.search(f"rank {rank} was ended by SIGKILL|does not answer", reason)
        await gone(group)
        await back(client, group)
        assert await tokens_of(client, ask("after", max_tokens=24)) == before


@pytest.mark.long
@pytest.mark.parametrize("rank", [1, 2])
async def test_a_rank_among_three_that_is_killed_in_a_stream_ends_all(
    files: ModelFiles, rank: int
) -> None:
    client = ProcessEngineClient(
        dataclasses.replace(RANKS, tp=3), files, log_level="error", restart=False
    )
    await client.start()
    group, ranks = processes_of(client), ranks_below(os.getpid())
    assert list(ranks) == [0, 1, 2]
    reason = await lose_in_a_stream(client, ranks[rank], signal.SIGKILL)
    assert re.search(f"rank {rank} was ended by SIGKILL|does not answer", reason)
    await gone(group)
    await client.close()


@pytest.mark.long
async def test_a_rank_that_hangs_as_soon_as_it_is_ready_is_noticed(
    client: ProcessEngineClient,
) -> None:
    group = processes_of(client)
    os.kill(ranks_below(os.getpid())[0], signal.SIGSTOP)  # before it gave its first heartbeat
    await gone(group)
    await back(client, group)
    assert len(await tokens_of(client, ask("after", max_tokens=24))) == 24


@pytest.mark.long
async def test_a_rank_that_hangs_in_a_step_is_noticed_before_the_others_stop_waiting(
    files: ModelFiles,
) -> None:
    """By rank 0, whose step does not end."""
    config = dataclasses.replace(RANKS, tp_timeout=60.0, hang_timeout=2.0)
    client = ProcessEngineClient(config, files, log_level="error")
    await client.start()
    for number in range(2):  # not one of its first steps
        await tokens_of(client, ask(f"before{number}", max_tokens=24))
    group = processes_of(client)
    reason = await lose_in_a_stream(client, ranks_below(client.pid or 0)[1], signal.SIGSTOP)
    assert reason.startswith("A step of the engine has not ended after")
    await gone(group)
    await back(client, group)
    assert len(await tokens_of(client, ask("after", max_tokens=24))) == 24
    await client.close()


async def test_signals_to_everybody_leave_the_ranks_to_their_server(
    client: ProcessEngineClient,
) -> None:
    group = processes_of(client)
    for pid in group:
        for number in STOP_SIGNALS:
            os.kill(pid, number)
    assert len(await tokens_of(client, ask("still here", max_tokens=24))) == 24
    assert processes_of(client) == group


@pytest.mark.long
async def test_the_end_of_a_terminal_does_not_reach_ranks_under_nohup(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        client = ProcessEngineClient(RANKS, files, log_level="error")
        await client.start()
    finally:
        signal.signal(signal.SIGHUP, before)
    group = processes_of(client)
    for pid in group:
        os.kill(pid, signal.SIGHUP)
    assert len(await tokens_of(client, ask("still here", max_tokens=24))) == 24
    assert processes_of(client) == group
    await client.close()


@pytest.mark.long
async def test_closing_ends_all_ranks_quietly(
    files: ModelFiles, capfd: pytest.CaptureFixture[str]
) -> None:
    client = ProcessEngineClient(RANKS, files, log_level="warning")
    await client.start()
    group = processes_of(client)
    await client.close()
    assert not any(map(exists, group))
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


@pytest.mark.long
async def test_closing_does_not_wait_for_a_rank_that_hangs(files: ModelFiles) -> None:
    client = ProcessEngineClient(RANKS, files, log_level="error")
    await client.start()
    group = processes_of(client)
    os.kill(ranks_below(os.getpid())[1], signal.SIGSTOP)
    async with asyncio.timeout(GONE_S):
        await client.close()
    await gone(group)


@pytest.mark.long
async def test_ranks_that_cannot_load_the_model_say_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    broken = ModelFiles(folder=tmp_path, name="broken")
    before = ranks_below(os.getpid())  # of the engine that the tests above share
    client = ProcessEngineClient(RANKS, broken, log_level="error")
    with pytest.raises(EngineDeadError, match="NoSuchModel"):
        await client.start()
    await client.close()
    assert ranks_below(os.getpid()) == before


OWNER = """
import asyncio, sys
from pathlib import Path
from bros.core.config import EngineConfig
from bros.transport.process_client import ProcessEngineClient
from bros.executor.model_store import ModelFiles

async def main():
    files = ModelFiles(folder=Path(sys.argv[1]), name="tiny")
    config = EngineConfig(policy="fcfs", kernels="reference", kv_blocks=64, threads=1, tp=2)
    client = ProcessEngineClient(config, files, log_level="error")
    await client.start()
    print(client.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.long
async def test_the_ranks_end_when_their_server_is_gone(files: ModelFiles) -> None:
    await asyncio.to_thread(_kill_an_owner, files)


def _kill_an_owner(files: ModelFiles) -> None:
    """Kill a process that owns ranks without giving it a chance to clean up."""
    command = [sys.executable, "-c", OWNER, str(files.folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        launcher = int(owner.stdout.readline())
        group = [launcher, *descendants(launcher)]
        ranks = ranks_below(owner.pid)
        assert list(ranks) == [0, 1]
        folder = Path(Path(f"/proc/{launcher}/cmdline").read_text().split("\0")[-2])
        assert folder.is_dir()
        os.kill(ranks[1], signal.SIGSTOP)  # it can do nothing for that
        owner.kill()
    wait_until_gone(group, GONE_S)
    assert not folder.exists()


@pytest.mark.long
async def test_a_launcher_that_is_killed_takes_its_ranks_along_and_a_new_group_comes(
    client: ProcessEngineClient,
) -> None:
    before = await tokens_of(client, ask("before", max_tokens=24))
    group = processes_of(client)
    assert client.pid is not None
    os.kill(ranks_below(os.getpid())[1], signal.SIGSTOP)  # it can do nothing for that
    os.kill(client.pid, signal.SIGKILL)
    await gone(group)
    await back(client, group)
    assert await tokens_of(client, ask("after", max_tokens=24)) == before


async def test_closing_ends_all_ranks(client: ProcessEngineClient) -> None:
    """Last in this module: the others share the group."""
    group = processes_of(client)
    await client.close()
    assert not any(map(exists, group))
