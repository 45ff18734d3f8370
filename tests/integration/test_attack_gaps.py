"""What large, slow and hostile inputs of one client do to the streams of others: a server and an
engine as users run them, with a small model, whose steps take a few milliseconds.

tests/server/test_input_attacks.py asks more of the event loop alone, and benchmarks/input_stalls.py
measures the same with a model that is used.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
from input_stalls import ATTACKS, send

from support.server_process import ServerProcess, running_server
from support.tier import by_tier
from support.tiny_tokenizer import save_chat_llama
from support.token_gaps import Gap, OtherLoad, TokenGaps, reading_streams

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(600)]

LONGER_S = 0.05
"""How much longer than usual a gap may be during an attack, on a machine that does nothing else."""
SLOWER = 2.0
"""So much more time a core may need that shares its parts with another one that is busy."""
ALONE = 0.1
"""The machine does something else if others have more than this share of it."""
TRIES = 3
"""Of an attack: any machine pauses now and then. What an attack causes it causes each time."""
SHARE = by_tier(fast=0.1, long=1.0)
USUAL_S = 1.0
MAX_TOKENS = 450
"""Of each stream: nearly the context of the model."""

FAST = {
    *("slow_regexes", "large_join", "large_inputs", "tokenize_8", "allowed_messages"),
    *("waiting_program", "large_values", "wrong_parts", "hostile_grammars", "flood_600"),
    *("open_1000_sessions", "silent_connections"),
}
"""What the fast tier tries."""


@dataclass(frozen=True, slots=True)
class Seen:
    """gaps: between tokens. others: what other processes had of the machine meanwhile."""

    gaps: list[Gap]
    others: float

    @property
    def alone(self) -> bool:
        return self.others <= ALONE

    @property
    def gaps_s(self) -> list[float]:
        """How long the gaps took; beside others without the time in which a core was waited for."""
        return [gap.gap_s if self.alone else gap.gap_s - gap.queued_s for gap in self.gaps]

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s)


class Desk:
    """A server that is attacked, and the streams of another client."""

    def __init__(
        self, server: ServerProcess, gaps: TokenGaps, attacker: ProcessPoolExecutor
    ) -> None:
        self.server = server
        self._gaps = gaps
        self._attacker = attacker

    def usual(self) -> Seen:
        return self.see(lambda: time.sleep(USUAL_S))

    def compare(self, name: str) -> tuple[Seen, Seen]:
        """What is seen before and after an attack, and during it."""
        before, during, after = self.usual(), self.attack(name), self.usual()
        return Seen(before.gaps + after.gaps, max(before.others, after.others)), during

    def attack(self, name: str) -> Seen:
        def send_all() -> None:
            answers = self._attacker.submit(send, self.server.url, name, SHARE).result()
            assert "500" not in answers, answers

        return self.see(send_all)

    def see(self, what: Callable[[], object]) -> Seen:
        """What happens while something is done, and until all streams have gone on after that."""
        self._gaps.take()
        others = OtherLoad()
        what()
        time.sleep(0.1)
        gaps, end_s = self._gaps.take(), time.monotonic() + 60.0
        while sum(gap.gap_s for gap in gaps) < 0.1 and time.monotonic() < end_s:
            time.sleep(0.1)
            gaps += self._gaps.take()
        return Seen(gaps, others.share())


def longest_allowed_s(usual: Seen, seen: Seen) -> float:
    return statistics.median(usual.gaps_s) + LONGER_S * (1.0 if seen.alone else SLOWER)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_llama(folder)
    # Steps of this model are too small for several threads.
    options = ("--threads", "1", "--kv-blocks", "512")
    spawn = multiprocessing.get_context("spawn")
    with (
        running_server(str(folder), *options) as server,
        reading_streams(server.url, MAX_TOKENS, (server.pid, server.engine_pid)) as gaps,
        # An attacker is not on this machine: it takes no time from the server.
        ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=(19,)) as attacker,
    ):
        desk = Desk(server, gaps, attacker)
        desk.attack("idle")
        yield desk


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FAST else pytest.mark.long)
        for name in ATTACKS
        if name != "idle"
    ],
)
def test_no_attack_stalls_the_streams_of_others(desk: Desk, name: str) -> None:
    for _ in range(TRIES):
        usual, seen = desk.compare(name)
        allowed_s = longest_allowed_s(usual, seen)
        if seen.longest_s <= allowed_s:
            break
    print(
        f"{len(seen.gaps_s)} gaps, the longest {1000 * seen.longest_s:.0f} ms, allowed "
        f"{1000 * allowed_s:.0f} ms, usually {1000 * statistics.median(usual.gaps_s):.1f} and up "
        f"to {1000 * usual.longest_s:.0f} ms; others had {seen.others:.2f} of the machine"
    )
    assert seen.longest_s <= allowed_s


@pytest.mark.parametrize("what", ["server", "engine"])
def test_a_stall_is_seen(desk: Desk, what: str) -> None:
    """So the test above could fail."""
    pid = desk.server.pid if what == "server" else desk.server.engine_pid
    usual = desk.usual()
    stall_s = 4 * longest_allowed_s(usual, usual)

    def stall() -> None:
        for _ in range(3):  # so that no stream is without a token before and after all of them
            time.sleep(0.2)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stall_s)
            os.kill(pid, signal.SIGCONT)

    seen = desk.see(stall)
    # The thread that goes on waits for a core more often, where others use the machine.
    assert max(gap.gap_s for gap in seen.gaps) > longest_allowed_s(usual, seen)
