"""What all clients of engines in other processes do, without an engine."""

from __future__ import annotations

import asyncio
import math
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from bros.core.errors import EngineDeadError
from bros.engine.messages import Failed, Heartbeat, Ready
from bros.simulator.virtual_loop import VirtualLoop, run_virtual
from bros.transport import process_client
from bros.transport.ipc import Endpoints, ZmqTransport, open_socket
from bros.transport.process import HEARTBEATS_PER_TIMEOUT
from bros.transport.process_client import HeartbeatMonitor, Receiver, SupervisedClient
from support.killable_engine import INFO


class EndlessClient(SupervisedClient):
    """Of an engine that is up at once and stays so until it is killed."""

    def __init__(self, folder: Path, rank_heartbeat_timeout_s: float | None = None) -> None:
        super().__init__(
            restart=True,
            on_final_death=lambda reason: None,
            grace_s=1.0,
            rank_heartbeat_timeout_s=rank_heartbeat_timeout_s,
        )
        self._folder = folder
        self.killed = asyncio.Event()

    async def _run_once(self) -> str:
        async with AsyncExitStack() as stack:
            self._listen(stack, Endpoints.of(self._folder))
            self.on_reply(Ready(INFO))
            await self.killed.wait()
        return "killed"

    def _kill(self) -> None:
        self.killed.set()


async def test_it_closes_well_after_its_tasks_were_cancelled(tmp_path: Path) -> None:
    """As they are when the loop is ended by an exception in a signal handler."""
    client = EndlessClient(tmp_path)
    await client.start()
    (task,) = [each for each in asyncio.all_tasks() if each.get_name() == "engine-supervisor"]
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(EngineDeadError):
        await client.stats()  # no engine is left to answer
    await client.close()
    assert not client.alive


async def test_an_engine_that_has_given_signs_of_life_is_killed_when_none_come(
    tmp_path: Path,
) -> None:
    client = EndlessClient(tmp_path, rank_heartbeat_timeout_s=0.05)
    await client.start()
    engine = ZmqTransport(tmp_path)
    assert not client.killed.is_set(), "it has not given any yet"
    engine.send(Heartbeat())
    async with asyncio.timeout(10):
        await client.killed.wait()
    await client.close()
    engine.close()


class RestartedClient(EndlessClient):
    """Of engines that do not shut down when they are told to. `ends` lets a killed one end."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.starts = 0
        self.ends = asyncio.Event()

    async def _run_once(self) -> str:
        self.starts += 1
        self.killed.clear()
        reason = await super()._run_once()
        await self.ends.wait()
        return reason


@pytest.mark.parametrize("when", ["shutting down", "killed"])
async def test_a_restart_whose_caller_leaves_takes_place(tmp_path: Path, when: str) -> None:
    client = RestartedClient(tmp_path)
    await client.start()
    restarting = asyncio.create_task(client.restart())
    async with asyncio.timeout(10):
        if when == "killed":
            await client.killed.wait()
        else:
            await asyncio.sleep(0)
        restarting.cancel()
        await asyncio.wait([restarting])
        assert restarting.cancelled()
        await client.killed.wait()
        client.ends.set()
        while client.starts < 2:
            await asyncio.sleep(0.001)
        await client.wait_ready()
    assert client.alive and client.num_lost == 0
    await client.close()


class SlowClient(EndlessClient):
    """Of an engine that becomes ready when `loaded` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.loaded = asyncio.Event()

    async def _run_once(self) -> str:
        await self.loaded.wait()
        return await super()._run_once()


async def test_an_engine_that_does_not_become_ready_is_logged_and_not_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_client, "_SLOW_START_S", 0.06)
    client = SlowClient(tmp_path)
    starting = asyncio.create_task(client.start())
    async with asyncio.timeout(10):
        while len(caplog.messages) < 2:
            await asyncio.sleep(0.01)
        assert not client.killed.is_set() and not client.alive
        client.loaded.set()
        await starting
    count = len(caplog.messages)
    assert all("not ready" in message for message in caplog.messages)
    await asyncio.sleep(0.2)
    assert len(caplog.messages) == count
    await client.close()


