"""A small random model that generates a few tokens greedily, whatever it runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.request import EngineRequest, SamplingParams
from bros.engine.engine import Engine, find_launcher
from bros.executor.diagnosis import SMALL_MODEL
from bros.executor.loader import random_executor
from bros.executor.models.spec import ModelSpec
from bros.scheduler.build import build_scheduler

TOKENS = 16
"""Generated for each prompt."""

CLEAR = 3e-4
"""Rounding decides between tokens whose logits are closer than this."""

_PREFIX = tuple(7 * i % 256 for i in range(80))
_PROMPTS = {"short": (3, 1, 4), "long": (*_PREFIX, 1, 5), "alike": (*_PREFIX, 9), "one": (2,)}
"""Of one token, of several steps, and two with a common beginning."""


@dataclasses.dataclass(slots=True)
class Generated:
    """Of each prompt the tokens, and by how much the best logit of each led, if that was asked."""

    tokens: dict[str, list[int]]
    leads: dict[str, list[float]]
    device: str
    weights: str
    kernels: str


def generate(config: EngineConfig, clock: Clock, *, leads: bool = False) -> Generated:
    """Greedy, all prompts at once, prompts in chunks.

    config: where and in which precision; what bears on size and order is decided here. leads: by
    a way of sampling that tells them. Raises ConfigError, or whatever the back end raises.
    """
    config = dataclasses.replace(
        config,
        policy="fcfs",
        kv_blocks=64,
        kv_memory=None,
        host_kv_blocks=8,
        max_model_len=256,
        max_num_seqs=8,
        max_batch_tokens=48,
    )
    executor, info = random_executor(ModelSpec.from_config(SMALL_MODEL), config, drawn_on="cpu")
    ahead = config.async_scheduling
    depth = 1 if find_launcher(executor, ahead) is None else 2
    scheduler = build_scheduler(config, info, None, depth=depth)
    engine = Engine(scheduler, executor, clock, info, async_scheduling=ahead)
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2 if leads else None
    )
    names = {f"{name} {copy}": prompt for copy in (1, 2) for name, prompt in _PROMPTS.items()}
    out = Generated(
        {name: [] for name in names},
        {name: [] for name in names},
        info.device,
        info.weights,
        info.kernels,
    )
    try:
        for name, prompt in names.items():
            engine.submit(
                EngineRequest(request_id=name, prompt_token_ids=list(prompt), sampling=sampling)
            )
        while engine.has_work:
            for output in engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                out.tokens[output.request_id] += output.token_ids
                out.leads[output.request_id] += (
                    each.top[0][1] - each.top[1][1] for each in output.logprobs
                )
    finally:
        engine.close()
    return out


def first_difference(expected: Generated, got: Mapping[str, Sequence[int]]) -> str | None:
    """In words; None if all tokens are those expected, up to where two were about as good."""
    for name, tokens in expected.tokens.items():
        pairs = zip(tokens, got[name], expected.leads[name], strict=False)
        for index, (right, other, lead) in enumerate(pairs):
            if lead < CLEAR:
                break
            if right != other:
                return f"token {index + 1} of prompt {name!r} is {other} instead of {right}"
        else:
            if len(got[name]) != len(tokens):
                return f"{len(got[name])} tokens for prompt {name!r} instead of {len(tokens)}"
    return None
