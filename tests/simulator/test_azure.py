"""Tools and videos at recorded times."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bros.core.errors import ConfigError
from bros.core.request import ServiceClass
from bros.simulator.prefix_workloads import (
    CODE,
    CONVERSATIONS,
    AzureLoad,
    published,
    read_azure_times,
)

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Code after 0, 1 and 9 seconds, chats after 0, 2 and 8; the files begin a minute apart."""
    code, chats = tmp_path / "code.csv", tmp_path / "chats.csv"
    code.write_text(HEAD + "".join(f"2023-11-16 18:15:{s:02}.0,10,5\n" for s in (10, 11, 19)))
    chats.write_text(HEAD + "".join(f"2023-11-16 18:16:{s:02}.0,10,5\n" for s in (0, 2, 8)))
    return code, chats


def load(files: tuple[Path, Path], **changes: Any) -> AzureLoad:
    options = {"rate": 6 / 9, "count": 6, **changes}
    return AzureLoad(recorded=read_azure_times(*files), **options)


def test_each_file_begins_at_once_and_code_asks_tools(files: tuple[Path, Path]) -> None:
    assert read_azure_times(*files) == (
        (0.0, CODE), (0.0, CONVERSATIONS), (1.0, CODE), (2.0, CONVERSATIONS),
        (8.0, CONVERSATIONS), (9.0, CODE),
    )  # fmt: skip
    made = load(files).requests(0)
    assert [request.time_s for request in made] == pytest.approx([0.0, 0.0, 1.0, 2.0, 8.0, 9.0])
    kinds = [request.parts[-2].name for request in made]
    assert [str(name).split()[0] for name in kinds] == [
        *("tool", "video", "tool", "video", "video", "tool")
    ]


def test_they_are_those_of_the_two_workloads_and_share_no_family(files: tuple[Path, Path]) -> None:
    made = load(files).requests(3)
    videos = [request for request in made if len(request.parts) == 2]
    tools = [request for request in made if len(request.parts) == 3]
    assert [r.parts for r in tools] == [r.parts for r in published(CODE, 1, count=3).requests(3)]
    assert [r.parts for r in videos] == [
        r.parts for r in published(CONVERSATIONS, 1, count=3).requests(3)
    ]
    assert not {r.family for r in tools} & {r.family for r in videos}
    assert load(files).requests(3) == made != load(files).requests(4)


def test_times_are_stretched_to_the_rate_and_the_first_ones_are_played(
    files: tuple[Path, Path],
) -> None:
    half = load(files, rate=3 / 9).requests(0)
    assert [request.time_s for request in half] == pytest.approx([0.0, 0.0, 2.0, 4.0, 16.0, 18.0])
    first = load(files, rate=1.0, count=4).requests(0)  # four within two seconds
    assert [request.time_s for request in first] == pytest.approx([0.0, 0.0, 2.0, 4.0])
    assert load(files, rate=1.5).label == "azure, 1.5 req/s"


def test_a_share_is_best_effort(files: tuple[Path, Path]) -> None:
    classes = {request.service_class for request in load(files, be_share=1.0).requests(0)}
    assert classes == {ServiceClass.BE}


def test_requests_that_come_all_at_once(files: tuple[Path, Path]) -> None:
    assert [request.time_s for request in load(files, count=2).requests(0)] == [0.0, 0.0]


def test_the_file_that_is_wrong_is_named(files: tuple[Path, Path], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("time\n")
    with pytest.raises(ConfigError, match=r"wrong\.csv:1"):
        read_azure_times(files[0], wrong)
