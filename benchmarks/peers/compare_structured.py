"""Rows whose outputs must match JSON schemas, sent to any server with OpenAI's API.

    python benchmarks/peers/compare_structured.py [URL ...] [--rows 128] [--schemas 32]
                                                  [--in-flight 32] [--json FILE] [--quick]

Without a URL, `bros serve` is started with the embedded model in bf16. The same rows go to every
server, one server after the other: schemas as in
benchmarks/structured_output.py, half of the rows greedy and half drawn with a seed. Outputs are
validated by jsonschema. Start each server alone on the machine, with the same model and precision.
`refused` are rows that the server answers with an error, `cut` those that ended by max_tokens,
`invalid` whole outputs that do not match their schema.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from quick import add_quick

from support.json_schemas import schemas
from support.server_process import running_server

MAX_TOKENS = 96


async def send(url: str, rows: int, asked: list[Any], in_flight: int) -> dict[str, Any]:
    """Send all rows; returns counts by outcome, output tokens and seconds."""
    found: Counter[str] = Counter()
    places = asyncio.Semaphore(in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]

        async def run(number: int) -> None:
            schema = asked[number % len(asked)]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": f"Write some JSON. Number {number}."}],
                "temperature": float(number % 2),
                "seed": number,
                "max_tokens": MAX_TOKENS,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "it", "schema": schema},
                },
            }
            async with places:
                response = await http.post("/v1/chat/completions", json=body)
            if response.status_code != 200:
                found["refused"] += 1
                return
            answer = response.json()
            found["tokens"] += answer["usage"]["completion_tokens"]
            choice = answer["choices"][0]
            if choice["finish_reason"] == "length":
                found["cut"] += 1
                return
            try:
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
                found["valid"] += 1
            except (TypeError, ValueError, jsonschema.ValidationError):  # TypeError: no text
                found["invalid"] += 1

        began_s = time.perf_counter()
        await asyncio.gather(*(run(number) for number in range(rows)))
        seconds = time.perf_counter() - began_s
    return {
        "url": url,
        "rows": rows,
        **{name: found[name] for name in ("valid", "invalid", "cut", "refused", "tokens")},
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("urls", nargs="*", metavar="URL")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--schemas", type=int, default=32)
    parser.add_argument("--in-flight", type=int, default=32)
    parser.add_argument("--json", type=Path, help="output file")
    add_quick(parser, rows=8, schemas=4)
    arguments = parser.parse_args()
    asked = schemas(arguments.schemas, seed=18)
    with contextlib.ExitStack() as stack:
        if not arguments.urls:
            server = running_server("--weights", "bf16", "--max-model-len", "2048")
            arguments.urls = [stack.enter_context(server).url]
        results = [
            asyncio.run(send(url, arguments.rows, asked, arguments.in_flight))
            for url in arguments.urls
        ]
    table = Table("server", "rows/s", "tokens/s", "valid", "invalid", "cut", "refused")
    for row in results:
        table.add_row(
            row["url"],
            f"{row['rows'] / row['seconds']:.2f}",
            f"{row['tokens'] / row['seconds']:.0f}",
            *(str(row[name]) for name in ("valid", "invalid", "cut", "refused")),
        )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
