"""What large or slow inputs of one client do to the others: the longest wait for an answer of
/health, the longest gap of a stream, and the memory of the server, meanwhile; and how the server
answered the attack: by the statuses one sees what was served and what was refused.

    python benchmarks/input_stalls.py [--only NAME,...] [--out benchmarks/results] [--quick]
        [-- OPTIONS OF bros serve]

A server process is started; one process sends the attack, and this one asks for /health every 5 ms
and reads a stream. Wall times: run it on an idle machine. `idle` shows what the machine does by
itself. The gaps of the stream are those of the engine's steps, in which the requests of the attack
are computed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from harness import chosen
from quick import add_quick

from bros.bench.results import environment
from bros.core.clock import SystemClock
from bros.server.connections import raise_descriptor_limit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.held_connections import SLOW_HEADERS, Held, holding
from support.hostile_grammars import HOSTILE
from support.server_process import rss_mib, running_server

Attack = Callable[[httpx.AsyncClient, float], Awaitable[Counter[str] | None]]
"""The second argument is the share of its whole size. Returns the answers by status that came on
connections of its own; None without any."""

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]

NO_LIMITS = httpx.Limits(max_connections=None)

SLOW_REGEX = 'regex("(a|aa)+$")'


def some(count: int, share: float) -> int:
    """A share of a number, at least 1."""
    return max(1, round(count * share))


async def idle(http: httpx.AsyncClient, share: float) -> None:
    await asyncio.sleep(2 * share)


async def best_effort(http: httpx.AsyncClient, share: float) -> None:
    """Ordinary work in the time that streams leave, to compare the gaps beside attacks with."""
    body = {"prompt": "Say", "max_tokens": 8, "ignore_eos": True, "service_tier": "flex"}
    await asyncio.gather(
        *(http.post("/v1/completions", json=body) for _ in range(some(400, share)))
    )


async def _session(http: httpx.AsyncClient) -> str:
    found = (await http.post("/v1/sessions", json={})).json()
    return f"/v1/sessions/{found['id']}"


async def _call_with(http: httpx.AsyncClient, transforms: str, text: str, calls: int) -> None:
    """Run calls of one session that transform the same input."""
    session = await _session(http)
    call = {
        "template": "{{input:text}}{{output:answer}}",
        "parameters": [{"name": "text", "value": text, "transforms": transforms}],
        "sampling": {"max_tokens": 1},
    }
    body = {"requests": [call] * calls, "wait": True}
    await http.post(f"{session}/requests", json=body)
    await http.delete(session)


async def slow_regexes(http: httpx.AsyncClient, share: float) -> None:
    """20 sessions of 4 calls each."""
    text, sessions = "a" * 1500 + "b", some(20, share)
    await asyncio.gather(*(_call_with(http, SLOW_REGEX, text, 4) for _ in range(sessions)))


async def large_join(http: httpx.AsyncClient, share: float) -> None:
    text = "[" + ",".join("1" * 500_000) + "]"
    await _call_with(http, f'join("{"x" * 4000}")', text, 1)


async def large_inputs(http: httpx.AsyncClient, share: float) -> None:
    text = "word and " * some(430_000, share)
    await asyncio.gather(*(_call_with(http, "", text, 1) for _ in range(4)))


async def tokenize(http: httpx.AsyncClient, share: float) -> None:
    await http.post("/tokenize", json={"prompt": "word and " * some(440_000, share)})


async def tokenize_allowed(http: httpx.AsyncClient, share: float) -> None:
    """Eight texts that are just short enough."""
    body = {"prompt": ("word and " * 120_000)[: some(2**20, share)]}
    await asyncio.gather(*(http.post("/tokenize", json=body) for _ in range(8)))


async def tokenize_8(http: httpx.AsyncClient, share: float) -> None:
    await asyncio.gather(*(tokenize(http, share) for _ in range(8)))


async def _chats(http: httpx.AsyncClient, messages: list[object]) -> None:
    body = json.dumps({"messages": messages, "max_tokens": 1}, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    await asyncio.gather(
        *(http.post("/v1/chat/completions", content=body, headers=headers) for _ in range(10))
    )


async def empty_messages(http: httpx.AsyncClient, share: float) -> None:
    await _chats(http, [{"role": "user", "content": ""}] * some(60_000, share))


async def empty_parts(http: httpx.AsyncClient, share: float) -> None:
    parts = [{"type": "text", "text": ""}] * some(100_000, share)
    await _chats(http, [{"role": "user", "content": parts}])


async def allowed_messages(http: httpx.AsyncClient, share: float) -> None:
    """As many as are allowed."""
    await _chats(http, [{"role": "user", "content": ""}] * some(10_000, share))


async def allowed_parts(http: httpx.AsyncClient, share: float) -> None:
    parts = [{"type": "text", "text": ""}] * some(10_000, share)
    await _chats(http, [{"role": "user", "content": parts}])


async def largest_bodies(http: httpx.AsyncClient, share: float) -> None:
    """Prompts in bodies of nearly 4 MiB."""
    body = {"prompt": "word and " * some(466_000, share), "max_tokens": 1}
    await asyncio.gather(*(http.post("/v1/completions", json=body) for _ in range(10)))


async def waiting_program(http: httpx.AsyncClient, share: float) -> None:
    """10,000 calls and a request that waits for all of them, until its time is over."""
    session = await _session(http)
    call = {"template": "Say {{output:o}}", "sampling": {"max_tokens": 1}}
    body = {"requests": [call] * some(10_000, share), "wait": True, "timeout_s": 10 * share}
    await http.post(f"{session}/requests", json=body)
    await http.delete(session)


async def large_values(http: httpx.AsyncClient, share: float) -> None:
    """40 million characters that are written with escapes, in replies."""
    session = await _session(http)
    for _ in range(some(20, share)):
        await http.post(f"{session}/variables", json={"name": "v", "value": '"' * 2_000_000})
    await asyncio.gather(*(http.get(f"{session}/variables") for _ in range(2)), http.get(session))
    await http.delete(session)


async def wrong_parts(http: httpx.AsyncClient, share: float) -> None:
    """Programs of a million calls that are none, and tool lists of as many."""
    session, wrong = await _session(http), [1] * some(990_000, share)
    await asyncio.gather(
        http.post(f"{session}/requests", json={"requests": wrong}),
        http.post("/v1/messages", json={"messages": [], "max_tokens": 1, "tools": wrong}),
    )
    await http.delete(session)


async def hostile_grammars(http: httpx.AsyncClient, share: float) -> None:
    """Schemas and grammars that take long to compile, or are refused for what they are made of."""
    messages = [{"role": "user", "content": "Hi"}]
    bodies = [{"messages": messages, "max_tokens": 8, **fields} for fields in HOSTILE.values()]
    await asyncio.gather(
        *(
            http.post("/v1/chat/completions", json=body)
            for body in bodies
            for _ in range(some(5, share))
        )
    )


async def _send_bytes(http: httpx.AsyncClient, data: bytes) -> None:
    """On a connection of its own, until the server closes it or has been silent for a while."""
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(data)
        while await asyncio.wait_for(reader.read(2**16), timeout=2):
            pass
    writer.close()


@contextlib.asynccontextmanager
async def _connected(http: httpx.AsyncClient, count: int) -> AsyncIterator[list[Connection]]:
    """Open connections, which are closed at once at the end."""
    host, port = http.base_url.host, http.base_url.port
    connections = [await asyncio.open_connection(host, port) for _ in range(count)]
    try:
        yield connections
    finally:
        for _, writer in connections:
            writer.transport.abort()


def _request(path: str, body: Mapping[str, object], method: str = "POST") -> bytes:
    content = json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


async def _at_once(
    connections: Sequence[Connection], requests: Sequence[bytes]
) -> list[tuple[str, bytes]]:
    """Send a request on each connection, all at the same instant, as the client of HTTP would not.

    Returns the status and the body of each answer.
    """
    for (_, writer), request in zip(connections, requests, strict=True):
        writer.write(request)
    return await asyncio.gather(*(_answer(reader) for reader, _ in connections))


async def _answer(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length: *(\d+)\r\n", head, re.IGNORECASE)
    assert length is not None, head
    return head.split(maxsplit=2)[1].decode(), await reader.readexactly(int(length[1]))


def _statuses(answers: Sequence[tuple[str, bytes]]) -> Counter[str]:
    return Counter(status for status, _ in answers)


async def small_requests(http: httpx.AsyncClient, share: float) -> Counter[str]:
    """400 connections that are open already send a request each at once, five times."""
    requests = [_request("/v1/chat/completions", {"messages": 1})] * some(400, share)
    found: Counter[str] = Counter()
    async with _connected(http, len(requests)) as connections:
        for _ in range(5):
            found += _statuses(await _at_once(connections, requests))
    return found


async def flood_600(http: httpx.AsyncClient, share: float) -> Counter[str]:
    """600 real-time requests of few tokens at once, of which the queue holds 512."""
    body = {"prompt": "Say", "max_tokens": 2, "ignore_eos": True}
    requests = [_request("/v1/completions", body)] * some(600, share)
    async with _connected(http, len(requests)) as connections:
        return _statuses(await _at_once(connections, requests))


async def open_1000_sessions(http: httpx.AsyncClient, share: float) -> Counter[str]:
    """1,200 at once, of which there may be 1,000; those that were opened are deleted at once."""
    requests = [_request("/v1/sessions", {})] * some(1200, share)
    async with _connected(http, len(requests)) as connections:
        answers = await _at_once(connections, requests)
        opened = [json.loads(body)["id"] for status, body in answers if status == "200"]
        ends = [_request(f"/v1/sessions/{id}", {}, "DELETE") for id in opened]
        await _at_once(connections[: len(ends)], ends)
    return _statuses(answers)


MANY_CONNECTIONS = 2500
"""More than a server has by default (--max-connections)."""


async def silent_connections(http: httpx.AsyncClient, share: float) -> None:
    """They send nothing, and are opened again as soon as the server has closed them."""
    async with holding(http.base_url, Held(some(MANY_CONNECTIONS, share)), every_s=0.1):
        await asyncio.sleep(2 * share)


async def slow_headers(http: httpx.AsyncClient, share: float) -> None:
    """As many connections send a header ten times a second, all at the same instant."""
    held = Held(some(MANY_CONNECTIONS, share), *SLOW_HEADERS)
    async with holding(http.base_url, held, every_s=0.1):
        await asyncio.sleep(2 * share)


async def clients_leave(http: httpx.AsyncClient, share: float) -> None:
    """400 clients leave their streams at once, which are best-effort ones: 400 streams in real time
    have 64 places in a step, and the others wait as long as their pace allows."""
    body = {"prompt": "Say", "max_tokens": 500, "ignore_eos": True, "stream": True}
    body["service_tier"] = "flex"
    async with _connected(http, some(400, share)) as connections:
        for _, writer in connections:
            writer.write(_request("/v1/completions", body))
        await asyncio.sleep(2 * share)
    await asyncio.sleep(1 * share)


async def pipelined(http: httpx.AsyncClient, share: float) -> None:
    """30 connections with 720 KB of requests each."""
    data = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n" * some(20_000, share)
    await asyncio.gather(*(_send_bytes(http, data) for _ in range(30)))


async def tiny_chunks(http: httpx.AsyncClient, share: float) -> None:
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    data = head + b"1\r\n \r\n" * some(300_000, share)
    await asyncio.gather(*(_send_bytes(http, data) for _ in range(10)))


async def near_boundaries(http: httpx.AsyncClient, share: float) -> None:
    """A file of 4 MB of beginnings of boundaries."""
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'
    form = head + b"\r\n--b-" * some(700_000, share) + b"\r\n--b--\r\n"
    headers = {"content-type": "multipart/form-data; boundary=b"}
    await http.post("/v1/files", content=form, headers=headers)


async def huge_integers(http: httpx.AsyncClient, share: float) -> None:
    """In a tool, and in the arguments of a call."""
    numbers = "[" + ",".join(["9" * 4300] * some(900, share)) + "]"
    user = {"role": "user", "content": "x"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": "NUMBERS"}}}
    function = {"name": "f", "arguments": f'{{"a": {numbers}}}'}
    called = {"id": "c", "type": "function", "function": function}
    messages = [user, {"role": "assistant", "tool_calls": [called]}, user]
    headers = {"content-type": "application/json"}
    for body in ({"messages": [user], "tools": [tool]}, {"messages": messages}):
        content = json.dumps(body | {"max_tokens": 1}).replace('"NUMBERS"', numbers)
        await http.post("/v1/chat/completions", content=content, headers=headers)


ATTACKS: dict[str, Attack] = {
    work.__name__: work
    for work in (
        idle, best_effort, slow_regexes, large_join, large_inputs, tokenize, tokenize_8,
        tokenize_allowed, empty_messages, allowed_messages, empty_parts, allowed_parts,
        largest_bodies, waiting_program, large_values, wrong_parts, hostile_grammars,
        small_requests, flood_600, open_1000_sessions, silent_connections, slow_headers,
        clients_leave, pipelined, tiny_chunks, near_boundaries, huge_integers,
    )
}  # fmt: skip


def send(url: str, name: str, share: float = 1.0) -> dict[str, int]:
    """The attack, in a process of its own: what it computes must not delay who measures.

    share: of its whole size.

    Returns status -> number of answers, and those that the attack returns; without others about
    sessions that it opens and deletes.
    """
    raise_descriptor_limit()
    statuses: Counter[str] = Counter()

    async def note(response: httpx.Response) -> None:
        asked = response.request
        if asked.method != "DELETE" and (asked.method, asked.url.path) != ("POST", "/v1/sessions"):
            statuses[str(response.status_code)] += 1

    async def run() -> None:
        hooks = {"response": [note]}
        async with httpx.AsyncClient(
            base_url=url, timeout=300, event_hooks=hooks, limits=NO_LIMITS
        ) as http:
            statuses.update(await ATTACKS[name](http, share) or {})

    asyncio.run(run())
    return dict(sorted(statuses.items()))


class Watch:
    """Measures what others see.

    waits_s: of each request of /health. gap_s: longest time between two events of a stream.
    peak_mib: memory of the server.
    """

    def __init__(self, url: str, pid: int) -> None:
        self.waits_s: list[float] = []
        self.gap_s = 0.0
        self.peak_mib = 0.0
        self._url = url
        self._pid = pid
        self._ends = False

    async def run(self, work: Awaitable[object]) -> None:
        """Watch while the work is done."""
        tasks = [asyncio.create_task(self._ask()), asyncio.create_task(self._stream())]
        await asyncio.sleep(0.5)
        self.waits_s.clear()
        self.gap_s = 0.0
        await work
        self._ends = True
        await asyncio.gather(*tasks)

    async def _ask(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            await http.get("/health")
            while not self._ends:
                begun_s = time.perf_counter()
                await http.get("/health")
                self.waits_s.append(time.perf_counter() - begun_s)
                self.peak_mib = max(self.peak_mib, rss_mib(self._pid))
                await asyncio.sleep(0.005)

    async def _stream(self) -> None:
        body = {"prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as http:
            while not self._ends:
                async with http.stream("POST", "/v1/completions", json=body) as response:
                    last_s = None
                    async for line in response.aiter_lines():
                        now_s = time.perf_counter()
                        if last_s is not None:
                            self.gap_s = max(self.gap_s, now_s - last_s)
                        last_s = now_s if line else last_s
                        if self._ends:
                            break


def lag_counts(url: str) -> dict[float, float]:
    """Upper bound in ms -> lags of the event loop up to it so far, by the server itself."""
    name, found = "bros_event_loop_lag_seconds_bucket", {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(name):
            bound = line.partition('le="')[2].partition('"')[0]
            found[1000 * float(bound)] = float(line.rpartition(" ")[2])
    return found


def longest_lag_ms(before: dict[float, float], after: dict[float, float]) -> float:
    """A bound on the lags between two readings: one of the histogram's."""
    new = {bound: count - before[bound] for bound, count in after.items()}
    return min(bound for bound, count in new.items() if count == max(new.values()))


