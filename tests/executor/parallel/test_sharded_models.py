"""A model over several ranks has the logits of the same model on one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig, PreTrainedConfig

from bros.executor.gguf import convert_gguf
from support.checkpoints import VOCAB, family_configs, family_specs, save_checkpoint
from support.gguf_files import TOKENS, write_gguf
from support.ranks import run_ranks
from support.sharded import (
    KV_BLOCKS,
    Case,
    logits_as_on_a_device,
    logits_of,
    logits_of_all,
    logits_of_all_as_on_a_device,
    threads_and_info,
)
from support.tier import by_tier

pytestmark = pytest.mark.multiprocess

TOLERANCE = 1e-4
ROUNDED = 0.15
"""Terms of a sum are rounded to bf16 one by one; logits have a standard deviation of about 1."""

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
}


def shapes() -> dict[str, PreTrainedConfig]:
    """Every family; one KV head; more of them than query heads can share evenly; odd sizes."""
    llama: dict[str, dict[str, int]] = {
        "one-kv-head": {"num_attention_heads": 4, "num_key_value_heads": 1},
        "nine-heads": {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "hidden_size": 72,
        },
        "odd": {
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "hidden_size": 60,
            "intermediate_size": 131,
            "vocab_size": VOCAB + 7,
        },
    }
    return family_configs() | {
        name: LlamaConfig(**({"intermediate_size": 96} | _SIZES | sizes))
        for name, sizes in llama.items()
    }


def in_groups() -> PreTrainedConfig:
    """Whole int4 groups on each of up to four ranks."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    return LlamaConfig(**_SIZES, **heads, intermediate_size=160)


def save_gguf(folder: Path, kind: Type) -> None:
    config = LlamaConfig(
        **(_SIZES | {"vocab_size": len(TOKENS)}),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=160,
    )
    origin = folder.with_name(f"{folder.name}-origin")
    model = save_checkpoint(origin, config)
    write_gguf(origin / "tiny.gguf", model, config, "llama", quantized=kind)
    convert_gguf(origin / "tiny.gguf", folder)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Case, float]]:
    """By name, with the tolerance."""
    made: dict[str, tuple[Case, float]] = {}

    def add(name: str, save: Callable[[Path], object], tolerance: float, **options: str) -> None:
        folder = tmp_path_factory.mktemp(name)
        save(folder)
        made[name] = (folder, options), tolerance

    for name, config in shapes().items():
        add(name, lambda folder, config=config: save_checkpoint(folder, config), TOLERANCE)
    for weights in ("bf16", "int4"):
        add(weights, lambda folder: save_checkpoint(folder, in_groups()), ROUNDED, weights=weights)
    for kind in (Type.Q4_0, Type.Q4_1, Type.Q8_0):
        add(kind.name, lambda folder, kind=kind: save_gguf(folder, kind), TOLERANCE)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long), 4])
def test_every_family_has_the_logits_of_one_rank(
    cases: dict[str, tuple[Case, float]], size: int
) -> None:
    if size > 2:
        # The fast tier: what three and four ranks share out otherwise than two.
        names = by_tier(fast=["one-kv-head", "nine-heads", "odd", "int4"], long=list(cases))
        cases = {name: cases[name] for name in names}
    by_rank = run_ranks(size, logits_of_all, [case for case, _ in cases.values()])
    for index, (name, (case, tolerance)) in enumerate(cases.items()):
        expected, info = logits_of(case)
        assert len(expected) > 6
        (logits, _), *others = [rank[index] for rank in by_rank]
        for got, want in zip(logits, expected, strict=True):
            torch.testing.assert_close(
                got, want, atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert all(len(step) == 0 for other, _ in others for step in other), (
            "none but rank 0 has any"
        )
        infos = [rank[index][1] for rank in by_rank]
        assert infos == [replace(info, tp=size)] * size


@pytest.mark.slow
@pytest.mark.long
def test_plain_matrices_and_recorded_steps_have_the_logits_of_one_rank() -> None:
    """As on GPUs."""
    specs = list(family_specs().values())
    first, second = run_ranks(2, logits_of_all_as_on_a_device, specs)
    for spec, logits in zip(specs, first, strict=True):
        for got, want in zip(logits, logits_as_on_a_device(spec), strict=True):
            torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    assert len(second) == len(specs)


@pytest.mark.slow
def test_the_kv_cache_is_what_the_rank_with_the_most_heads_can_hold(tmp_path: Path) -> None:
    """And threads are shared out."""
    save_checkpoint(tmp_path, shapes()["nine-heads"])
    bytes_per_block = 2 * 2 * 2 * 16 * 8 * 4  # layers, K and V, 2 of 3 KV heads, slots, head_dim
    memory = f"{KV_BLOCKS * bytes_per_block + 5}B"
    options = {
        "kv_blocks": None,
        "kv_memory": memory,
        "host_kv_blocks": None,
        "host_kv_memory": memory,
        "threads": None,
    }
    results = run_ranks(2, threads_and_info, (tmp_path, options))
    for threads, info in results:
        assert threads == max(1, len(os.sched_getaffinity(0)) // 2)
        assert info.num_kv_blocks == info.num_host_kv_blocks == KV_BLOCKS
