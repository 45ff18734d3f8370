"""Fills and contexts with a model: what is filled is not computed again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bros.core.config import EngineConfig
from bros.core.request import EngineRequest, FinishReason, IdGenerator, SamplingParams
from bros.engine.contexts import Contexts
from bros.executor.model_store import default_cache_dir
from bros.transport.local import LocalEngine, open_local
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def answer(local: LocalEngine, prompt: list[int], salt: str) -> list[int]:
    """Of a plain request that shares nothing."""
    request = EngineRequest(
        request_id=local.ids.new("plain"), prompt_token_ids=prompt, sampling=GREEDY, cache_salt=salt
    )
    stream = await local.client.submit(request)
    return [token async for output in stream for token in output.token_ids]


async def test_what_was_filled_is_cached_for_what_is_generated(tmp_path: Path) -> None:
    rng = random.Random(3)
    save_tiny_llama(tmp_path, vocab_size=1000)
    save_tokenizer(tmp_path)
    config = EngineConfig(model=str(tmp_path), kv_blocks=256, policy="fcfs", threads=1)
    async with open_local(config, default_cache_dir()) as local:
        contexts = Contexts(local.client, IdGenerator(rng))
        filled = [rng.randrange(1000) for _ in range(400)]
        assert await contexts.fill("system", None, filled) == 400
        before = await local.client.stats()
        assert all(each.finished == 0 for each in before.by_class.values())
        said: dict[str, list[int]] = {}
        for name in ("one", "two"):
            own = [rng.randrange(1000) for _ in range(20)]
            outputs = [each async for each in contexts.generate(name, "system", own, GREEDY)]
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert all(each.cached_tokens >= 384 for each in outputs)
            said[name] = [*filled, *own]
            found = [token for each in outputs for token in each.token_ids]
            assert found == await answer(local, said[name], salt=name)
        for name in ("system", "one", "two"):
            await contexts.free(name)
        stats = await local.client.stats()
        assert (stats.kv_blocks_used, stats.kv_blocks_parked) == (0, 0)
