"""A whole engine with a toy model in the time of the running loop, for programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import Chunk, SampledToken, StepPlan, StepResult
from bros.engine.engine import Engine
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.scheduler import Scheduler
from bros.simulator.virtual_loop import VirtualEngineClient
from support.program_engine import BLOCK, EOS, TOKENIZER
from support.scheduling import MODEL
from support.toy_model import ToyModel

_LETTERS = [TOKENIZER.encode(letter)[0] for letter in "abcdefghijklmnopqrstuvwxyz .,"]
_TOKEN_S = 0.001
_STEP_S = 0.002


def next_token(context: Sequence[int]) -> int:
    """A letter, or one time in 30 the end; depends on all of the context."""
    number = ToyModel.next_token(context) % 30
    return EOS if number == 29 else _LETTERS[number]


def answer(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What the engine says to a prompt, without the end."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        token = next_token(tokens)
        if token == EOS:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


class WordyModel(ToyModel):
    """Says letters. A step takes time on `clock`."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(BLOCK)
        self._clock = clock

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        self._clock.advance(_STEP_S + _TOKEN_S * sum(len(chunk.token_ids) for chunk in plan.chunks))
        return super().execute(plan, should_abort)

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        return SampledToken(chunk.request_id, next_token(tokens))


class ToyEngine(VirtualEngineClient):
    """Close it with `toy_engine`."""

    def __init__(self, scheduler: Scheduler, engine: Engine, clock: ManualClock) -> None:
        super().__init__(engine, clock)
        self._scheduler = scheduler

    async def check_empty(self) -> None:
        """No request has KV, nothing is kept, and all blocks are accounted for."""
        await asyncio.sleep(1.0)
        assert self.num_open == 0
        self._scheduler.check_integrity()
        stats = await self.stats()
        assert stats.kv_blocks_used == 0
        assert stats.kv_blocks_pinned == 0
        assert all(of.running == of.waiting == 0 for of in stats.by_class.values())


@contextlib.asynccontextmanager
async def toy_engine(
    blocks: int = 64, policy: str = "bros", model: CostModel = MODEL, **options: Any
) -> AsyncIterator[ToyEngine]:
    """model: the step times that the scheduler expects. options: of EngineConfig."""
    info = EngineInfo(
        model="toy", weights="fp32", kernels="reference", kv_dtype="fp32", device="cpu",
        max_model_len=blocks * BLOCK, vocab_size=TOKENIZER.vocab_size, block_size=BLOCK,
        num_kv_blocks=blocks, policy=policy, eos_token_ids=(EOS,),
        max_queue=options.get("max_queue", 100),
    )  # fmt: skip
    bounds = {"max_num_seqs": 8, "max_batch_tokens": 32, "max_queue": 100, **options}
    config = EngineConfig(policy=policy, **bounds)
    scheduler = build_scheduler(config, info, model)
    clock = ManualClock(asyncio.get_running_loop().time())
    client = ToyEngine(scheduler, Engine(scheduler, WordyModel(clock), clock, info), clock)
    try:
        yield client
    finally:
        await client.close()
