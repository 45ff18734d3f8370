"""A server under mixed load for a long time, while its engines are killed and stopped: does every
request get an answer, and does anything grow?

    python benchmarks/soak.py [--duration 3600] [--kill-every 300] [--stop-every 600] [--load 1]
        [--out benchmarks/results] [--quick] [-- OPTIONS OF bros serve]
    python benchmarks/soak.py --page benchmarks/results      (only write soak.md from soak_cpu.json)

`bros serve --replicas 2` with the embedded model. Clients send chats (streamed), flex chats,
completions, programs in sessions and batches; some disconnect while they wait, and some leave
their sessions to expire. Every --kill-every seconds an engine gets SIGKILL, every --stop-every
seconds one gets SIGSTOP, and SIGCONT after 30 s if it still exists. In the second half of the run
only replica 0 is disturbed, so that the memory of the other engine can be watched for long.

The exit status is 1, with the reasons, unless all of this holds:

- every request is answered completely, or fails with an error of FAILURES;
- every row of every batch has exactly one outcome;
- after the last request, what is held for clients is what it was before the first one;
- memory does not grow while a process lives: Theil-Sen slope over the second half of each long
  life, and of all short lives together, see GROWTH_MIB_PER_H;
- an engine holds no more than its predecessors did at the same age, and the server no more than at
  the start when it is idle: memory, descriptors, threads, KV blocks, tasks, see RISE;
- a lost engine is noticed and replaced in time, and the server logs no traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from harness import folder_with
from prometheus_client.parser import text_string_to_metric_families
from quick import add_quick

from bros.bench.results import environment
from bros.core.clock import SystemClock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.processes import children, descendants, exists
from support.server_process import ServerProcess, running_server

RESULTS = Path(__file__).with_name("results")
SERVER = (
    *("--replicas", "2", "--threads", "1", "--weights", "int4"),
    # So small that the cache is full, and its memory resident, after a few minutes.
    *("--kv-blocks", "256", "--host-kv-blocks", "64"),
    *("--session-ttl", "30"),
)

FAILURES: Mapping[str, int] = {
    "rate_limit_exceeded": 429,
    "overloaded": 429,
    "engine_unavailable": 503,
    "upstream_failed": 424,
    "get_timeout": 504,
}
"""Code -> status of the errors that a valid request may get while engines are lost."""

RETRY_AFTER = frozenset({429, 503})
"""Statuses that must come with Retry-After."""

BEST_EFFORT_FACTOR = 6.0
"""Best-effort requests and batches may take so many times as long as others: they run in the time
that real-time requests leave, which is none while the machine is overloaded."""
NOTICED_S = {"kill": 2.0, "stop": 10.0}
"""Kind of disturbance -> longest time until the server knows; --hang-timeout is 8 s."""
LAG_S = 0.05
"""What is promised of the server's event loop, see docs/security.md; a bound of its histogram."""

REPLACED_S = 120.0
STOPPED_S = 30.0
DRAINED_S = 120.0
"""Until everything is released after the last request."""

GROWTH_MIB_PER_H = {"server": 24.0, "engine": 48.0}
"""Steepest slope of resident memory while a process lives."""
LONG_S = 600.0
"""A slope is judged if it was sampled for so long. Shorter lives of engines are judged together."""

SETTLED_S = 90.0
"""Age from which engines are compared: the KV cache of most is full, and its memory resident."""
SAME_AGE_S = 35.0
"""Engines are compared for so long: those that begin after a stop are killed 130 s later, with the
usual options."""
PARTS = 10
"""The run has so many parts of the same length, compared by the least that the server holds."""
ENOUGH = 6
"""A trend is judged if it has so many values."""

SLACK = {"descriptors": 8, "threads": 8}
"""What may be left of pools that start their members when needed. All else is exact."""

RISE: Mapping[str, float] = {"rss_mib": 24.0, **SLACK}
"""How much more a figure may be at the end of its trend. RISE_EXACT for all that is not named."""
RISE_EXACT = 0.5
"""Less than the one thing that is left over and over."""

Json = dict[str, Any]


# ---- What clients saw.


