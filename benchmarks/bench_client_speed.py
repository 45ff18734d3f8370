"""The cost of the client of `bros bench`: processor time per chunk, and its lateness.

    python benchmarks/bench_client_speed.py [--streams 24] [--rates 10,100] [--duration 10]

A server in another process streams tokens at a steady rate to a closed loop of clients. Target: 24
streams of 10 chunks per second take less than 5 % of all cores. The processor time is that of the
client's process, including prompts of 512 token ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import statistics
from multiprocessing.connection import Connection

from harness import benchmark_parser, save, table_of
from rich.console import Console

from bros.bench.client import AiohttpTransport, Client, Outcome
from bros.bench.dialects import RequestFormat, dialect_of
from bros.bench.load import LoadResult, OfferedLoad, drive
from bros.bench.plan import Piece, Planned, Session, SessionRequest
from bros.core.clock import SystemClock, process_cpu_s
from bros.core.machine import available_cores
from bros.core.request import ServiceClass

TOKENS = 64
PROMPT = list(range(1000, 1512))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# As long as the chunks of real servers.
FRAME = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1_700_000_000}
FRAME |= {"model": "SmolLM2-135M-Instruct", "service_tier": "default"}


def chunk(choices: list[object], usage: object = None) -> bytes:
    data = b"data: " + json.dumps(FRAME | {"choices": choices, "usage": usage}).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


def choice(text: str, reason: str | None = None) -> list[object]:
    return [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]


async def answer(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, interval_s: float
) -> None:
    """Serve the requests of one connection: a chunk after each interval."""
    token = chunk(choice(" token"))
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": TOKENS}
    end = chunk(choice("", "length")) + chunk([], usage) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
    now = asyncio.get_running_loop().time
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = head.split(b"content-length: ")[1].split(b"\r\n")[0]
            await reader.readexactly(int(length))
            writer.write(HEAD)
            began_s = now()
            for number in range(1, TOKENS + 1):
                await asyncio.sleep(began_s + number * interval_s - now())
                if writer.is_closing():  # the run is over
                    return
                writer.write(token)
            writer.write(end)
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


def serve(chunks_per_s: float, port_pipe: Connection) -> None:
    async def main() -> None:
        server = await asyncio.start_server(
            lambda reader, writer: answer(reader, writer, 1 / chunks_per_s), "127.0.0.1", 0
        )
        port_pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def planned(name: str, service_class: ServiceClass) -> Planned:
    return Planned(
        name=name,
        service_class=service_class,
        prompt=(Piece("p", len(PROMPT)),),
        output_tokens=TOKENS,
    )


def load(streams: int, duration_s: float) -> OfferedLoad:
    """The streams as a closed loop, and an open loop of four requests per second."""
    times = [i / 4 for i in range(int(4 * duration_s))]
    return OfferedLoad(
        duration_s=duration_s,
        sessions=[
            Session(at, (SessionRequest(planned(f"rt{at}", ServiceClass.RT)),)) for at in times
        ],
        backlog=(planned(f"be{i}", ServiceClass.BE) for i in itertools.count()),
        in_flight=streams,
    )


async def measure(url: str, streams: int, duration_s: float) -> LoadResult:
    request_format = RequestFormat(dialect=dialect_of("bros"), model="m")
    async with AiohttpTransport() as http:
        client = Client(http, url, request_format, lambda _: (PROMPT, ""))
        return await drive(
            load(streams, duration_s),
            client,
            SystemClock(),
            cpu_s=process_cpu_s,
            cores=available_cores(),
        )


def run(streams: int, chunks_per_s: float, duration_s: float) -> LoadResult:
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(chunks_per_s, theirs), daemon=True
    )
    server.start()
    try:
        return asyncio.run(measure(f"http://127.0.0.1:{ours.recv()}", streams, duration_s))
    finally:
        server.terminate()
        server.join()


def main() -> None:
    parser = benchmark_parser(__doc__, streams=4, rates="10", duration=1.0)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--rates", default="10,100", help="chunks per second of each stream")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds per rate")
    args = parser.parse_args()
    cores = available_cores()
    rows = []
    for rate in (float(item) for item in args.rates.split(",")):
        result = run(args.streams, rate, args.duration)
        health, records = result.health, result.records
        chunks = sum(len(record.chunk_times_s) for record in records)
        errors = sorted(
            abs(later - earlier - 1 / rate)
            for record in records
            for earlier, later in itertools.pairwise(record.chunk_times_s)
        )
        p99 = errors[len(errors) * 99 // 100]
        bad = sum(r.outcome not in (Outcome.COMPLETED, Outcome.OPEN) for r in records)
        cpu_s = health.cpu_share * cores * result.elapsed_s
        late = (health.lateness_p50_s, health.lateness_p99_s, health.lateness_max_s)
        figures = {
            "chunks/s each": f"{rate:g}",
            "requests": len(records),
            "incomplete": bad,
            "chunks": chunks,
            "of all cores": f"{health.cpu_share:.2%}",
            "us per chunk": f"{1e6 * cpu_s / chunks:.0f}",
            "gap error p50 / p99 ms": _in_ms(statistics.median(errors), p99),
            "sent late p50 / p99 / max ms": _in_ms(*late),
        }
        rows.append(figures)
    title = f"{args.streams} streams, and 4 requests/s beside them; {cores} cores"
    Console().print(table_of(title, list(rows[0]), [list(row.values()) for row in rows], left=0))
    save(args.json, {"streams": args.streams, "rows": rows})


def _in_ms(*seconds: float) -> str:
    return " / ".join(f"{1e3 * each:.2f}" for each in seconds)


if __name__ == "__main__":
    main()
