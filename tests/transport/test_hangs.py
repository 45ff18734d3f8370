"""Engines that hang are noticed and replaced; those that are only slow or suspended are not."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bros.core.errors import EngineDeadError
from bros.core.request import EngineRequest
from bros.executor.model_store import ModelFiles
from bros.transport import process_client
from bros.transport.process_client import ProcessEngineClient
from support.hanging_engine import (
    HANG,
    HANG_WITH_GIL,
    SLOW,
    STOP_PYTHON,
    HangingEngineClient,
    Loading,
)
from support.machine_speed import slowdown
from support.process_engine import TINY_ENGINE, ask, tokens_of
from support.processes import exists

SOON = dataclasses.replace(TINY_ENGINE, hang_timeout=2.0, prefix_cache="off")
NOTICED_S, ANSWERED_S = 10.0, 1.0
"""What is promised with the default --hang-timeout: the longest time until a hang is noticed, and
from then until all clients have their answer, on an idle machine of nominal speed."""
LONG_S = 60.0
"""Nothing takes so long, but the machine may be busy."""


pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(files: ModelFiles) -> AsyncIterator[HangingEngineClient]:
    """For tests that wait until it is back."""
    client = HangingEngineClient(SOON, files, log_level="error")
    await client.start()
    yield client
    await client.close()


@pytest_asyncio.fixture(loop_scope="module")
async def client(shared: HangingEngineClient) -> HangingEngineClient:
    async with asyncio.timeout(LONG_S):
        await shared.wait_ready()
    return shared


def prompting(name: str, token: int, max_tokens: int = 4) -> EngineRequest:
    return dataclasses.replace(ask(name, max_tokens), prompt_token_ids=[5, 6, 7, token])


async def warm(client: ProcessEngineClient) -> None:
    """First steps of a size may take long."""
    for n in range(3):
        await tokens_of(client, prompting(f"warm{n}", 8, max_tokens=12))


async def lost(client: ProcessEngineClient, request: EngineRequest) -> EngineDeadError:
    """Why a request failed. Another one that comes meanwhile fails, too, and in the same moment."""
    return (await timed_loss(client, request))[0]


async def timed_loss(
    client: ProcessEngineClient, request: EngineRequest
) -> tuple[EngineDeadError, float, float]:
    """The same, with the seconds until the client had noticed the loss, and from then until both
    requests had failed."""
    loop = asyncio.get_running_loop()
    ended: list[float] = []

    async def fail(each: EngineRequest) -> EngineDeadError:
        with pytest.raises(EngineDeadError) as caught:
            await tokens_of(client, each)
        ended.append(loop.time())
        return caught.value

    async def notice() -> float:
        while client.alive:
            await asyncio.sleep(0.01)
        return loop.time()

    began_s = loop.time()
    async with asyncio.timeout(LONG_S):
        first, other, noticed_s = await asyncio.gather(fail(request), fail(ask("other")), notice())
    noticed_s, answered_s = noticed_s - began_s, max(ended) - noticed_s
    print(f"noticed after {noticed_s:.2f} s, answered {answered_s:.3f} s later")
    assert str(first) == str(other) and not client.alive
    assert first.retry_after_s is not None and first.retry_after_s > 0
    with pytest.raises(EngineDeadError) as refused:
        await client.submit(ask("too early"))
    assert refused.value.retry_after_s == first.retry_after_s
    return first, noticed_s, answered_s


async def works(client: ProcessEngineClient, replaced: int | None) -> None:
    async with asyncio.timeout(LONG_S):
        await client.wait_ready()
        assert len(await tokens_of(client, ask("after"))) == 8
    assert client.pid != replaced


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        (HANG, "A step of the engine has not ended after"),
        pytest.param(
            STOP_PYTHON, "A step of the engine has not ended after", marks=pytest.mark.long
        ),
        pytest.param(HANG_WITH_GIL, "The engine has not answered for 2 s", marks=pytest.mark.long),
    ],
)
async def test_a_step_that_hangs_is_noticed_and_the_engine_replaced(
    client: HangingEngineClient, token: int, reason: str
) -> None:
    await warm(client)
    pid, num_lost, num_hung = client.pid, client.num_lost, client.num_hung
    error = await lost(client, prompting("hangs", token))
    assert reason in str(error)
    if found := re.search(r"after (\S+) s; (\S+) s were expected", str(error)):
        limit_s = max(1.25, 20 * float(found[2]))  # of time in which it has not waited for a core
        assert 0.9 * limit_s <= float(found[1]) <= 1.2 * limit_s + 0.25
    await works(client, pid)
    assert (client.num_lost, client.num_hung) == (num_lost + 1, num_hung + 1)


async def test_a_stopped_engine_is_noticed_and_replaced(client: HangingEngineClient) -> None:
    pid, num_hung = client.pid, client.num_hung
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    error = await lost(client, ask("open"))
    assert "has not answered" in str(error)
    await works(client, pid)
    assert client.num_hung == num_hung + 1


async def test_steps_ten_times_slower_than_usual_go_on(client: HangingEngineClient) -> None:
    """Half a second each; 20 times the expected time is a second, and the least limit 1.25 s."""
    await warm(client)
    pid = client.pid
    slow = [prompting(f"slow{n}", SLOW) for n in range(4)]
    async with asyncio.timeout(LONG_S):
        answers = await asyncio.gather(*(tokens_of(client, each) for each in slow))
    assert all(len(answer) == 4 for answer in answers) and client.pid == pid


@pytest.mark.long
async def test_with_a_timeout_of_zero_nothing_is_watched(files: ModelFiles) -> None:
    config = dataclasses.replace(SOON, hang_timeout=0.0)
    client = HangingEngineClient(config, files, log_level="error")
    await client.start()
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(5)
    assert client.alive
    os.kill(pid, signal.SIGCONT)
    await works(client, None)
    await client.close()


# ---- While it loads.

LOADING_SOON = dataclasses.replace(SOON, load_timeout=2.0)


def loading_client(files: ModelFiles, loading: Loading, **config: float) -> HangingEngineClient:
    client = HangingEngineClient(
        dataclasses.replace(LOADING_SOON, **config), files, log_level="error"
    )
    client.loading = loading
    return client


@pytest.mark.parametrize(
    "loading", ["sleeps", pytest.param("holds the GIL", marks=pytest.mark.long)]
)
async def test_an_engine_that_hangs_while_it_loads_is_ended_with_the_reason(
    files: ModelFiles, loading: Loading, capfd: pytest.CaptureFixture[str]
) -> None:
    client = loading_client(files, loading)
    async with asyncio.timeout(LONG_S):
        with pytest.raises(EngineDeadError, match="has not loaded its model: .* 2.* s, and does"):
            await client.start()
    assert client.pid is None
    assert "in load_as" in capfd.readouterr().err, "it says where it hangs"


async def test_an_engine_that_hangs_before_it_can_show_its_stacks_is_ended_with_the_reason(
    files: ModelFiles,
) -> None:
    client = loading_client(files, "sleeps deaf")
    async with asyncio.timeout(LONG_S):
        with pytest.raises(EngineDeadError, match="has not loaded its model"):
            await client.start()
    assert client.num_hung == 1


class UnkillableEngineClient(HangingEngineClient):
    """Of a process that waits in the kernel, so that a kill has no effect yet."""

    loading: Loading = "sleeps"

    def _kill(self) -> None:
        pass


async def test_a_load_that_cannot_be_killed_does_not_hold_up_the_end(
    files: ModelFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_client, "_KILLED_S", 0.5)
    client = UnkillableEngineClient(LOADING_SOON, files, log_level="error")
    starting = asyncio.create_task(client.start())
    async with asyncio.timeout(LONG_S):
        while client.pid is None:
            await asyncio.sleep(0.01)
        pid = client.pid
        try:
            await client.close()
            with pytest.raises(EngineDeadError):
                await starting
            assert exists(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
            while exists(pid):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # asyncio hears of its end, too
    assert f"0.5 s after it was killed: process {pid} waits in the kernel" in caplog.text


@pytest.mark.long
async def test_an_engine_that_is_stopped_while_it_loads_is_ended(files: ModelFiles) -> None:
    client = loading_client(files, "computes")
    starting = asyncio.create_task(client.start())
    async with asyncio.timeout(LONG_S):
        while client.pid is None:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="has not loaded its model"):
            await starting


@pytest.mark.parametrize(
    "loading", ["reads slowly", pytest.param("computes", marks=pytest.mark.long)]
)
async def test_an_engine_that_loads_for_much_longer_than_the_timeout_is_not_ended(
    files: ModelFiles, loading: Loading
) -> None:
    client = loading_client(files, loading)
    await client.start()
    assert client.num_lost == 0
    await works(client, None)
    await asyncio.sleep(2 * LOADING_SOON.load_timeout)
    assert client.alive, "an idle engine neither reads nor computes, and does not load"
    await client.close()


@pytest.mark.long
async def test_an_engine_that_hangs_while_it_loads_again_is_replaced(files: ModelFiles) -> None:
    client = loading_client(files, "usual")
    await client.start()
    client.loading = "sleeps"
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(LONG_S):
        while client.pid in (pid, None):
            await asyncio.sleep(0.01)
        client.loading = "usual"
        while not client.alive:
            await asyncio.sleep(0.01)
    assert (client.num_lost, client.num_hung) == (2, 1)
    await works(client, pid)
    await client.close()


@pytest.mark.long
async def test_with_a_load_timeout_of_zero_no_load_is_ended(files: ModelFiles) -> None:
    client = loading_client(files, "sleeps", load_timeout=0.0)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(10.0)
    assert client.pid is not None and not starting.done()
    await client.close()
    with pytest.raises(EngineDeadError):
        await starting


# ---- With the default time, as on a user's machine.


@pytest_asyncio.fixture(loop_scope="module")
async def usual(files: ModelFiles) -> AsyncIterator[HangingEngineClient]:
    config = dataclasses.replace(TINY_ENGINE, prefix_cache="off")
    client = HangingEngineClient(config, files, log_level="error")
    await client.start()
    await warm(client)
    yield client
    await client.close()


@pytest.mark.long
@pytest.mark.parametrize("token", [None, HANG, HANG_WITH_GIL])
async def test_a_hang_is_noticed_and_answered_in_time(
    usual: HangingEngineClient, token: int | None
) -> None:
    """None: the process is stopped. A step that loops is not here: beside other tests it waits for
    a core, which does not count."""
    pid = usual.pid
    assert pid is not None
    if token is None:
        os.kill(pid, signal.SIGSTOP)
    request = ask("open") if token is None else prompting("hangs", token)
    _, noticed_s, answered_s = await timed_loss(usual, request)
    slower = max(1.0, slowdown())
    assert noticed_s <= NOTICED_S * slower
    assert answered_s <= ANSWERED_S * slower
    await works(usual, pid)


@pytest.mark.long
async def test_a_pause_shorter_than_the_timeout_is_none(usual: HangingEngineClient) -> None:
    pid = usual.pid
    assert pid is not None
    for _ in range(3):
        stream = asyncio.create_task(tokens_of(usual, ask("open", max_tokens=100)))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(4.0)
        os.kill(pid, signal.SIGCONT)
        assert len(await stream) == 100
    assert usual.pid == pid


_DEBUGGER = """
import ctypes, os, sys
SEIZE, INTERRUPT = 0x4206, 0x4207
libc = ctypes.CDLL(None)
threads = [int(name) for name in os.listdir(f"/proc/{sys.argv[1]}/task")]
done = [libc.ptrace(what, each, None, None) for what in (SEIZE, INTERRUPT) for each in threads]
print("refused" if any(done) else "held", flush=True)
sys.stdin.read()
"""
"""Holds all threads of a process until its stdin closes: a tracer that ends lets them go on."""


@pytest.mark.long
async def test_an_engine_is_not_replaced_in_a_debugger(usual: HangingEngineClient) -> None:
    pid = usual.pid
    command = [sys.executable, "-c", _DEBUGGER, str(pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as debugger:
        assert debugger.stdin is not None and debugger.stdout is not None
        if debugger.stdout.readline() != b"held\n":
            pytest.skip("no ptrace here")
        stream = asyncio.create_task(tokens_of(usual, ask("open")))
        await asyncio.sleep(15.0)
        assert usual.alive and not stream.done()
        debugger.stdin.close()
        assert len(await stream) == 8 and usual.pid == pid


def _burn(until_s: float) -> None:
    while time.monotonic() < until_s:
        hashlib.sha256(bytes(1_000_000)).digest()


@pytest.mark.long
async def test_a_busy_machine_is_no_reason(usual: HangingEngineClient) -> None:
    """With so many other processes that each core is shared by 25, and the engine yields to all."""
    pid = usual.pid
    assert pid is not None
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.setpriority(os.PRIO_PROCESS, int(thread), 10)
    others = multiprocessing.get_context("spawn")
    until_s = time.monotonic() + 60
    count = 25 * len(os.sched_getaffinity(0))
    load = [others.Process(target=_burn, args=(until_s,)) for _ in range(count)]
    for process in load:
        process.start()
    try:
        answered = 0
        while time.monotonic() < until_s - 1:
            answered += len(await tokens_of(usual, ask(f"r{answered}")))
        print(f"{answered} tokens in a minute")
        assert usual.pid == pid
    finally:
        for process in load:
            process.kill()
        for process in load:
            process.join()


_OWNER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from bros.executor.model_store import ModelFiles
from bros.transport import process_client
from bros.transport.process_client import ProcessEngineClient
from support.processes import exists
from support.process_engine import TINY_ENGINE, ask, tokens_of

async def main():
    client = ProcessEngineClient(TINY_ENGINE, ModelFiles(folder=Path(sys.argv[1]), name="tiny"))
    await client.start()
    n = 0
    while True:
        n += len(await tokens_of(client, ask(f"r{n}")))
        print(client.pid, flush=True)
        await asyncio.sleep(0.1)

asyncio.run(main())
"""


@pytest.mark.long
async def test_a_stopped_server_does_not_kill_its_engine(files: ModelFiles) -> None:
    await asyncio.to_thread(_stop_an_owner, files)


def _stop_an_owner(files: ModelFiles) -> None:
    """Stop a process that owns an engine, alone and together with it, and let it go on."""
    command = [sys.executable, "-c", _OWNER, str(files.folder), str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = server.stdout.readline()
        for both in (False, True):
            stopped = [server.pid, int(pid)] if both else [server.pid]
            for each in stopped:
                os.kill(each, signal.SIGSTOP)
            time.sleep(12)
            for each in stopped:
                os.kill(each, signal.SIGCONT)
            began_s = time.monotonic()
            while time.monotonic() - began_s < 12:
                assert server.stdout.readline() == pid
        server.kill()