class Failed(Exception):
    """The request failed with an error of FAILURES."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Broken(Exception):
    """The answer is incomplete, wrong, or an error that it must not be."""


@dataclass
class Kind:
    """Requests of one kind.

    ended: requests by outcome: complete, disconnected, or the code of a failure.
    seconds: duration of complete ones.
    gap_s: longest time between two events of a stream, or before the first.
    """

    sent: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    gap_s: float = 0.0


@dataclass
class Ledger:
    """rows: outcomes of rows of batches. troubles: what was done to engines. broken: reasons why
    the run has failed."""

    kinds: dict[str, Kind] = field(default_factory=lambda: defaultdict(Kind))
    rows: Counter[str] = field(default_factory=Counter)
    troubles: list[Json] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)

    @property
    def sent(self) -> int:
        return sum(kind.sent for kind in self.kinds.values())

    @property
    def failed(self) -> int:
        fine = ("complete", "disconnected")
        return sum(
            count
            for kind in self.kinds.values()
            for outcome, count in kind.ended.items()
            if outcome not in fine
        )


def judge(status: int | None, body: object, headers: Mapping[str, str]) -> Failed:
    """The failure that an error response means. status: None within a stream or batch.

    Raises Broken if it is not an error that the load may cause.
    """
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not error.keys() >= {"message", "type", "param", "code"}:
        raise Broken(f"status {status} without an error envelope: {str(body)[:200]}")
    code = str(error["code"])
    if code not in FAILURES or status not in (None, FAILURES[code]) or not error["message"]:
        raise Broken(f"status {status}: {str(error)[:300]}")
    if status in RETRY_AFTER and "retry-after" not in {name.lower() for name in headers}:
        raise Broken(f"status {status}, {code}, without Retry-After")
    return Failed(code)


def judge_rows(sent: Sequence[str], lines: Sequence[str]) -> Counter[str]:
    """Outcomes of the rows of a batch. lines: of its output and error files. Raises Broken."""
    found: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    for line in lines:
        row = json.loads(line)
        found[row["custom_id"]] += 1
        response = row.get("response") or {}
        if response.get("status_code") == 200:
            check_complete(response["body"])
            outcomes["complete"] += 1
        else:
            body = response.get("body") or {"error": row.get("error")}
            # The store keeps no headers, and its errors have only some of the fields.
            error = {"param": None, "type": "", **(body.get("error") or {})}
            outcomes[judge(None, {"error": error}, {}).code] += 1
    twice = sorted(name for name, count in found.items() if count > 1)
    lost = sorted(set(sent) - found.keys())
    if twice or lost or len(found) != len(sent):
        raise Broken(f"a batch of {len(sent)} rows: lost {lost[:5]}, twice {twice[:5]}")
    return outcomes


TOKENS = 24
"""Of every answer: exactly as many, so that a part of an answer is recognized."""


def check_complete(answer: Mapping[str, Any]) -> None:
    """Raises Broken."""
    tokens = answer["usage"]["completion_tokens"]
    reasons = [choice["finish_reason"] for choice in answer["choices"]]
    if tokens != TOKENS or reasons != ["length"]:
        raise Broken(f"an answer of {tokens} tokens that ended with {reasons}")


# ---- What clients do.


@dataclass
class Client:
    """One request: where it goes, and what it may use."""

    http: aiohttp.ClientSession
    rng: random.Random
    kind: Kind
    ledger: Ledger

    def text(self, words: int) -> str:
        return " ".join(f"word{self.rng.randrange(5000)}" for _ in range(words))

    def chat(self, **fields: Any) -> Json:
        """A third of the chats have a long common system prompt."""
        messages = [{"role": "user", "content": f"What about {self.text(8)}?"}]
        if self.rng.random() < 0.33:
            content = "You know all these words: " + "alpha beta gamma delta " * 25
            messages.insert(0, {"role": "system", "content": content})
        return {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, **fields}

    async def call(self, method: str, path: str, **arguments: Any) -> Any:
        """The JSON of a response with status 200. Raises Failed or Broken."""
        async with self.http.request(method, path, **arguments) as response:
            text = await response.text()
            try:
                body = json.loads(text)
            except ValueError:
                raise Broken(f"{method} {path}: {response.status} {text[:200]}") from None
            if response.status != 200:
                raise judge(response.status, body, response.headers)
            return body

    async def events(self, body: Json) -> Any:
        """The events of a streamed chat, in order. Raises Failed or Broken."""
        path, last_s = "/v1/chat/completions", time.monotonic()
        async with self.http.post(path, json=body) as response:
            if response.status != 200:
                raise judge(response.status, await response.json(), response.headers)
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now_s = time.monotonic()
                self.kind.gap_s, last_s = max(self.kind.gap_s, now_s - last_s), now_s
                if line.strip() == b"data: [DONE]":
                    return
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    raise judge(None, event, {})
                yield event
        raise Broken("a stream ended without [DONE]")


Work = Callable[[Client], Awaitable[str]]
"""Does one request; returns its outcome, or raises Failed or Broken."""


async def stream(client: Client) -> str:
    last: Json = {}
    reason = None
    options = {"include_usage": True}
    async for event in client.events(client.chat(stream=True, stream_options=options)):
        last = event
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
    check_complete({"usage": last["usage"] or {}, "choices": [{"finish_reason": reason}]})
    return "complete"


async def disconnect(client: Client) -> str:
    """Half of the clients leave before the first token, half after some."""
    body = client.chat(stream=True, max_tokens=200)
    with contextlib.suppress(Failed):
        if client.rng.random() < 0.5:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(client.rng.random() * 0.3):
                    async for _ in client.events(body):
                        pass
        else:
            enough = client.rng.randrange(2, 20)
            events = client.events(body)
            async with contextlib.aclosing(events):
                async for _ in events:
                    enough -= 1
                    if not enough:
                        break
    return "disconnected"


async def flex(client: Client) -> str:
    body = client.chat(service_tier="flex")
    check_complete(await client.call("POST", "/v1/chat/completions", json=body))
    return "complete"


async def completion(client: Client) -> str:
    body = {"prompt": client.text(40), "max_tokens": TOKENS, "ignore_eos": True, "seed": 1}
    check_complete(await client.call("POST", "/v1/completions", json=body))
    return "complete"


async def program(client: Client) -> str:
    """Three maps and a reduce. Some clients do not delete their session, and some do not even wait
    for the values: both are left to expire."""
    session = (await client.call("POST", "/v1/sessions", json={}))["id"]
    path = f"/v1/sessions/{session}"
    sampling = {"max_tokens": 12, "ignore_eos": True}
    requests: list[Json] = [
        {
            "name": "map",
            "template": f"Summarize: {client.text(20)} {{{{output:o}}}}",
            "parameters": [{"name": "o", "variable": f"part{n}"}],
            "sampling": sampling,
        }
        for n in range(3)
    ]
    requests.append(
        {
            "name": "reduce",
            "template": "All of: {{input:a}} {{input:b}} {{input:c}} {{output:o}}",
            "parameters": [
                *({"name": name, "variable": f"part{n}"} for n, name in enumerate("abc")),
                {"name": "o", "variable": "all"},
            ],
            "sampling": sampling,
        }
    )
    leaves = client.rng.random()
    work = client.call("POST", f"{path}/requests", json={"requests": requests, "wait": True})
    if leaves < 0.1:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(work, 0.2)
        return "disconnected"
    done = await work
    values = [value for call in done["requests"] for value in (call.get("values") or {}).values()]
    if len(values) != 4:
        raise Broken(f"a program of 4 calls with {len(values)} values")
    if leaves > 0.3:
        await client.call("DELETE", path)
    return "complete"


BATCH_ROWS = 25


async def batch(client: Client) -> str:
    """Upload, run, read and delete; each row has exactly one outcome."""
    names = [f"row-{n}" for n in range(BATCH_ROWS)]
    path = "/v1/chat/completions"
    rows = [
        {"custom_id": name, "method": "POST", "url": path, "body": client.chat()} for name in names
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    content = "".join(json.dumps(row) + "\n" for row in rows)
    form.add_field("file", content.encode(), filename="rows.jsonl")
    file = await client.call("POST", "/v1/files", data=form)
    wanted = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
    found = await client.call("POST", "/v1/batches", json=wanted)
    while found["status"] in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(1.0)
        found = await client.call("GET", f"/v1/batches/{found['id']}")
    if found["status"] != "completed":
        raise Broken(f"a batch has ended as {found['status']}: {found.get('errors')}")
    results = [found[key] for key in ("output_file_id", "error_file_id") if found.get(key)]
    lines: list[str] = []
    for each in results:
        async with client.http.get(f"/v1/files/{each}/content") as response:
            lines += (await response.text()).splitlines()
    client.ledger.rows.update(judge_rows(names, lines))
    for each in (file["id"], *results):
        await client.call("DELETE", f"/v1/files/{each}")
    return "complete"


@dataclass(frozen=True)
class Traffic:
    """every_s: mean time between two requests at --load 1. patience: factor on --answer-within."""

    work: Work
    every_s: float
    patience: float = 1.0


TRAFFIC: Mapping[str, Traffic] = {
    "stream": Traffic(stream, 3.0),
    "disconnect": Traffic(disconnect, 8.0),
    "flex": Traffic(flex, 8.0, BEST_EFFORT_FACTOR),
    "completion": Traffic(completion, 8.0),
    "program": Traffic(program, 12.0),
    "batch": Traffic(batch, 90.0, BEST_EFFORT_FACTOR),
}


class Load:
    """Clients that come at random times until `end`."""

    def __init__(
        self, url: str, ledger: Ledger, load: float, seed: int, answer_within_s: float
    ) -> None:
        self._answer_within_s = answer_within_s
        self._http = aiohttp.ClientSession(
            url,
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._ledger = ledger
        self._load = load
        self._rng = random.Random(seed)
        self._arrivals: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        for name in TRAFFIC:
            self._arrivals.append(asyncio.create_task(self._arrive(name)))

    async def one_of_each(self) -> None:
        await asyncio.gather(*(self._one(name) for name in TRAFFIC))

    async def end(self) -> None:
        """Wait for the open requests."""
        for arrivals in self._arrivals:
            arrivals.cancel()
        await asyncio.gather(*self._arrivals, return_exceptions=True)
        await asyncio.gather(*self._open)

    async def close(self) -> None:
        for task in (*self._arrivals, *self._open):
            task.cancel()
        await asyncio.gather(*self._arrivals, *self._open, return_exceptions=True)
        await self._http.close()

    async def _arrive(self, name: str) -> None:
        first = 1.0 if name == "batch" else None  # so that a short run has one
        while True:
            mean_s = TRAFFIC[name].every_s / self._load
            await asyncio.sleep(first or self._rng.expovariate(1.0 / mean_s))
            first = None
            task = asyncio.create_task(self._one(name))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _one(self, name: str) -> None:
        kind, traffic = self._ledger.kinds[name], TRAFFIC[name]
        kind.sent += 1
        begun_s = time.monotonic()
        limit_s = self._answer_within_s * traffic.patience
        client = Client(self._http, random.Random(self._rng.random()), kind, self._ledger)
        try:
            async with asyncio.timeout(limit_s):
                outcome = await traffic.work(client)
            if outcome == "complete":
                kind.seconds.append(time.monotonic() - begun_s)
        except Failed as failed:
            outcome = failed.code
        except Broken as broken:
            outcome = self._broken(name, str(broken))
        except TimeoutError:
            outcome = self._broken(name, f"no answer after {limit_s:.0f} s")
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            outcome = self._broken(name, f"{type(error).__name__}: {error}")
        kind.ended[outcome] += 1

    def _broken(self, name: str, reason: str) -> str:
        self._ledger.broken.append(f"{name}: {reason}")
        print(f"BROKEN {name}: {reason}", flush=True)
        return "broken"


# ---- What the server holds.


def engines(server: int) -> dict[int, int]:
    """Number of a replica -> the process id of its engine, for those that run."""
    found = {}
    for pid in children(server):
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            folder = Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2])
            found[json.loads((folder / "launch.json").read_text())["replica"]] = pid
    return found


def process_figures(pid: int) -> Json | None:
    """None if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines)
    if "VmRSS" not in values:
        return None
    return {
        "pid": pid,
        "rss_mib": round(int(values["VmRSS"].split()[0]) / 1024, 2),
        "descriptors": descriptors,
        "threads": int(values["Threads"]),
    }


