"""A server that may have fewer descriptors than an attacker has connections which send nothing, or
too slowly: it answers every other client, and its log does not grow with them.

tests/server/test_connections.py tries less of it in the fast tier, and benchmarks/silent_clients.py
measures how long the others wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.held_connections import SLOW_BODY, SLOW_HEADERS, Held, holding
from support.server_process import HTTP, ServerProcess, few_descriptors, running_server
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]

DESCRIPTORS = 256
CONNECTIONS = 300
REQUESTS = 100
MOST_LOGGED = 2000
"""Characters that the log may grow by: some lines."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_llama(folder)
    options = (str(folder), "--threads", "1", "--log-level", "warning")
    with running_server(*options, launcher=few_descriptors(DESCRIPTORS)) as server:
        assert server.url
        limits = Path(f"/proc/{server.pid}/limits").read_text()
        assert re.search(rf"^Max open files +{DESCRIPTORS} +{DESCRIPTORS} ", limits, re.MULTILINE)
        yield server


def replaced(server: ServerProcess) -> float:
    """How many connections have ended because there were too many."""
    name = 'bros_http_connections_closed_total{reason="replaced"} '
    lines = HTTP.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


@pytest.mark.parametrize(
    ("held", "are_replaced"),
    [
        pytest.param(Held(CONNECTIONS), True, id="silent"),
        pytest.param(Held(CONNECTIONS, *SLOW_HEADERS), True, id="slow headers"),
        pytest.param(Held(CONNECTIONS // 2, *SLOW_BODY), False, id="slow bodies"),
    ],
)
async def test_every_other_client_is_answered_and_the_log_stays_short(
    server: ServerProcess, held: Held, are_replaced: bool
) -> None:
    logged, before = len(server.output), replaced(server)
    async with holding(httpx.URL(server.url), held, every_s=0.1):
        for _ in range(REQUESTS):
            async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
                response = await client.post(
                    "/v1/completions", json={"prompt": "Hi", "max_tokens": 1}
                )
                assert response.status_code == 200, response.text
    assert len(server.output) - logged < MOST_LOGGED, server.output[logged:]
    assert (replaced(server) > before) == are_replaced
