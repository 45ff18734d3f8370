"""Self-test: a small random model generates a few tokens greedily on any device and kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.request import EngineRequest, SamplingParams, expanded
from bros.engine.build import with_scheduler
from bros.executor.diagnosis import SMALL_MODEL
from bros.executor.loader import random_executor
from bros.executor.models.spec import ModelSpec

TOKENS = 16
"""Output tokens per prompt."""

MIN_MARGIN = 3e-4
"""If the logits of two tokens are closer than this, rounding decides between them."""

_PREFIX = tuple(7 * i % 256 for i in range(80))
_PROMPTS = {"short": (3, 1, 4), "long": (*_PREFIX, 1, 5), "alike": (*_PREFIX, 9), "one": (2,)}
"""One prompt has a single token; "long" and "alike" share a prefix and take several steps."""


@dataclasses.dataclass(slots=True)
class Generated:
    """tokens: of each prompt.
    margins: best minus second-best logit at each token, if requested.
    """

    tokens: dict[str, list[int]]
    margins: dict[str, list[float]]
    device: str
    weights: str
    kernels: str


def generate(config: EngineConfig, clock: Clock, *, margins: bool = False) -> Generated:
    """Generate greedily for all prompts at once, with chunked prefills.

    config: device, precision and kernels; this function sets sizes and policy itself.
    margins: record them, by sampling with logprobs.
    Raises ConfigError, or whatever the back end raises.
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
    executor, info = random_executor(ModelSpec.from_config(SMALL_MODEL), config, rng_device="cpu")
    engine = with_scheduler(config, executor, info, clock)
    sampling = SamplingParams(
        temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2 if margins else None
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
            for output in map(expanded, engine.step()):
                if output.error is not None:
                    raise RuntimeError(output.error)
                out.tokens[output.request_id] += output.token_ids
                out.margins[output.request_id] += (
                    each.top[0][1] - each.top[1][1] for each in output.logprobs
                )
    finally:
        engine.close()
    return out


def first_difference(expected: Generated, got: Mapping[str, Sequence[int]]) -> str | None:
    """A description of the first wrong token; None if there is none.

    Tokens of a prompt are compared up to the first margin below MIN_MARGIN.
    """
    for name, tokens in expected.tokens.items():
        pairs = zip(tokens, got[name], expected.margins[name], strict=False)
        for index, (right, other, margin) in enumerate(pairs):
            if margin < MIN_MARGIN:
                break
            if right != other:
                return f"token {index + 1} of prompt {name!r} is {other} instead of {right}"
        else:
            if len(got[name]) != len(tokens):
                return f"{len(got[name])} tokens for prompt {name!r} instead of {len(tokens)}"
    return None