def measure(url: str, pid: int, name: str) -> dict[str, Any]:
    """What others see of an attack; times in milliseconds."""
    before_mib = rss_mib(pid)
    watch = Watch(url, pid)
    attacker = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    async def attack() -> tuple[float, dict[str, int]]:
        begun_s = time.perf_counter()
        statuses = await asyncio.get_running_loop().run_in_executor(attacker, send, url, name)
        return time.perf_counter() - begun_s, statuses

    async def run() -> tuple[float, dict[str, int]]:
        work = asyncio.ensure_future(attack())
        await watch.run(work)
        return work.result()

    lags = lag_counts(url)
    with attacker:
        took_s, statuses = asyncio.run(run())
    waits_ms = sorted(1000 * wait_s for wait_s in watch.waits_s)
    found = {
        "statuses": statuses,
        "seconds": round(took_s, 1),
        "longest_wait_ms": round(waits_ms[-1], 1),
        "p99_wait_ms": round(waits_ms[len(waits_ms) * 99 // 100], 1),
        "loop_lag_below_ms": longest_lag_ms(lags, lag_counts(url)),
        "stream_gap_ms": round(1000 * watch.gap_s, 1),
        "before_mib": round(before_mib),
        "peak_mib": round(watch.peak_mib),
    }
    print(f"{name:16} {json.dumps(found)}", flush=True)
    return found


def table(attacks: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures as a table in Markdown."""
    head = ("attack", "answers", "longest wait", "p99", "longest gap", "memory")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, found in attacks.items():
        answers = ", ".join(f"{count} with {code}" for code, count in found["statuses"].items())
        lines.append(
            f"| {name} | {answers} | {found['longest_wait_ms']:.0f} ms | "
            f"{found['p99_wait_ms']:.0f} ms | {found['stream_gap_ms']:.0f} ms | "
            f"{found['peak_mib']} MiB |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of attacks, with commas")
    parser.add_argument("--out", type=Path, help="folder for input_stalls_cpu.json")
    parser.add_argument("options", nargs="*", help="options of bros serve")
    add_quick(parser, only="idle")
    given = parser.parse_args()
    names = chosen(parser, "--only", given.only, ATTACKS) if given.only else list(ATTACKS)
    gc.disable()  # else a collection in this process counts as a wait
    with running_server(*given.options) as server:
        found = {name: measure(server.url, server.pid, name) for name in names}
    print(table(found))
    if given.out is not None:
        record = {"environment": asdict(environment(SystemClock())), "attacks": found}
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / "input_stalls_cpu.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