HELD = ("kv_blocks", "pinned_blocks", "open_requests", "sessions", "tasks", "processes")
"""What a sample has of the whole server."""


class Watch:
    """Samples of what a server holds."""

    def __init__(self, server: ServerProcess, began_s: float) -> None:
        self.samples: list[Json] = []
        self._server = server
        self._began_s = began_s
        self._http = aiohttp.ClientSession(
            server.url,
            timeout=aiohttp.ClientTimeout(total=20),
            connector=aiohttp.TCPConnector(force_close=True),
        )

    async def close(self) -> None:
        await self._http.close()

    async def replicas(self) -> list[Json]:
        async with self._http.get("/admin/replicas") as response:
            found: list[Json] = (await response.json())["data"]
            return found

    async def metrics(self) -> dict[str, float]:
        """Name of a metric -> sum over its labels."""
        async with self._http.get("/metrics") as response:
            text = await response.text()
        found: dict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] += sample.value
                if sample.name == "bros_event_loop_lag_seconds_bucket":
                    found[f"lag_le_{sample.labels['le']}"] = sample.value
        return found

    async def take(self) -> Json:
        """A sample. Figures of engines are 0 while one of them does not answer."""
        metrics = await self.metrics()
        replicas = await self.replicas()
        sample: Json = {
            "at_s": round(time.monotonic() - self._began_s, 1),
            "load_average": os.getloadavg()[0],
            "up": sum(replica["state"] == "up" for replica in replicas),
            "kv_blocks": metrics["bros_kv_blocks_used"] + metrics["bros_kv_blocks_shared"],
            "pinned_blocks": metrics["bros_kv_blocks_pinned"],
            "open_requests": sum(replica["open"] for replica in replicas)
            + metrics["bros_requests_running"]
            + metrics["bros_requests_waiting"],
            "sessions": metrics["bros_sessions"],
            "tasks": metrics["bros_event_loop_tasks"],
            "processes": len(descendants(self._server.pid)),
            "server": process_figures(self._server.pid),
            "engines": {
                str(number): figures
                for number, pid in sorted(engines(self._server.pid).items())
                if (figures := process_figures(pid)) is not None
            },
        }
        self.samples.append(sample)
        return sample

    async def wait_until_up(self, count: int, timeout_s: float) -> float | None:
        """Seconds until so many replicas are up; None if they are not in time."""
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < timeout_s:
            replicas = await self.replicas()
            if sum(replica["state"] == "up" for replica in replicas) == count:
                return time.monotonic() - begun_s
            await asyncio.sleep(0.2)
        return None


