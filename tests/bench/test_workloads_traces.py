"""Trace files: requests as the file says, shared prefixes as its hash ids say, errors by line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.plan import Piece
from bros.bench.workloads.catalogue import (
    Trace,
    read_azure,
    read_burstgpt,
    read_mooncake,
)
from bros.bench.workloads.contents import OpenLoop
from bros.core.errors import ConfigError
from bros.workload.arrivals import BLOCK_TOKENS

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def rows(trace: Trace) -> list[tuple[float, int, int]]:
    return [
        (time_s, sum(piece.tokens for piece in draft.prompt), draft.output_tokens)
        for time_s, (draft,) in zip(
            trace.arrivals.times_s, trace.content.conversations(0), strict=True
        )
    ]


def prompts(trace: Trace) -> list[tuple[Piece, ...]]:
    return [draft.prompt for (draft,) in trace.content.conversations(0)]


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "trace.txt"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def mooncake_line(time_ms: float, prompt: int, output: int, ids: list[int]) -> str:
    row = {"timestamp": time_ms, "input_length": prompt, "output_length": output, "hash_ids": ids}
    return json.dumps(row) + "\n"


def test_azure_rows_are_requests_that_share_nothing(file: Callable[[str], Path]) -> None:
    trace = read_azure(
        file(
            AZURE + "2023-11-16 18:15:50.0000000,396,109\n" + "2023-11-16 18:15:46.5000000,374,44\n"
        )
    )
    assert rows(trace) == [(0.0, 374, 44), (3.5, 396, 109)]
    assert len({piece.key for prompt in prompts(trace) for piece in prompt}) == 2
    assert trace.content.label == "trace"


def test_burstgpt_skips_failures_and_counts_them(file: Callable[[str], Path]) -> None:
    path = file(
        BURST
        + "5,ChatGPT,472,18,490,Conversation log\n"
        + "45,ChatGPT,1087,0,1087,Conversation log\n"
        + "5.5,GPT-4,417,276,693,API log\n"
        + "118,GPT-4,0,0,0,API log\n\n"
        + "108,ChatGPT,1360,647,2007,API log\n"
    )
    assert rows(read_burstgpt(path)) == [(0.0, 472, 18), (0.5, 417, 276), (103.0, 1360, 647)]
    assert read_burstgpt(path).skipped == 2
    four = read_burstgpt(path, model="GPT-4")
    assert (rows(four), four.skipped) == ([(0.0, 417, 276)], 1)


def test_burstgpt_columns_are_found_by_name(file: Callable[[str], Path]) -> None:
    header = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Log Type\n"
    trace = read_burstgpt(file(header + "7.25,s,1.5,ChatGPT,20,30,API log\n"))
    assert rows(trace) == [(0.0, 20, 30)]


@st.composite
def mooncake_requests(draw: st.DrawFn) -> list[tuple[int, int, int, list[int]]]:
    """Rows of a trace: time, prompt, output, ids. Few ids, so that prefixes are often shared."""
    count = draw(st.integers(1, 8))
    found = []
    for _ in range(count):
        prompt = draw(st.integers(1, 4 * BLOCK_TOKENS))
        blocks = math.ceil(prompt / BLOCK_TOKENS)
        ids = draw(st.lists(st.integers(0, 3), min_size=blocks, max_size=blocks))
        found.append((draw(st.integers(0, 10**6)), prompt, draw(st.integers(1, 2000)), ids))
    return found


@given(requests=mooncake_requests())
def test_mooncake_prompts_share_what_the_hash_ids_say(
    requests: list[tuple[int, int, int, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("mooncake") / "m.jsonl"
    path.write_text("".join(mooncake_line(*request) for request in requests))
    trace = read_mooncake(path)
    ordered = sorted(requests, key=lambda request: request[0])
    assert rows(trace) == [
        (time_ms / 1000 - ordered[0][0] / 1000, prompt, output)
        for time_ms, prompt, output, _ in ordered
    ]
    spelled = [
        [(piece.key, n) for piece in prompt for n in range(piece.tokens)]
        for prompt in prompts(trace)
    ]
    for (_, prompt, _, ids), mine in zip(ordered, spelled, strict=True):
        for (_, other_prompt, _, other_ids), other in zip(ordered, spelled, strict=True):
            equal = len(common_start(ids, other_ids)) * BLOCK_TOKENS
            shared = len(common_start(mine, other))
            assert shared == min(equal, prompt, other_prompt)


def common_start(one: list[Any], other: list[Any]) -> list[Any]:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [mine for mine, _ in pairs]


def test_a_trace_is_a_workload(file: Callable[[str], Path]) -> None:
    trace = read_mooncake(
        file(mooncake_line(2000, 513, 4, [7, 8]) + mooncake_line(5000, 30, 9, [7]))
    )
    first, second = OpenLoop(trace.content, trace.arrivals).sessions(10.0, seed=0)
    assert (first.at_s, second.at_s) == (0.0, 3.0)
    assert first.turns[0].request.prompt == (Piece("rt/trace/7", 512), Piece("rt/trace/8", 1))
    assert second.turns[0].request.prompt == (Piece("rt/trace/7", 30),)


GOOD_AZURE = "2023-11-16 18:15:46.5,374,44\n"
GOOD_BURST = "5,ChatGPT,472,18,490,API log\n"
GOOD_MOONCAKE = mooncake_line(0, 600, 4, [1, 2])


@pytest.mark.parametrize(
    ("read", "text", "line", "why"),
    [
        (read_azure, "a,b,c\n", 1, "the first line must be"),
        (read_azure, AZURE + GOOD_AZURE + "yesterday,1,2\n", 3, "is not a time"),
        (read_azure, AZURE + "2023-11-16 18:15:46.5,0,44\n", 2, "at least 1"),
        (read_burstgpt, "", 1, "no column 'Timestamp'"),
        (read_burstgpt, "Timestamp,Model,Request tokens\n", 1, "no column 'Response tokens'"),
        (read_burstgpt, BURST + GOOD_BURST + "5,ChatGPT,many,18,1,x\n", 3, "token counts"),
        (read_burstgpt, BURST + "5,ChatGPT\n", 2, "token counts"),
        (read_burstgpt, BURST + "nan,ChatGPT,1,1,2,x\n", 2, "must be a number"),
        (read_burstgpt, BURST + "5,ChatGPT,1,-1,2,x\n", 2, "must not be negative"),
        (read_mooncake, GOOD_MOONCAKE + "{\n", 2, "not JSON"),
        (read_mooncake, "[1]\n", 1, "not a JSON object"),
        (read_mooncake, GOOD_MOONCAKE + "\n" + mooncake_line(0, 600, 4, [1]), 3, "1 hash_ids for"),
        (read_mooncake, mooncake_line(0, 512, 4, [1, 2]), 1, "2 hash_ids for 512"),
        (read_mooncake, mooncake_line(0, 0, 4, []), 1, "at least 1"),
        (read_mooncake, GOOD_MOONCAKE.replace("4,", "4.5,"), 1, "at least 1"),
        (read_mooncake, GOOD_MOONCAKE.replace("[1, 2]", '["a", 2]'), 1, "whole numbers"),
        (read_mooncake, GOOD_MOONCAKE.replace("[1, 2]", "3"), 1, "whole numbers"),
        (read_mooncake, GOOD_MOONCAKE.replace('p": 0', 'p": "0"'), 1, "milliseconds"),
        (read_mooncake, GOOD_MOONCAKE.replace('p": 0', 'p": NaN'), 1, "milliseconds"),
        (read_mooncake, GOOD_MOONCAKE.replace('p": 0', 'p": -1'), 1, "not negative"),
        (read_mooncake, GOOD_MOONCAKE.replace('p": 0', f'p": 1{"0" * 400}'), 1, "milliseconds"),
    ],
)
def test_a_wrong_line_is_named(
    file: Callable[[str], Path], read: Callable[[Path], Trace], text: str, line: int, why: str
) -> None:
    path = file(text)
    with pytest.raises(ConfigError, match=why) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize("read", [read_azure, read_burstgpt, read_mooncake])
def test_files_that_are_not_there_or_not_text_are_errors(
    file: Callable[[str], Path], read: Callable[[Path], Trace]
) -> None:
    path = file("")
    path.write_bytes(b"\xff\xfe\x00")
    for wrong in (path, path.with_name("missing")):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            read(wrong)
        assert str(caught.value).startswith(str(wrong))


@pytest.mark.parametrize(
    ("read", "text"),
    [(read_azure, AZURE), (read_burstgpt, BURST + "5,x,9,0,9,y\n"), (read_mooncake, "\n")],
)
def test_files_without_requests_are_errors(
    file: Callable[[str], Path], read: Callable[[Path], Trace], text: str
) -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        read(file(text))
