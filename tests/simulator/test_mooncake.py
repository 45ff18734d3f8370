"""Recorded requests with the hashes of their blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bros.core.errors import ConfigError
from bros.core.request import ServiceClass
from bros.simulator.prefix_workloads import MooncakeLoad, prompt_of
from bros.workload.arrivals import BLOCK_TOKENS, read_mooncake_trace

LINES: list[dict[str, Any]] = [
    {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 7, 8]},
    {"timestamp": 3000, "input_length": 1200, "output_length": 9, "hash_ids": [0, 7, 9]},
    {"timestamp": 2000, "input_length": 300, "output_length": 1, "hash_ids": [4]},
]


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path


def load(path: Path, **changes: Any) -> MooncakeLoad:
    options = {"rate": 1.5, "count": 3, **changes}
    return MooncakeLoad(source=path.name, recorded=read_mooncake_trace(path), **options)


def test_equal_blocks_are_equal_tokens_and_times_are_stretched_to_the_rate(tmp_path: Path) -> None:
    first, short, second = load(written(tmp_path, *LINES)).requests(0)
    assert [first.time_s, short.time_s, second.time_s] == [0.0, 1.0, 2.0]  # 1.5 per second as it is
    assert [r.prompt_tokens for r in (first, short, second)] == [1100, 300, 1200]
    assert [r.output_tokens for r in (first, short, second)] == [5, 1, 9]
    one, other = prompt_of(first, 0), prompt_of(second, 0)
    same = 2 * BLOCK_TOKENS
    assert one[:same] == other[:same] and one[same] != other[same]
    assert prompt_of(short, 0)[:10] != one[:10]
    assert first.family == second.family == 7 and short.family == 4
    twice = load(written(tmp_path, *LINES), rate=3.0).requests(0)
    assert [request.time_s for request in twice] == [0.0, 0.5, 1.0]


def test_only_so_many_are_played_and_a_share_is_best_effort(tmp_path: Path) -> None:
    path = written(tmp_path, *LINES)
    assert len(load(path, count=2).requests(0)) == 2
    classes = {request.service_class for request in load(path, be_share=1.0).requests(0)}
    assert classes == {ServiceClass.BE}
    assert load(path).label == "trace.jsonl, 1.5 req/s"


def test_a_file_that_is_missing_or_empty_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read"):
        read_mooncake_trace(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="has no requests"):
        read_mooncake_trace(written(tmp_path, ""))