def differences(before: Json, after: Json) -> list[str]:
    """What is held after a run and was not before."""
    found = [
        f"{name}: {before[name]:.0f} before, {after[name]:.0f} after"
        for name in HELD
        if after[name] > before[name]
    ]
    pairs = {"server": (before["server"], after["server"])}
    for number, figures in before["engines"].items():
        pairs[f"engine {number}"] = (figures, after["engines"].get(number))
    for name, (old, new) in pairs.items():
        if old is None or new is None:
            found.append(f"{name} does not run")
            continue
        found += [
            f"{key} of {name}: {old[key]} before, {new[key]} after"
            for key, slack in SLACK.items()
            if new[key] > old[key] + slack
        ]
    return found


# ---- Growth.


@dataclass
class Life:
    """A process from its first sample to its last.

    process: `server`, or `engine` and the number of its replica.
    points: (time of the run in seconds, figures of the process, the whole sample).
    """

    process: str
    pid: int
    points: list[tuple[float, Json, Json]] = field(default_factory=list)

    @property
    def begun_s(self) -> float:
        return self.points[0][0]

    @property
    def seconds(self) -> float:
        return self.points[-1][0] - self.begun_s

    def memory(self, from_age_s: float) -> list[tuple[float, float]]:
        """(hour, MiB)."""
        return [
            (at_s / 3600.0, figures["rss_mib"])
            for at_s, figures, _ in self.points
            if at_s - self.begun_s >= from_age_s
        ]


def lives(samples: Sequence[Json]) -> list[Life]:
    """Of every process, in the order in which they begin."""
    found: dict[tuple[str, int], Life] = {}
    for sample in samples:
        named = {"server": sample["server"]}
        named |= {f"engine {number}": each for number, each in sample["engines"].items()}
        for name, figures in named.items():
            if figures is not None:
                life = found.setdefault((name, figures["pid"]), Life(name, figures["pid"]))
                life.points.append((sample["at_s"], figures, sample))
    return list(found.values())


@dataclass(frozen=True)
class Growth:
    """Resident memory of a process in the second half of a long life, or of all engines with short
    lives, each from the age of SETTLED_S on.

    lives: how many processes these are.
    minutes: how long they were sampled, all together.
    first_mib, last_mib: medians over the lives.
    mib_per_h: None if there are too few samples.
    at_most: limit of mib_per_h; None if the time is too short for a judgement.
    """

    process: str
    lives: int
    minutes: float
    first_mib: float
    last_mib: float
    mib_per_h: float | None
    at_most: float | None

    @property
    def too_steep(self) -> bool:
        limited = self.at_most is not None and self.mib_per_h is not None
        return limited and self.mib_per_h > self.at_most


def theil_sen(*series: Sequence[tuple[float, float]]) -> float | None:
    """The median slope of all pairs of points of the same series. Points: (x, y); None without a
    pair."""
    slopes = [
        (y2 - y1) / (x2 - x1)
        for points in series
        for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
        if x2 != x1
    ]
    return statistics.median(slopes) if slopes else None


def growths(found: Sequence[Life]) -> list[Growth]:
    short: list[list[tuple[float, float]]] = []
    growth = []
    for life in found:
        half = life.memory(life.seconds / 2)
        if life.process == "server" or _hours(half) * 3600.0 >= LONG_S:
            growth.append(_growth(life.process, [half]))
        elif points := life.memory(SETTLED_S):
            short.append(points)
    if short:
        growth.append(_growth("engine, short lives", short))
    return growth