class UnkillableClient(SlowClient):
    """Of an engine that does not end when it is killed."""

    def _kill(self) -> None:
        pass


@pytest.mark.parametrize("loads", [True, False])
async def test_an_engine_that_cannot_be_killed_does_not_hold_up_the_end(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loads: bool,
) -> None:
    monkeypatch.setattr(process_client, "_KILLED_S", 0.1)
    client = UnkillableClient(tmp_path)
    starting = asyncio.create_task(client.start())
    if not loads:
        client.loaded.set()
        await starting
    await asyncio.sleep(0.05)  # it loads
    async with asyncio.timeout(10):
        await client.close()
        if loads:
            with pytest.raises(EngineDeadError, match="shutting down"):
                await starting
    (message,) = caplog.messages
    assert message.startswith("the engine has not ended 0.1 s after it was killed: ")
    assert not [each for each in asyncio.all_tasks() if each.get_name().startswith("engine-")]


class HomelessClient(EndlessClient):
    """Of an engine that dies, and then finds no room for so many times."""

    def __init__(self, folder: Path, homeless: int) -> None:
        super().__init__(folder)
        self.homeless, self.lives = homeless, 0

    async def _run_once(self) -> str:
        self.lives += 1
        if self.lives == 1:
            self._was_ready = True
            self.on_reply(Ready(INFO))
            return "lost"
        if self.lives <= 1 + self.homeless:
            self._host_unavailable = True
            return "no room"
        return await super()._run_once()


async def test_want_of_room_is_no_reason_to_give_up(tmp_path: Path) -> None:
    client = HomelessClient(tmp_path, homeless=7)
    await client.start()
    async with asyncio.timeout(60):
        while client.lives < 9:
            await asyncio.sleep(0)
    assert client.alive
    await client.close()


class UnreliableClient(EndlessClient):
    """Of an engine whose starts fail or that dies as soon as it is ready.

    starts: "-" fails, "+" becomes ready.
    """

    def __init__(self, folder: Path, starts: str) -> None:
        super().__init__(folder)
        self._starts = list(starts)

    async def _run_once(self) -> str:
        if not self._starts:
            return await super()._run_once()
        if self._starts.pop(0) == "+":
            self.on_reply(Ready(INFO))
            return "lost"
        return "not started"


async def test_only_failed_starts_in_a_row_stop_the_restarts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_client, "_BACK_OFF_S", 0.0)
    client = UnreliableClient(tmp_path, "+--+--+-")
    await client.start()
    async with asyncio.timeout(10):
        while not client.alive:
            await asyncio.sleep(0)
    assert not client._starts
    await client.close()


class FailingClient(SupervisedClient):
    """Of an engine that may report failures before it is killed, and is not restarted."""

    def __init__(self, folder: Path) -> None:
        self.deaths: list[str] = []
        super().__init__(restart=False, on_final_death=self.deaths.append, grace_s=1.0)
        self._folder = folder
        self.killed = asyncio.Event()

    async def _run_once(self) -> str:
        async with AsyncExitStack() as stack:
            self._listen(stack, Endpoints.of(self._folder))
            self.on_reply(Ready(INFO))
            await self.killed.wait()
        return self._failure

    def _kill(self) -> None:
        self.killed.set()


async def test_the_first_reported_failure_is_the_reason_of_a_death(tmp_path: Path) -> None:
    client = FailingClient(tmp_path)
    await client.start()
    engine = ZmqTransport(tmp_path)
    for reason in ("the disk is full", "a rank is lost"):
        engine.send(Failed(reason))
    async with asyncio.timeout(10):
        while not await _dead_because(client, "a rank is lost"):
            await asyncio.sleep(0.001)
        client.killed.set()
        while not client.deaths:
            await asyncio.sleep(0.001)
    assert client.deaths == ["the disk is full"]
    await client.close()
    engine.close()


async def _dead_because(client: SupervisedClient, reason: str) -> bool:
    if client.alive:
        return False
    with pytest.raises(EngineDeadError) as caught:
        await client.stats()
    return str(caught.value) == reason


