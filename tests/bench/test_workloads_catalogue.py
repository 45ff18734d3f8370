"""Workloads by name, and that a seed is a plan to the byte."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from bros.bench.plan import digest
from bros.bench.workloads.catalogue import find_content
from bros.bench.workloads.contents import (
    CHATS,
    NAMES,
    SHARED_PREFIX,
    TABLE_1,
    ClosedLoop,
    OpenLoop,
    RandomArrivals,
)
from bros.core.errors import ConfigError
from bros.workload.arrivals import RT_SIZES
from support.bench_tokenizers import joining

GENERATED = [name for name in NAMES if ":" not in name]
ROOT = Path(__file__).resolve().parents[2]


def plan_digest(name: str, seed: int, burstiness: float = 1.0) -> str:
    content = find_content(name, seed=seed, requests=200).content
    sessions = OpenLoop(content, RandomArrivals(5.0, burstiness)).sessions(40.0, seed)
    backlog = ClosedLoop(content, 4).requests(seed)
    return digest(sessions, list(itertools.islice(backlog, 50)))


def test_names_are_those_of_the_published_tables() -> None:
    assert (CHATS, SHARED_PREFIX) == (tuple(RT_SIZES), tuple(TABLE_1))


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_is_one_plan(name: str) -> None:
    assert plan_digest(name, 1) == plan_digest(name, 1)
    assert len({plan_digest(name, 1), plan_digest(name, 2), plan_digest(name, 1, 0.5)}) == 3


PINNED = {
    "lmsys": "f444120ef09ad89f",
    "sharegpt": "95ee8cd353d43277",
    "synthetic": "8faf400b35fb436c",
    "toolbench": "5349337dfc241fa1",
    "embodied": "12fafa239ce1fd3d",
    "programming": "67bb35278a1d3dde",
    "video": "05a5f768f993b89f",
    "loogle": "4eb46d0cb4b64c6b",
    "multiturn": "a6bd387d53236a4d",
}


@pytest.mark.parametrize("name", GENERATED)
def test_plans_are_the_same_on_every_machine(name: str) -> None:
    assert plan_digest(name, 7, 0.5)[:16] == PINNED[name]


@pytest.mark.multiprocess
def test_plans_do_not_depend_on_the_hash_seed() -> None:
    script = (
        "from bros.bench.plan import digest\n"
        "from bros.bench.workloads.contents import RandomArrivals\n"
        "from bros.bench.workloads.catalogue import find_content\n"
        "from bros.bench.workloads.contents import OpenLoop\n"
        f"for name in {GENERATED}:\n"
        "    content = find_content(name, seed=3, requests=99).content\n"
        "    print(digest(OpenLoop(content, RandomArrivals(5.0)).sessions(20.0, 3), []))\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": hash_seed},
            cwd=ROOT,
            check=True,
            timeout=60,
            capture_output=True,
        ).stdout
        for hash_seed in ("0", "1", "31337")
    }
    [output] = outputs
    assert len(set(output.split())) == len(GENERATED)


def test_files_are_found_by_kind(tmp_path: Path) -> None:
    azure = tmp_path / "a.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.5,374,44\n")
    mooncake = tmp_path / "m.jsonl"
    mooncake.write_text(
        '{"timestamp": 9, "input_length": 9, "output_length": 2, "hash_ids": [4]}\n'
    )
    burst = tmp_path / "b.csv"
    burst.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,x,9,9,18,y\n6,x,9,0,9,y\n"
    )
    for name, notes in (
        (f"azure:{azure}", ()),
        (f"mooncake:{mooncake}", ()),
        (f"burstgpt:{burst}", ("b.csv: left out 1 failed requests",)),
    ):
        found = find_content(name, seed=1, requests=5)
        assert found.arrivals is not None
        assert len(OpenLoop(found.content, found.arrivals).sessions(1.0, 1)) == 1
        assert found.notes == notes


def test_real_text_needs_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    turns = '[{"from": "human", "value": "river stone lamp maybe"}, {"from": "gpt", "value": "%s"}]'
    answers = ("south quiet found under", "no")
    chats = ", ".join(f'{{"conversations": {turns % answer}}}' for answer in answers)
    path.write_text(f"[{chats}]")
    found = find_content(f"sharegpt:{path}", seed=1, requests=5, tokenizer=joining())
    assert found.arrivals is None
    [(draft,)] = found.content.conversations(1)
    assert (draft.prompt[0].tokens, draft.output_tokens) == (4, 4)
    assert found.notes == ("s.json: left out 1 too short, 0 too long",)
    with pytest.raises(ConfigError, match="needs the model's tokenizer"):
        find_content(f"sharegpt:{path}", seed=1, requests=5)


@pytest.mark.parametrize("name", ["chatgpt", "azure", "", "loogle:x"])
def test_unknown_names_say_what_there_is(name: str) -> None:
    with pytest.raises(ConfigError, match="there are lmsys, sharegpt, synthetic"):
        find_content(name, seed=1, requests=5)