def _growth(process: str, series: Sequence[Sequence[tuple[float, float]]]) -> Growth:
    hours = sum(_hours(points) for points in series)
    judged = hours * 3600.0 >= LONG_S
    bound = GROWTH_MIB_PER_H["server" if process == "server" else "engine"]
    return Growth(
        process=process,
        lives=len(series),
        minutes=hours * 60.0,
        first_mib=statistics.median(points[0][1] for points in series),
        last_mib=statistics.median(points[-1][1] for points in series),
        mib_per_h=theil_sen(*series),
        at_most=bound if judged else None,
    )


def _hours(points: Sequence[tuple[float, float]]) -> float:
    return points[-1][0] - points[0][0] if points else 0.0


@dataclass(frozen=True)
class Trend:
    """A figure of one engine after the other at the same age, or of the server part by part.

    points: (time of the run in seconds, value).
    rise: how much it grows from the first to the last, by the Theil-Sen slope; None if there are
        fewer than ENOUGH points.
    at_most: limit of rise.
    """

    figure: str
    points: list[tuple[float, float]]
    rise: float | None
    at_most: float

    @property
    def rises(self) -> bool:
        return self.rise is not None and self.rise > self.at_most


def _trend(name: str, figure: str, points: Sequence[tuple[float, float | None]]) -> Trend:
    """name: in the page. figure: in a sample. Points without a value are left out."""
    known = [(at_s, value) for at_s, value in points if value is not None]
    slope = theil_sen(known) if len(known) >= ENOUGH else None
    rise = None if slope is None else slope * (known[-1][0] - known[0][0])
    return Trend(name, known, rise, RISE.get(figure, RISE_EXACT))


def at_the_same_age(found: Sequence[Life]) -> list[Trend]:
    """What engines that began in the run hold between SETTLED_S and SAME_AGE_S later, in the order
    in which they began; those that did not live so long are left out."""
    first_s = min((life.begun_s for life in found), default=0.0)
    replacements = [
        life
        for life in found
        if life.process != "server"
        and life.begun_s > first_s
        and life.seconds >= SETTLED_S + SAME_AGE_S
    ]
    windows = [
        (
            life.begun_s,
            [
                (figures, sample)
                for at_s, figures, sample in life.points
                if SETTLED_S <= at_s - life.begun_s <= SETTLED_S + SAME_AGE_S
            ],
        )
        for life in replacements
    ]

    def own(name: str, figure: str, of: Callable[[list[float]], float]) -> Trend:
        values = [(at_s, [figures[figure] for figures, _ in window]) for at_s, window in windows]
        points = [(at_s, of(each) if each else None) for at_s, each in values]
        return _trend(f"{name} of an engine", figure, points)

    def whole(name: str, figure: str) -> Trend:
        points = [
            (at_s, _least_idle([sample for _, sample in window], figure))
            for at_s, window in windows
        ]
        return _trend(f"{name} of the server", figure, points)

    return [
        own("MiB", "rss_mib", statistics.median),
        *(own(figure, figure, min) for figure in SLACK),
        whole("kv blocks", "kv_blocks"),
        whole("tasks", "tasks"),
    ]


def part_by_part(samples: Sequence[Json]) -> list[Trend]:
    """The least that the server holds while it is idle, in each of PARTS of the run."""
    if not samples:
        return []
    first_s, last_s = samples[0]["at_s"], samples[-1]["at_s"]
    part_s = max(last_s - first_s, 1e-9) / PARTS
    parts: list[list[Json]] = [[] for _ in range(PARTS)]
    for sample in samples:
        parts[min(int((sample["at_s"] - first_s) / part_s), PARTS - 1)].append(sample)

    def trend(figure: str, name: str) -> Trend:
        values = [
            (first_s + number * part_s, _least_idle(part, figure))
            for number, part in enumerate(parts)
        ]
        return _trend(name, figure, values)

    held = [name for name in HELD if name != "open_requests"]  # none, where the server is idle
    return [
        *(trend(figure, f"{figure.replace('_', ' ')} of the server") for figure in (*held, *SLACK)),
    ]


def _least_idle(samples: Sequence[Json], figure: str) -> float | None:
    """None if the server was never idle, with all engines up."""
    values = [
        sample["server"][figure] if figure in SLACK else sample[figure]
        for sample in samples
        if not sample["open_requests"] and sample["up"] == 2 and sample["server"] is not None
    ]
    return min(values, default=None)


# ---- What is done to engines.


@dataclass(frozen=True)
class Trouble:
    """kind: kill or stop. number: of the replica."""

    at_s: float
    kind: str
    number: int


def plan_troubles(duration_s: float, kill_every_s: float, stop_every_s: float) -> list[Trouble]:
    """Both replicas in turn in the first half, only replica 0 in the second; 0: never. Stops come
    between two kills."""
    times = [(at_s, "kill") for at_s in _times(kill_every_s, kill_every_s, duration_s)]
    first_s = stop_every_s - kill_every_s / 2 if kill_every_s < stop_every_s else stop_every_s / 2
    times += [(at_s, "stop") for at_s in _times(first_s, stop_every_s, duration_s)]
    turns = {"kill": itertools.count(), "stop": itertools.count()}
    return [
        Trouble(at_s, kind, next(turns[kind]) % 2 if at_s < duration_s / 2 else 0)
        for at_s, kind in sorted(times)
    ]


def _times(first_s: float, every_s: float, end_s: float) -> Iterator[float]:
    while every_s and first_s < end_s:
        yield first_s
        first_s += every_s


