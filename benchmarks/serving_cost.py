"""How much of the engine's throughput reaches the clients of `bros serve`, and what serving costs.

    python benchmarks/serving_cost.py [--streams 1,8,32,64] [--modes stream,whole] [--rounds 3]
        [--weights int4] [--trees . ../before] [--quick] [--json FILE]

The same chats run in turns on an engine of its own process that is stepped by hand ("alone"), and
over HTTP on `bros serve`. Both have the embedded model and the same options. Every chat has its own
question and an answer of a given length, longer with few chats, and all begin at once.

The client only looks at its sockets every 20 ms, so that it takes next to no processor time. Times
are from the first request to the last byte, or the last step. Processor time is that of all threads
of a process, from the kernel's scheduler, which counts nanoseconds.

Medians of the rounds:

    tok/s, of alone     output tokens per second, and their share of those of the engine alone
    step ms, to step    a step by the server's own account, and the time from one to the next
    engine, server,     microseconds of processor time per token of the engine's process, of the
    client us           server's and of this one

Run nothing else on the machine. Beside other load only the processor times can be compared, and
only those of turns.

--trees: source trees whose servers are compared; "alone" is of the tree of this script.
"""

from __future__ import annotations

import argparse
import json
import re
import select
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import benchmark_parser, chosen, greedy_request, in_process, save, table_of
from rich.console import Console
from stream_speed import DONE, Server, unchunked

from bros.core.clock import SystemClock
from bros.core.collector import Collector
from bros.core.config import EngineConfig
from bros.core.request import ServiceClass
from bros.executor.model_store import resolve_model
from bros.profiling.profiles import profile_folders
from bros.text.tokenizer import Tokenizer

