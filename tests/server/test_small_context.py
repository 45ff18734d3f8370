"""The warning at the start of a server whose context is very small."""

from __future__ import annotations

import dataclasses

import pytest

from bros.core.config import EngineConfig
from bros.server.build import small_context
from support.scheduling import engine_info

INFO = engine_info(blocks=2, block_size=16, max_model_len=32)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"kv_memory": "2MiB"}, "give --kv-memory more"),
        ({"kv_blocks": 2}, "give --kv-blocks more"),
        ({"max_model_len": 32}, "give --max-model-len more, or leave it out"),
    ],
)
def test_a_small_context_is_a_warning_that_says_what_to_change(
    options: dict[str, str | int], change: str
) -> None:
    warning = small_context(INFO, EngineConfig(**options))  # type: ignore[arg-type]
    assert warning is not None and "only 32 tokens" in warning and warning.endswith(change)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_model_len": 256, "num_kv_blocks": 16},
        {"num_kv_blocks": 1000},  # the model's own limit
        {"whole_prompts": True},
    ],
)
def test_other_contexts_are_no_warning(changes: dict[str, int]) -> None:
    assert small_context(dataclasses.replace(INFO, **changes), EngineConfig()) is None
