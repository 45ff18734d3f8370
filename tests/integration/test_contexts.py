"""Contexts on a real model: filled tokens are not computed again, and freed ones are not pinned."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bros.core.config import EngineConfig
from bros.core.request import EngineRequest, FinishReason, SamplingParams
from bros.executor.model_store import default_cache_dir
from bros.text.contexts import Contexts, GenerationJob
from bros.transport.local import LocalEngine, open_local
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def answer(local: LocalEngine, prompt: list[int], salt: str) -> list[int]:
    """The answer to a plain request that shares no KV."""
    request = EngineRequest(
        request_id=local.ids.new("plain"), prompt_token_ids=prompt, sampling=GREEDY, cache_salt=salt
    )
    stream = await local.client.submit(request)
    return [token async for output in stream for token in output.token_ids]


async def test_forks_of_a_filled_context_find_its_kv_until_it_is_freed(tmp_path: Path) -> None:
    rng = random.Random(3)
    save_tiny_llama(tmp_path, vocab_size=1000)
    save_tokenizer(tmp_path)
    config = EngineConfig(model=str(tmp_path), kv_blocks=256, policy="fcfs", threads=1)
    async with open_local(config, default_cache_dir()) as local:
        contexts = Contexts(local.client, local.generator, local.ids)
        system = contexts.new()
        filled = [rng.randrange(1000) for _ in range(400)]
        await contexts.fill(system, filled)
        before = await local.client.stats()
        assert all(each.finished == 0 for each in before.by_class.values())
        forks = [system.fork(), system.fork()]
        for fork in forks:
            own = [rng.randrange(1000) for _ in range(20)]
            [found] = await contexts.generate([GenerationJob(fork, own, GREEDY)])
            assert found.finish_reason is FinishReason.LENGTH
            assert found.cached_tokens >= 384
            assert list(found.token_ids) == await answer(local, [*filled, *own], salt=str(own))
            assert list(fork.tokens) == [*filled, *own, *found.token_ids]
        for context in (system, *forks):
            await contexts.free(context)
        stats = await local.client.stats()
        assert (stats.kv_blocks_used, stats.kv_blocks_pinned) == (0, 0)