# ---- Heartbeats that do not come, in virtual time.


TIMEOUT_S = 8.0


def test_silence_is_noticed_within_the_timeout() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        monitor = HeartbeatMonitor(TIMEOUT_S)
        waiting = asyncio.create_task(monitor.timed_out())
        for _ in range(100):
            monitor.seen()
            await asyncio.sleep(TIMEOUT_S / HEARTBEATS_PER_TIMEOUT)
            assert not waiting.done()
        silent_s = loop.time()
        await waiting
        return loop.time() - silent_s

    assert TIMEOUT_S * 6 / 8 <= run_virtual(main) <= TIMEOUT_S


def test_an_engine_that_pauses_for_less_is_not_noticed() -> None:
    async def main() -> None:
        monitor = HeartbeatMonitor(TIMEOUT_S)
        waiting = asyncio.create_task(monitor.timed_out())
        for _ in range(20):
            monitor.seen()
            await asyncio.sleep(TIMEOUT_S * 6 / 8)
        assert not waiting.done()
        waiting.cancel()

    run_virtual(main)


def test_a_server_that_was_stopped_does_not_take_its_own_silence_for_the_engine_s() -> None:
    """It finds the heartbeats that have come meanwhile, or the next one, in time."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        monitor = HeartbeatMonitor(TIMEOUT_S)
        waiting = asyncio.create_task(monitor.timed_out())
        for _ in range(20):
            monitor.seen()
            await asyncio.sleep(0)
            loop.advance(3600)  # both are suspended: none have come
            await asyncio.sleep(TIMEOUT_S / 2)
        assert not waiting.done()
        waiting.cancel()

    run_virtual(main)


def test_an_engine_that_is_held_by_a_debugger_does_not_time_out() -> None:
    async def main() -> None:
        held = True
        monitor = HeartbeatMonitor(TIMEOUT_S, lambda: math.inf if held else 0.0)
        waiting = asyncio.create_task(monitor.timed_out())
        monitor.seen()
        await asyncio.sleep(10 * TIMEOUT_S)
        assert not waiting.done()
        held = False
        await asyncio.sleep(2 * TIMEOUT_S)
        assert waiting.done()

    run_virtual(main)


def test_time_in_which_the_engine_waits_for_a_core_does_not_count() -> None:
    """An engine that gets a quarter of a core may be silent for four times as long."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        every_s = TIMEOUT_S / HEARTBEATS_PER_TIMEOUT
        monitor = HeartbeatMonitor(TIMEOUT_S, lambda: 3 / 4 * every_s)
        monitor.seen()
        silent_s = loop.time()
        await monitor.timed_out()
        return loop.time() - silent_s

    assert run_virtual(main) == pytest.approx(4 * TIMEOUT_S)


class CountingPull(zmq.Socket[bytes]):
    """Counts the attempts to receive a message."""

    attempts = 0

    def recv_multipart(self, *args: Any, **options: Any) -> Any:
        CountingPull.attempts += 1
        return super().recv_multipart(*args, **options)


async def test_the_receiver_reads_all_messages_and_does_not_try_in_vain(tmp_path: Path) -> None:
    """A vain attempt raises zmq.Again, which costs more than the message."""
    read: list[list[bytes]] = []
    count = 3 * process_client._MESSAGES_PER_CALLBACK + 1
    with zmq.Context() as context, open_socket(context, zmq.PUSH) as push:
        endpoints = Endpoints.of(tmp_path)
        with CountingPull(context, zmq.PULL) as pull:
            pull.bind(endpoints.replies)
            push.connect(endpoints.replies)
            receiver = Receiver(pull, read.append, endpoints)
            for burst in (1, count):
                for number in range(burst):
                    push.send_multipart([b"\0", b"%d" % number])
                while len(read) < burst:
                    await asyncio.sleep(0.01)
                assert [frames[1] for frames in read] == [b"%d" % i for i in range(burst)]
                assert CountingPull.attempts == burst
                read.clear()
                CountingPull.attempts = 0
            receiver.close()
