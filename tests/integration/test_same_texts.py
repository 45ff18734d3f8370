"""A text is the same, token by token, whatever else the engine computes: without any margin for
near-ties, greedy and drawn with a seed, in every format of weights."""

from __future__ import annotations

import pytest

from bros import LLM, SamplingParams
from bros.executor.models.layers import has_products
from bros.executor.target import CPU
from bros.kernels.dispatch import select_kernels
from support.kernel_cases import compiled_levels
from support.prompts import PROMPTS
from support.tier import by_tier

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        compiled_levels() in ([], ["generic"]), reason="one order of sums needs AVX2 or later"
    ),
]

COMMON = "You are a helpful assistant who answers in short and simple sentences. " * 20
"""Long enough to be read together."""


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int4"])
def test_a_text_depends_on_its_request_alone(weights: str) -> None:
    if not has_products(select_kernels("auto", CPU).name, weights):
        pytest.skip(f"linear layers of {weights} are oneDNN's on this CPU, which has AMX")
    count, tokens = by_tier(fast=4, long=24), by_tier(fast=16, long=64)
    asked = [COMMON * (i % 2) + prompt for i, prompt in enumerate(PROMPTS[:count])]
    params = [
        SamplingParams(temperature=float(i // 2 % 2), seed=i, max_tokens=tokens, ignore_eos=True)
        for i in range(count)
    ]
    with LLM(weights=weights, prefix_cache="off") as llm:
        alone = [
            llm.generate([prompt], each, progress=False)[0][0].token_ids
            for prompt, each in zip(asked, params, strict=True)
        ]
    # Beside others, in short chunks, mostly cached, and with memory for a few of them.
    with LLM(weights=weights, max_batch_tokens=96, kv_blocks=96) as llm:
        for _ in range(2):
            together = llm.generate(
                [*PROMPTS[count : 2 * count], *asked], [params[0]] * count + params, progress=False
            )
            assert [each[0].token_ids for each in together[count:]] == alone
