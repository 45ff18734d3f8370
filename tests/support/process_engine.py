"""Engine processes with a tiny model, and what tests ask of them."""

from __future__ import annotations

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineClient
from bros.core.request import EngineRequest, SamplingParams

TINY_ENGINE = EngineConfig(policy="fcfs", kernels="reference", kv_blocks=64, threads=1)
PROMPT = [5, 6, 7, 8]


def ask(name: str, max_tokens: int = 8) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
    )


async def tokens_of(client: EngineClient, request: EngineRequest) -> list[int]:
    stream = await client.submit(request)
    return [token async for output in stream for token in output.token_ids]
