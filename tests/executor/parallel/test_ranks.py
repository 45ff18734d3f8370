"""What ranks say to each other, over real processes, and what they are told of lost ones."""

from __future__ import annotations

import signal
from array import array

import pytest
import torch

from bros.executor.parallel.ranks import SingleRank
from support.rank_talk import hang_one, lose_one, talk
from support.ranks import STEP_TIMEOUT_S, run_ranks


@pytest.mark.multiprocess
def test_every_kind_of_talk_reaches_all_ranks() -> None:
    """And they know the process ids of the others."""
    every = run_ranks(3, talk)
    pids = [pid for pid, _ in every]
    assert len(set(pids)) == 3
    for rank, (_, others) in enumerate(every):
        assert list(others) == pids[:rank] + pids[rank + 1 :]


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["sum", "gather", "plan", "flag"])
def test_a_rank_that_talks_to_an_ended_rank_fails_at_once(what: str) -> None:
    told = run_ranks(2, lose_one, signal.SIGKILL, what, may_die=[1])[0]
    assert told is not None
    message, waited_s = told
    assert message.startswith("rank 0 of 2 waited ") and "another rank ended" in message
    assert waited_s < STEP_TIMEOUT_S, "it is told of the end, and not after waiting in vain"


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", ["sum", "gather"])
def test_a_rank_that_waits_for_a_hanging_rank_fails_after_the_timeout(what: str) -> None:
    told = run_ranks(2, hang_one, what, step_timeout_s=1.0, may_die=[1])[0]
    assert told is not None
    message, waited_s = told
    assert "does not answer" in message and waited_s > 0.9


def test_a_single_rank_waits_for_no_other() -> None:
    ranks = SingleRank()
    x = torch.rand(2, 3)
    assert ranks.all_reduce_(x) is x and ranks.gather(x, (3,)) is x
    assert (ranks.rank, ranks.size, ranks.others) == (0, 1, ())
    assert ranks.minimum(5) == 5
    assert [ranks.broadcast_flag(flag) for flag in (True, False)] == [True, False]
    ranks.send(array("i", [1]))
    ranks.close()
    ranks.close()
