"""Tool calls that have to be made, by models that know nothing or little of tools: all are valid.

A tiny random Llama writes anything; the long tier tries the embedded model as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bros.batch.store import open_store
from bros.core.config import Config, EngineConfig
from bros.core.request import Slo
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.server.batches.rows import EngineRowHandler, RowRunner
from bros.server.build import local_jobs
from support.json_schemas import schemas
from support.tier import by_tier, seed
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import TEMPLATE, save_tokenizer

ROWS = by_tier(fast=12, long=100)
MAX_TOKENS = 250

pytest.importorskip("llguidance")


def row(rng: random.Random, number: int, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """A request with some tools, one of which must be called."""
    chosen = rng.sample(range(len(asked)), rng.randint(1, 2))
    tools = [
        {
            "type": "function",
            "function": {
                "name": f"tool_{i}",
                "description": "Does something.",
                "parameters": asked[i],
                "strict": rng.random() < 0.5,
            },
        }
        for i in chosen
    ]
    name = tools[0]["function"]["name"]
    return {
        "messages": [{"role": "user", "content": f"Use a tool, please. This is number {number}."}],
        "tools": tools,
        "tool_choice": rng.choice(["required", {"type": "function", "function": {"name": name}}]),
        "parallel_tool_calls": rng.random() < 0.3,
        "temperature": rng.choice([0, 1]),
        "seed": number,
        "n": rng.choice([1, 3]),
        "max_tokens": MAX_TOKENS,
    }


def check(body: dict[str, Any], choice: dict[str, Any], asked: list[dict[str, Any]]) -> bool:
    """Whether the calls are whole; raises if one is wrong."""
    calls = choice["message"].get("tool_calls", [])
    if choice["finish_reason"] == "length":
        calls = calls[:-1]
    else:
        assert choice["finish_reason"] == "tool_calls", choice
        assert calls and choice["message"]["content"] is None
    names = [tool["function"]["name"] for tool in body["tools"]]
    if body["tool_choice"] != "required":
        names = names[:1]
    assert body["parallel_tool_calls"] or len(calls) < 2
    for call in calls:
        name = call["function"]["name"]
        assert name in names
        schema = asked[int(name.removeprefix("tool_"))]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    return choice["finish_reason"] == "tool_calls"


@pytest.fixture(params=["tiny", pytest.param("embedded", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "embedded":
        return resolve_model(None, default_cache_dir()).folder
    folder = tmp_path / "model"
    folder.mkdir()
    save_tiny_llama(folder, vocab_size=440)
    config = json.loads((folder / "config.json").read_text())
    config |= {"eos_token_id": 1, "max_position_embeddings": 4000}
    (folder / "config.json").write_text(json.dumps(config))
    return save_tokenizer(folder, chat_template=TEMPLATE)


def test_calls_that_are_required_are_valid(tmp_path: Path, folder: Path) -> None:
    rng = random.Random(seed(11))
    asked = [each for each in schemas(3 * ROWS, seed(12)) if each.get("type") == "object"]
    bodies = [row(rng, number, asked) for number in range(ROWS)]

    async def run() -> list[Any]:
        engine = EngineConfig(model=str(folder), threads=1, weights="fp32", max_model_len=4000)
        config = Config(engine=engine)
        with contextlib.closing(open_store(tmp_path)) as store:
            async with local_jobs(config, store) as state:
                handler = EngineRowHandler(RowRunner(state))
                answers = (
                    handler.answer(
                        "/v1/chat/completions",
                        body,
                        request_id="",
                        tenant="",
                        slo=Slo(deadline_s=600.0),
                    )
                    for body in bodies
                )
                return await asyncio.gather(*answers)

    whole, total = 0, sum(body["n"] for body in bodies)
    for body, reply in zip(bodies, asyncio.run(run()), strict=True):
        assert reply.status_code == 200, reply.body
        for choice in json.loads(reply.body)["choices"]:
            whole += check(body, choice, asked)
    print(f"{whole} of {total} answers are whole")
    assert whole > total / 2, "most were cut off"
