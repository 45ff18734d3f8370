"""Step times that others have published as formulas, for devices that are not at hand.

    T(step) = constant, then so much per token     whatever lies between the published pieces
            + attention of prompt chunks           what the formula says for chunks of one size
            + attention of decode rows             per token of context

Preble (spec: Preble 2.2) fitted its simulator's formulas to two set-ups. A cost model has other
terms, so each profile says in its assumptions what became of them.
"""

from __future__ import annotations

from bros.scheduler.analytic import LLAMA_3_70B
from bros.scheduler.cost_model import CostModel
from bros.scheduler.profiles import ANALYTIC, Profile, ProfileKey

PUBLISHED = "published"
_HOST_BYTES_PER_S = 20e9
_MISTRAL_KV_BYTES = 131_072
_MISTRAL_KV_TOKENS = 198_516
_H100_BYTES = 85.9e9
_H100_BYTES_PER_S = 3350e9


def published_profiles() -> tuple[Profile, ...]:
    """The two set-ups of the Preble paper, one replica each."""
    return _mistral_on_a6000(), _llama_on_h100s()


def _mistral_on_a6000() -> Profile:
    """t = products(n) + 1.86e-4 ctx + 0.159 and, from n * ctx > 2**20 on, 1.13e-3 n + 1.75e-3 ctx
    + 2.19e-6 n ctx more, in ms and all divided by 0.9.

    products(n) is 22 below 192 tokens and 4.21 + 0.1084 n from 384 on.
    """
    flat, rising_to, used = 192, 384, 0.9
    least_ms, at_end_ms, token_ms = 22.0, 4.21 + 0.1084 * 384, 0.1084
    rise_ms = (at_end_ms - least_ms) / (rising_to - flat)
    chunk = 512
    # Of a chunk of 512 tokens per token of context; a chunk of others has as much per pair.
    pair_ms = (1.86e-4 + 1.75e-3 + 2.19e-6 * chunk) / chunk
    swap_s = _MISTRAL_KV_BYTES / _HOST_BYTES_PER_S
    return Profile(
        key=_key("1x-a6000", "mistral-7b"),
        kind=ANALYTIC,
        model=CostModel(
            constant_s=_seconds((least_ms + 0.159) / used),
            token_s=0.0,
            sample_s=0.0,
            pair_s=_seconds(pair_ms / used),
            context_s=_seconds(1.86e-4 / used),
            hinges=(
                (flat, _seconds(rise_ms / used)),
                (rising_to, _seconds((token_ms - rise_ms) / used)),
            ),
            swap_token_s=_seconds(1e3 * swap_s),
            swap_out_token_s=_seconds(1e3 * swap_s),
        ),
        kv_capacity_tokens=_MISTRAL_KV_TOKENS,
        assumptions={
            "source": "formulas of Preble's simulator, divided by 0.9 as there",
            "products": "22 ms up to 192 tokens and 4.21 + 0.1084 n ms from 384 on as published; "
            "a straight line between them",
            "attention of prompts": "the formula of long contexts for chunks of 512 tokens",
            "attention of decode rows": "0.000186 ms per token of context",
            "memory": "198,516 tokens of 131,072 bytes",
            "swapping": "20 GB/s, not hidden",
        },
    )


def _llama_on_h100s() -> Profile:
    """t = 28.9 + 0.182 n + 4.0e-3 ctx + 2.55e-6 n ctx in ms."""
    shape, gpus, chunk = LLAMA_3_70B, 4, 1024
    room = 0.9 * gpus * _H100_BYTES - 2 * shape.parameters
    swap_s = shape.kv_bytes / (gpus * _HOST_BYTES_PER_S)
    return Profile(
        key=_key(f"{gpus}x-h100", shape.name),
        kind=ANALYTIC,
        model=CostModel(
            constant_s=_seconds(28.9),
            token_s=_seconds(0.182),
            sample_s=0.0,
            pair_s=_seconds(4.0e-3 / chunk + 2.55e-6),
            context_s=_seconds(1e3 * shape.kv_bytes / (0.6 * gpus * _H100_BYTES_PER_S)),
            swap_token_s=_seconds(1e3 * swap_s),
            swap_out_token_s=_seconds(1e3 * swap_s),
        ),
        kv_capacity_tokens=int(room // shape.kv_bytes),
        assumptions={
            "source": "formula of Preble's simulator for Llama-70B",
            "products": "28.9 + 0.182 n ms as published",
            "attention of prompts": "the formula for chunks of 1,024 tokens",
            "attention of decode rows": "reading the KV cache at 60% of 3,350 GB/s per GPU; the "
            "published term is of prompts, and 160 times as much",
            "gpu": "4 H100 of 85.9 GB with tensor parallelism",
            "memory": "90% of it holds weights and the KV cache",
            "swapping": "20 GB/s per GPU, not hidden",
        },
    )


def _key(device: str, model: str) -> ProfileKey:
    return ProfileKey(
        device=device, model=model, weights="fp16", kernels=PUBLISHED, kv_dtype="fp16", threads=0
    )


def _seconds(milliseconds: float) -> float:
    """Four significant digits."""
    return float(f"{milliseconds / 1e3:.4g}")
