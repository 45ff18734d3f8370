"""What torchrun says in the environment, and what the command line makes of it."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.cli.main import main
from bros.core.config import Config
from bros.core.errors import ConfigError
from bros.core.rank_env import RankEnv, torchrun_rank_env, with_ranks


def environ(rank: int, size: int, here: int | None = None) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size if here is None else here),
    }


@given(st.integers(2, 64), st.data())
def test_every_rank_knows_its_place(size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    place = torchrun_rank_env(environ(rank, size))
    assert place == RankEnv(rank, size)
    again = environ(rank, size) | {"TORCHELASTIC_RESTART_COUNT": "3"}
    assert torchrun_rank_env(again) == RankEnv(rank, size, attempt=3)
    config = Config()
    shared = with_ranks(config, place)
    assert shared.engine == dataclasses.replace(config.engine, tp=size)
    assert with_ranks(shared, place) == shared, "it may be said twice"


def test_one_process_is_none_of_several() -> None:
    assert torchrun_rank_env({"RANK": "1", "WORLD_SIZE": "2"}) is None, "others set these too"
    assert torchrun_rank_env(environ(0, 1)) is None


def test_ranks_of_several_machines_are_refused() -> None:
    with pytest.raises(ConfigError, match="--nnodes 1"):
        torchrun_rank_env(environ(3, 4, here=2))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["serve", "--tp", "2"], "--tp: 2 ranks, but torchrun has started 3"),
        (["chat"], "torchrun can start bros serve and bros profile, not bros chat"),
        (["doctor"], "not bros doctor"),
    ],
)
def test_what_torchrun_cannot_start(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments, environ(1, 3)) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("text", ["0", "-1", "65", "two"])
def test_numbers_of_ranks_that_cannot_be(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tp", text], {}) == 2
    assert "--tp: " in capsys.readouterr().err