class Disturbance:
    """Kills and stops engines of a server."""

    def __init__(self, server: ServerProcess, watch: Watch, ledger: Ledger) -> None:
        self._server = server
        self._watch = watch
        self._ledger = ledger
        self._stopped: set[int] = set()

    async def run(self, troubles: Sequence[Trouble], began_s: float) -> None:
        for trouble in troubles:
            await asyncio.sleep(max(0.0, began_s + trouble.at_s - time.monotonic()))
            await self._disturb(trouble)

    def release(self) -> None:
        """Let stopped processes go on, so that they can end."""
        for pid in self._stopped:
            if exists(pid):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    async def _disturb(self, trouble: Trouble) -> None:
        pid = engines(self._server.pid).get(trouble.number)
        if pid is None:
            self._ledger.broken.append(f"replica {trouble.number} does not run")
            return
        begun_s = time.monotonic()
        os.kill(pid, signal.SIGKILL if trouble.kind == "kill" else signal.SIGSTOP)
        if trouble.kind == "stop":
            self._stopped.add(pid)
        noticed_s = await self._until(trouble.number, lambda state: state != "up", begun_s)
        replaced_s = await self._until(trouble.number, lambda state: state == "up", begun_s)
        self._ledger.troubles.append(
            {**asdict(trouble), "noticed_s": noticed_s, "replaced_s": replaced_s}
        )
        print(f"{trouble.kind} of engine {trouble.number}: noticed after {noticed_s} s, up again "
              f"after {replaced_s} s", flush=True)  # fmt: skip
        if noticed_s is None or noticed_s > NOTICED_S[trouble.kind]:
            self._ledger.broken.append(f"{trouble} was noticed after {noticed_s} s")
        if replaced_s is None:
            self._ledger.broken.append(f"{trouble}: not replaced within {REPLACED_S} s")
        if trouble.kind == "stop":
            await asyncio.sleep(max(0.0, begun_s + STOPPED_S - time.monotonic()))
            self.release()

    async def _until(
        self, number: int, good: Callable[[str], bool], begun_s: float
    ) -> float | None:
        while (passed_s := time.monotonic() - begun_s) < REPLACED_S:
            for replica in await self._watch.replicas():
                if replica["number"] == number and good(replica["state"]):
                    return round(passed_s, 2)
            await asyncio.sleep(0.25)
        return None


# ---- The run.


async def soak(server: ServerProcess, options: argparse.Namespace) -> Json:
    """The results, as in the JSON file."""
    began_s = time.monotonic()
    ledger = Ledger()
    watch = Watch(server, began_s)
    disturbance = Disturbance(server, watch, ledger)
    within_s = options.answer_within
    load = Load(server.url, ledger, options.load, options.seed, within_s)
    tasks: list[asyncio.Task[None]] = []
    try:
        if await watch.wait_until_up(2, 240.0) is None:
            raise SystemExit("not both replicas are up")
        warm = Load(server.url, ledger, options.load, options.seed + 1, within_s)
        await warm.one_of_each()
        await warm.close()
        before = await settled(watch, None)
        print(f"before: {shown(before)}", flush=True)
        watch.samples.clear()
        load_s = time.monotonic()
        load.begin()
        troubles = plan_troubles(options.duration, options.kill_every, options.stop_every)
        disturbing = asyncio.create_task(disturbance.run(troubles, load_s))
        tasks += [disturbing, asyncio.create_task(sample_for_ever(watch, options.sample_every))]
        tasks.append(asyncio.create_task(summarize_for_ever(watch, ledger, load_s)))
        await asyncio.sleep(options.duration)
        await disturbing
        loaded_s = time.monotonic() - load_s
        print("draining", flush=True)
        await load.end()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await load.close()
        samples = list(watch.samples)
        if await watch.wait_until_up(2, REPLACED_S) is None:
            ledger.broken.append("not both replicas are up after the run")
        after = await settled(watch, before)
        print(f"after: {shown(after)}", flush=True)
        lag = await watch.metrics()
    finally:
        disturbance.release()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await load.close()
        await watch.close()
    return results(options, ledger, samples, before, after, loaded_s, lag, server.output)


async def settled(watch: Watch, before: Json | None) -> Json:
    """A sample when nothing is held any more, or what is held after DRAINED_S."""
    begun_s = time.monotonic()
    while True:
        sample = await watch.take()
        if before is None:
            waits = any(sample[name] for name in ("kv_blocks", "open_requests", "sessions"))
        else:
            waits = bool(differences(before, sample))
        if not waits or time.monotonic() - begun_s > DRAINED_S:
            return sample
        await asyncio.sleep(1.0)