MODES = ("stream", "whole", "be-stream", "be-whole")
"""Real-time or best-effort; streamed or not."""
POLL_S = 0.02
TOKENS = {1: 384, 8: 192}
"""Output tokens of each chat, by the number of chats; MANY for all other numbers."""
MANY = 96
STEPS = re.compile(r"^bros_engine_(steps_total|step_seconds_total) (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Run:
    """All chats of a round on one target.

    target: "alone", or the tree of a server.
    steps, step_s: their number and their total duration.
    engine_s, server_s, client_s: processor seconds of the processes; 0 for those that take no part.
    """

    target: str
    mode: str
    streams: int
    tokens: int
    elapsed_s: float
    steps: float
    step_s: float
    engine_s: float
    server_s: float = 0.0
    client_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s


def cpu_s(pid: int) -> float:
    """Processor seconds so far of the threads of a process that have not ended."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def children(pid: int) -> list[int]:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for each in threads for child in (each / "children").read_text().split()]


def question(number: int) -> list[dict[str, str]]:
    """The messages of a chat; no two chats have a question in common."""
    return [{"role": "user", "content": f"{number} is my number. Write a long story about it."}]


# ---- The engine alone


class Alone:
    """An engine in a process of its own, which is idle while others are measured."""

    def __init__(self, weights: str, data_dir: Path) -> None:
        self._connection = in_process(_step_by_hand, weights, data_dir)

    def run(self, mode: str, numbers: range, tokens: int) -> Run:
        self._connection.send((mode, numbers, tokens))
        found: Run = self._connection.recv()
        return found


def _step_by_hand(connection: Connection, weights: str, data_dir: Path) -> None:
    """Run what an Alone asks for: mode, numbers of the chats, tokens of each answer."""
    # Late: it imports torch, which the client does not need.
    from bros.engine.build import build_engine

    files = resolve_model(None, data_dir)
    tokenizer = Tokenizer.load(files.folder)
    config = EngineConfig(weights=weights)
    engine = build_engine(config, files, SystemClock(), profiles=profile_folders(data_dir))
    with Collector():
        connection.send("ready")
        while True:
            try:
                mode, numbers, tokens = connection.recv()
            except EOFError:  # the benchmark has ended
                return
            service_class = ServiceClass.BE if mode.startswith("be") else ServiceClass.RT
            requests = [
                greedy_request(
                    str(number),
                    tokenizer.apply_chat_template(question(number)),
                    tokens,
                    service_class,
                )
                for number in numbers
            ]
            before, steps = time.process_time(), 0
            began = time.perf_counter()
            for request in requests:
                engine.submit(request)
            while engine.has_work:
                engine.step()
                steps += 1
            elapsed_s = time.perf_counter() - began
            used_s = time.process_time() - before
            total = len(numbers) * tokens
            run = Run(
                "alone", mode, len(numbers), total, elapsed_s, steps, elapsed_s, engine_s=used_s
            )
            connection.send(run)


# ---- The same over HTTP


class Served:
    """`bros serve` of one source tree."""

    def __init__(self, tree: str, options: Sequence[str]) -> None:
        self.server = Server(tree, ("-m", "bros", "serve", "--port", "0", *options))
        (self._engine,) = children(self.server.pid)

    def run(self, mode: str, numbers: range, tokens: int) -> Run:
        requests = [request_of(number, mode, tokens) for number in numbers]
        engine_s, server_s = cpu_s(self._engine), cpu_s(self.server.pid)
        steps, step_s = self._steps()
        client_s, began = time.process_time(), time.perf_counter()
        responses = exchange((self.server.host, self.server.port), requests)
        elapsed_s, client_s = time.perf_counter() - began, time.process_time() - client_s
        engine_s, server_s = cpu_s(self._engine) - engine_s, cpu_s(self.server.pid) - server_s
        after, after_s = self._steps()
        total = sum(map(tokens_of, responses))
        assert total == len(numbers) * tokens, f"{total} tokens for {len(numbers)} chats"
        return Run(
            self.server.tree,
            mode,
            len(numbers),
            total,
            elapsed_s,
            after - steps,
            after_s - step_s,
            engine_s,
            server_s,
            client_s,
        )

    def _steps(self) -> tuple[float, float]:
        """Number of steps so far and their seconds."""
        url = f"http://{self.server.host}:{self.server.port}/metrics"
        with urllib.request.urlopen(url) as reply:
            found = dict(STEPS.findall(reply.read().decode()))
        return float(found["steps_total"]), float(found["step_seconds_total"])


def request_of(number: int, mode: str, tokens: int) -> bytes:
    body: dict[str, Any] = {
        "messages": question(number),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "service_tier": "flex" if mode.startswith("be") else "default",
    }
    if mode.endswith("stream"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    content = json.dumps(body).encode()
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)
    )


def exchange(address: tuple[str, int], requests: Sequence[bytes]) -> list[bytes]:
    """Send each request on a connection of its own; returns what came until these were closed."""
    sockets = [socket.create_connection(address) for _ in requests]
    for each, request in zip(sockets, requests, strict=True):
        each.sendall(request)
        each.setblocking(False)
    parts: dict[socket.socket, list[bytes]] = {each: [] for each in sockets}
    open_sockets = set(sockets)
    while open_sockets:
        time.sleep(POLL_S)
        for each in select.select(open_sockets, (), (), 0)[0]:
            part = each.recv(2**20)
            parts[each].append(part)
            if not part:
                open_sockets.remove(each)
                each.close()
    return [b"".join(parts[each]) for each in sockets]


def tokens_of(response: bytes) -> int:
    """The output tokens that a response with usage has."""
    if b"transfer-encoding: chunked" in response:
        body = unchunked(response)
        *_, last = body.removesuffix(DONE).strip().split(b"\n\n")
        reply = json.loads(last.removeprefix(b"data: "))
    else:
        reply = json.loads(response.partition(b"\r\n\r\n")[2])
    return int(reply["usage"]["completion_tokens"])


# ---- Rounds and their report


def measure(args: argparse.Namespace, report: Callable[[str], None]) -> Iterator[Run]:
    """The runs of all targets in turns, after a warm-up."""
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        targets: list[Alone | Served] = [Alone(args.weights, Path(scratch))]
        for number, tree in enumerate(args.trees):
            place = ("--data-dir", scratch, "--store", f"{scratch}/store-{number}")
            options = ("--weights", args.weights, "--log-level", "warning", *place)
            served = Served(tree, options)
            stack.callback(served.server.stop)
            targets.append(served)
        first = 1000  # numbers of four digits: all questions have as many tokens
        for target in targets:
            target.run(MODES[0], range(first, first := first + 8), 16)
        for number in range(args.rounds):
            for streams in args.streams:
                tokens = min(args.most_tokens, TOKENS.get(streams, MANY))
                for mode in args.modes:
                    report(f"round {number + 1} of {args.rounds}: {streams} chats, {mode}")
                    for target in targets:
                        yield target.run(mode, range(first, first := first + streams), tokens)


def summary(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Medians of the runs of each target, mode and number of chats."""
    groups: dict[tuple[str, str, int], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.target, run.mode, run.streams), []).append(run)
    rows = []
    for (target, mode, streams), group in groups.items():
        alone = groups["alone", mode, streams]

        def per_token_us(seconds: Sequence[float], group: Sequence[Run] = group) -> float:
            pairs = zip(seconds, group, strict=True)
            return statistics.median(1e6 * used_s / run.tokens for used_s, run in pairs)

        shares = [
            run.tokens_per_s / other.tokens_per_s for run, other in zip(group, alone, strict=True)
        ]
        rows.append(
            {
                "target": target,
                "mode": mode,
                "streams": streams,
                "tokens_per_s": statistics.median(run.tokens_per_s for run in group),
                "share_of_alone": statistics.median(shares),
                "step_ms": statistics.median(1e3 * run.step_s / run.steps for run in group),
                "step_to_step_ms": statistics.median(
                    1e3 * run.elapsed_s / run.steps for run in group
                ),
                "engine_us_per_token": per_token_us([run.engine_s for run in group]),
                "server_us_per_token": per_token_us([run.server_s for run in group]),
                "client_us_per_token": per_token_us([run.client_s for run in group]),
            }
        )
    return sorted(rows, key=lambda row: (MODES.index(row["mode"]), row["streams"]))


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    headings = (
        "chats", "target", "tok/s", "of alone", "step ms", "to step", "engine us", "server us",
        "client us",
    )  # fmt: skip
    for mode in dict.fromkeys(row["mode"] for row in rows):
        cells = [
            (
                row["streams"],
                row["target"][-24:],
                f"{row['tokens_per_s']:.0f}",
                f"{row['share_of_alone']:.1%}",
                f"{row['step_ms']:.2f}",
                f"{row['step_to_step_ms']:.2f}",
                f"{row['engine_us_per_token']:.0f}",
                f"{row['server_us_per_token']:.1f}",
                f"{row['client_us_per_token']:.1f}",
            )
            for row in rows
            if row["mode"] == mode
        ]
        console.print(table_of(f"{mode}: medians; us of processor time per token", headings, cells))


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1, most_tokens=8, streams="1,8", modes="stream,whole")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,8,32,64", metavar="N,...", help="numbers of chats")
    parser.add_argument("--modes", default=",".join(MODES), metavar="MODE,...")
    parser.add_argument("--weights", default="int4")
    parser.add_argument("--most-tokens", type=int, default=1024, help="bound on an answer's tokens")
    parser.add_argument("--trees", nargs="+", default=["."], metavar="FOLDER")
    args = parser.parse_args()
    args.modes = chosen(parser, "--modes", args.modes, MODES)
    args.streams = [int(count) for count in args.streams.split(",")]
    console = Console()
    runs = list(measure(args, lambda line: console.print(line, style="dim")))
    rows = summary(runs)
    show(rows, console)
    save(
        args.json, {"weights": args.weights, "medians": rows, "runs": [asdict(run) for run in runs]}
    )


if __name__ == "__main__":
    main()
