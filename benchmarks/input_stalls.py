"""What large or slow inputs of one client do to the others: the longest wait for an answer of
/health and the memory of the server, meanwhile.

    python benchmarks/input_stalls.py [--only NAME,...] [--quick] [-- OPTIONS OF bros serve]

A server process is started; this process sends the attack and asks for /health every 5 ms. Wall
times: run it on an idle machine. `idle` shows what the machine does by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from quick import add_quick

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.server_process import rss_mib, running_server

Attack = Callable[[httpx.AsyncClient], Awaitable[object]]

SLOW_REGEX = 'regex("(a|aa)+$")'


async def idle(http: httpx.AsyncClient) -> None:
    await asyncio.sleep(2)


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


async def slow_regexes(http: httpx.AsyncClient) -> None:
    """20 sessions of 4 calls each."""
    text = "a" * 1500 + "b"
    await asyncio.gather(*(_call_with(http, SLOW_REGEX, text, 4) for _ in range(20)))


async def large_join(http: httpx.AsyncClient) -> None:
    text = "[" + ",".join("1" * 500_000) + "]"
    await _call_with(http, f'join("{"x" * 4000}")', text, 1)


async def large_inputs(http: httpx.AsyncClient) -> None:
    text = "word and " * 430_000
    await asyncio.gather(*(_call_with(http, "", text, 1) for _ in range(4)))


async def tokenize(http: httpx.AsyncClient) -> None:
    await http.post("/tokenize", json={"prompt": "word and " * 440_000})


async def tokenize_8(http: httpx.AsyncClient) -> None:
    await asyncio.gather(*(tokenize(http) for _ in range(8)))


async def _chats(http: httpx.AsyncClient, messages: list[object]) -> None:
    body = json.dumps({"messages": messages, "max_tokens": 1}, separators=(",", ":")).encode()
    headers = {"content-type": "application/json"}
    await asyncio.gather(
        *(http.post("/v1/chat/completions", content=body, headers=headers) for _ in range(10))
    )


async def empty_messages(http: httpx.AsyncClient) -> None:
    await _chats(http, [{"role": "user", "content": ""}] * 60_000)


async def empty_parts(http: httpx.AsyncClient) -> None:
    parts = [{"type": "text", "text": ""}] * 100_000
    await _chats(http, [{"role": "user", "content": parts}])


ATTACKS: dict[str, Attack] = {
    work.__name__: work
    for work in (
        idle, slow_regexes, large_join, large_inputs, tokenize, tokenize_8, empty_messages,
        empty_parts,
    )
}  # fmt: skip


async def measure(url: str, pid: int, name: str) -> None:
    """Print the longest wait for /health and the peak memory during an attack."""
    longest_s, peak_mib, ends = 0.0, 0.0, False

    async def others() -> None:
        nonlocal longest_s, peak_mib
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            await http.get("/health")
            while not ends:
                begun_s = time.perf_counter()
                await http.get("/health")
                longest_s = max(longest_s, time.perf_counter() - begun_s)
                peak_mib = max(peak_mib, rss_mib(pid))
                await asyncio.sleep(0.005)

    def attack() -> None:
        async def run() -> None:
            async with httpx.AsyncClient(base_url=url, timeout=300) as http:
                await ATTACKS[name](http)

        asyncio.run(run())

    before_mib = rss_mib(pid)
    watching = asyncio.create_task(others())
    await asyncio.sleep(0.2)
    begun_s = time.perf_counter()
    await asyncio.to_thread(attack)
    took_s = time.perf_counter() - begun_s
    ends = True
    await watching
    print(
        f"{name:16} {took_s:7.1f} s   longest wait {1000 * longest_s:7.0f} ms   "
        f"memory {before_mib:5.0f} -> {peak_mib:5.0f} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of attacks, with commas")
    parser.add_argument("options", nargs="*", help="options of bros serve")
    add_quick(parser, only="idle")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(ATTACKS)
    with running_server(*given.options) as server:
        for name in names:
            asyncio.run(measure(server.url, server.pid, name))


if __name__ == "__main__":
    main()