async def sample_for_ever(watch: Watch, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await watch.take()
        except (aiohttp.ClientError, TimeoutError) as error:
            print(f"no sample: {type(error).__name__}: {error}", flush=True)


async def summarize_for_ever(watch: Watch, ledger: Ledger, began_s: float) -> None:
    """A line each minute."""
    while True:
        await asyncio.sleep(60.0)
        minutes = (time.monotonic() - began_s) / 60
        print(f"{minutes:4.0f} min: {ledger.sent} requests, {ledger.failed} failed, "
              f"{ledger.rows.total()} rows, {len(ledger.broken)} broken; "
              f"{shown(watch.samples[-1]) if watch.samples else ''}", flush=True)  # fmt: skip


def shown(sample: Json) -> str:
    held = ", ".join(f"{name} {sample[name]:.0f}" for name in HELD)
    processes = {"server": sample["server"]}
    processes |= {f"engine {number}": each for number, each in sample["engines"].items()}
    parts = [
        f"{name} {each['rss_mib']:.0f} MiB, {each['descriptors']} fds, {each['threads']} threads"
        for name, each in processes.items()
        if each is not None
    ]
    return "; ".join([held, *parts])


def results(
    options: argparse.Namespace,
    ledger: Ledger,
    samples: Sequence[Json],
    before: Json,
    after: Json,
    loaded_s: float,
    metrics: Mapping[str, float],
    output: str,
) -> Json:
    """Everything that the page shows, and `reasons`: why the run has failed."""
    found = lives(samples)
    growth, same_age, parts = growths(found), at_the_same_age(found), part_by_part(samples)
    reasons = [*ledger.broken]
    reasons += [f"left after the run: {each}" for each in differences(before, after)]
    reasons += [
        f"{each.process}: memory grows by {each.mib_per_h:.1f} MiB per hour"
        for each in growth
        if each.too_steep
    ]
    reasons += [
        f"{each.figure} grow {way} by {each.rise:.1f} in the run"
        for way, trends in (("life by life", same_age), ("part by part", parts))
        for each in trends
        if each.rises
    ]
    for sign in ("Traceback (most recent call last)", "was never retrieved", "Unclosed"):
        if count := output.count(sign):
            reasons.append(f"{sign!r} stands {count} times in the log of the server")
    every = max(1, len(samples) // 120)
    load_averages = [sample["load_average"] for sample in samples]
    lags = {
        name.removeprefix("lag_le_"): count
        for name, count in metrics.items()
        if name.startswith("lag_le_")
    }
    return {
        "environment": asdict(environment(SystemClock())),
        "server": list(SERVER) + list(options.options),
        "duration_s": round(loaded_s, 1),
        "load": options.load,
        "answer_within_s": options.answer_within,
        "load_average": statistics.fmean(load_averages) if load_averages else 0.0,
        "kill_every_s": options.kill_every,
        "stop_every_s": options.stop_every,
        "requests": {
            name: {
                "sent": kind.sent,
                "ended": dict(kind.ended),
                "seconds": spread(kind.seconds),
                "gap_s": round(kind.gap_s, 3),
            }
            for name, kind in ledger.kinds.items()
        },
        "rows": dict(ledger.rows),
        "troubles": ledger.troubles,
        "before": before,
        "after": after,
        "loop_lag_at_most_s": lags,
        "growth": [asdict(each) for each in growth],
        "same_age": [asdict(each) for each in same_age],
        "parts": [asdict(each) for each in parts],
        "samples": list(samples[::every]),
        "reasons": reasons,
    }


def spread(values: Sequence[float]) -> Json:
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 99)}
    return {name: round(value, 3) for name, value in {**at, "max": ordered[-1]}.items()}


# ---- The page.


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def page(found: Json) -> str:
    here = found["environment"]
    parts = [
        "# A soak of the server\n\n",
        f"`bros serve {' '.join(found['server'])}` under mixed load for "
        f"{found['duration_s'] / 60:.0f} minutes, while its engines are killed (every "
        f"{found['kill_every_s']:.0f} s) and stopped (every {found['stop_every_s']:.0f} s). "
        f"The load average of the machine was {found['load_average']:.1f} on average, "
        "that of other programs included. Written by `benchmarks/soak.py`. "
        f"{here['cpu']}, {here['cores']} cores, torch {here['packages']['torch']}, "
        f"commit {here['commit']}.\n\n",
    ]
    if found["reasons"]:
        parts.append("**It did not hold:**\n\n")
        parts += [f"- {reason}\n" for reason in found["reasons"][:50]] + ["\n"]
    else:
        parts.append("Everything held.\n\n")
    parts += ["## Requests\n\n", _requests_table(found), _rows_line(found)]
    parts += ["## Lost engines\n\n", _troubles_table(found)]
    parts += ["## The server's event loop\n\n", _lag_line(found)]
    parts += ["## What is held\n\n", _held_table(found)]
    parts += ["## Memory while a process lives\n\n", _growth_table(found)]
    parts += ["## From life to life\n\n", _same_age_table(found)]
    parts += ["## From part to part\n\n", _parts_table(found)]
    return "".join(parts).rstrip("\n") + "\n"


def _requests_table(found: Json) -> str:
    rows = []
    for name, kind in found["requests"].items():
        ended = dict(kind["ended"])
        took = kind["seconds"]
        rows.append(
            [
                name,
                str(kind["sent"]),
                str(ended.pop("complete", 0)),
                str(ended.pop("disconnected", 0)),
                ", ".join(f"{count} {code}" for code, count in sorted(ended.items())) or "0",
                *(f"{took[key]:.2f}" if took else "" for key in ("p50", "p99", "max")),
                f"{kind['gap_s']:.2f}" if kind["gap_s"] else "",
            ]
        )
    head = (
        "kind",
        "sent",
        "complete",
        "left by the client",
        "failed",
        "p50, s",
        "p99, s",
    )
    return table((*head, "max, s", "longest gap, s"), rows)


def _rows_line(found: Json) -> str:
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found["rows"].items()))
    return f"Rows of batches by outcome, each with exactly one: {counts or 'none'}.\n\n"


def _troubles_table(found: Json) -> str:
    rows = [
        [
            f"{each['at_s'] / 60:.1f}",
            each["kind"],
            str(each["number"]),
            *("never" if each[key] is None else f"{each[key]:.1f}"
              for key in ("noticed_s", "replaced_s")),
        ]
        for each in found["troubles"]
    ]  # fmt: skip
    return table(("minute", "", "replica", "noticed after, s", "up again after, s"), rows)


def _lag_line(found: Json) -> str:
    """How often it was late, by the histogram of the server, which counts up to each bound."""
    at_most = {float(bound): count for bound, count in found["loop_lag_at_most_s"].items()}
    looked, on_time = max(at_most.values()), at_most[LAG_S]
    longest_s = min(bound for bound, count in at_most.items() if count == looked)
    return (
        f"It was late by more than {1000 * LAG_S:.0f} ms {looked - on_time:.0f} of {looked:.0f} "
        f"times, and by more than {1000 * longest_s:.0f} ms never.\n\n"
    )


def _held_table(found: Json) -> str:
    before, after, samples = found["before"], found["after"], found["samples"]
    rows = []
    for name in HELD:
        most = max((sample[name] for sample in samples), default=0)
        rows.append([name.replace("_", " "), f"{before[name]:.0f}", f"{most:.0f}",
                     f"{after[name]:.0f}"])  # fmt: skip
    for key in SLACK:
        for process in ("server", *(f"engine {number}" for number in before["engines"])):
            row = [f"{key} of {process}"]
            values = [_of(sample, process, key) for sample in samples]
            most = max((value for value in values if value is not None), default=0)
            row += [str(_of(before, process, key)), str(most), str(_of(after, process, key))]
            rows.append(row)
    text = ", ".join(f"{key}: {slack} more" for key, slack in SLACK.items())
    note = (
        "Blocks in the prefix cache are not held. After the run, figures must be those before it "
        f"({text}). The largest values are those of the samples shown in the JSON file.\n\n"
    )
    return note + table(("", "before", "largest", "after"), rows)


def _of(sample: Json, process: str, key: str) -> int | None:
    figures = sample["server"] if process == "server" else sample["engines"].get(process.split()[1])
    return None if figures is None else figures[key]


def _growth_table(found: Json) -> str:
    rows = [
        [
            each["process"],
            str(each["lives"]),
            f"{each['minutes']:.1f}",
            *(f"{each[key]:.0f}" for key in ("first_mib", "last_mib")),
            "" if each["mib_per_h"] is None else f"{each['mib_per_h']:+.1f}",
            "too short" if each["at_most"] is None else f"{each['at_most']:.0f}",
        ]
        for each in found["growth"]
    ]
    note = (
        "Theil-Sen slope of resident memory: in the second half of each life whose half is "
        f"{LONG_S / 60:.0f} minutes or longer, and over all pairs of samples of the same shorter "
        f"life, from {SETTLED_S:.0f} s after its start on.\n\n"
    )
    head = ("process", "lives", "minutes", "first, MiB", "last, MiB", "MiB per hour", "at most")
    return note + table(head, rows)


def _same_age_table(found: Json) -> str:
    note = (
        f"What there is between {SETTLED_S:.0f} and {SETTLED_S + SAME_AGE_S:.0f} s after the start "
        "of each engine that began in the run, in the order in which they began: the median of its "
        "memory, the least of its descriptors and threads, and the least that the server holds "
        f"while it is idle. {RISE_NOTE}"
    )
    return note + _trend_table(found["same_age"], "lives")


def _parts_table(found: Json) -> str:
    note = (
        f"The least that the server holds while it is idle, in each of {PARTS} parts of the run. "
        f"{RISE_NOTE}"
    )
    return note + _trend_table(found["parts"], "parts")


RISE_NOTE = "The rise is the Theil-Sen slope times the time from the first value to the last.\n\n"


def _trend_table(trends: Sequence[Json], count: str) -> str:
    rows = []
    for each in trends:
        values = [value for _, value in each["points"]]
        ends = [f"{value:.0f}" for value in (values[0], values[-1])] if values else ["", ""]
        rows.append(
            [
                each["figure"],
                str(len(values)),
                *ends,
                f"{min(values):.0f} to {max(values):.0f}" if values else "",
                "too few" if each["rise"] is None else f"{each['rise']:+.1f}",
                f"{each['at_most']:g}",
            ]
        )
    return table(("", count, "first", "last", "range", "rise", "at most"), rows)


def write_page(folder: Path) -> None:
    found = json.loads((folder / "soak_cpu.json").read_text(encoding="utf-8"))
    (folder / "soak.md").write_text(page(found), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--duration", type=float, default=3600.0, help="seconds of load")
    parser.add_argument("--kill-every", type=float, default=300.0, help="seconds; 0: never")
    parser.add_argument("--stop-every", type=float, default=600.0, help="seconds; 0: never")
    parser.add_argument("--sample-every", type=float, default=5.0, help="seconds")
    parser.add_argument("--load", type=float, default=1.0, help="factor on the rates of requests")
    parser.add_argument(
        "--answer-within", type=float, default=300.0, metavar="SECONDS",
        help="a request without an answer after this time hangs; more if other programs load the "
        "machine",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for soak_cpu.json, soak.md and the log")
    parser.add_argument(
        "--page", type=folder_with("soak_cpu.json"), metavar="FOLDER",
        help="only write the page from this folder's results",
    )  # fmt: skip
    parser.add_argument("options", nargs="*", help="options of bros serve")
    add_quick(parser, duration=15.0, kill_every=6.0, stop_every=0.0, sample_every=1.0)
    return parser


def main() -> None:
    options = make_parser().parse_args()
    if options.page is not None:
        write_page(options.page)
        return
    # Both end the run as Ctrl-C does, also where the shell has turned SIGINT off.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    left: list[int] = []
    try:
        with running_server(*SERVER, *options.options) as server:
            assert server.url
            try:
                found = asyncio.run(soak(server, options))
            finally:
                left = descendants(server.pid)
                if options.out is not None:
                    options.out.mkdir(parents=True, exist_ok=True)
                    (options.out / "soak.log").write_text(server.output, encoding="utf-8")
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
    finally:
        for pid in left:
            if exists(pid):
                os.kill(pid, signal.SIGKILL)
    if options.out is not None:
        text = json.dumps(found, indent=1)
        (options.out / "soak_cpu.json").write_text(text, encoding="utf-8")
        write_page(options.out)
    print(page(found))
    if found["reasons"]:
        raise SystemExit("it did not hold:\n" + "\n".join(found["reasons"]))


if __name__ == "__main__":
    main()
