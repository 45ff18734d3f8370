"""Plans fitted to a context: never above the limit, nothing lost silently, sharing kept."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.plan import Piece, Planned, Session, SessionRequest
from bros.bench.planning import FitCounts, FittedBacklog, Fitter, Overlong, fit
from bros.bench.workloads.contents import (
    ChatContent,
    ClosedLoop,
    OpenLoop,
    RandomArrivals,
    be_content,
    preble_content,
)
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass
from bros.workload.lengths import Uniform


def request(pieces: list[int], output: int, name: str = "r") -> Planned:
    prompt = tuple(Piece(f"k{k}", tokens) for k, tokens in enumerate(pieces))
    return Planned(name=name, service_class=ServiceClass.RT, prompt=prompt, output_tokens=output)


def session(*requests: Planned) -> Session:
    return Session(1.0, tuple(SessionRequest(planned, 0.5) for planned in requests))


def lengths(sessions: list[Session]) -> list[tuple[int, int]]:
    return [
        (turn.request.prompt_tokens, turn.request.output_tokens)
        for session in sessions
        for turn in session.turns
    ]


requests = st.builds(
    request, st.lists(st.integers(1, 900), min_size=1, max_size=5), st.integers(1, 3000)
)
plans = st.lists(st.lists(requests, min_size=1, max_size=4).map(lambda made: session(*made)))


@given(
    sessions=plans,
    limit=st.integers(2, 3000),
    overlong=st.sampled_from(Overlong),
    factor=st.one_of(st.just(1.0), st.floats(1e-4, 1.0)),
)
def test_nothing_exceeds_the_limit_and_everything_is_counted(
    sessions: list[Session], limit: int, overlong: Overlong, factor: float
) -> None:
    fitted, counts = fit(sessions, limit, overlong, factor)
    sizes = lengths(fitted)
    assert all(prompt + output <= limit for prompt, output in sizes)
    assert all(prompt >= 1 and output >= 1 for prompt, output in sizes)
    assert counts.requests == len(lengths(sessions))
    assert counts.skipped == counts.requests - len(sizes)
    assert counts.sessions == len(sessions) - len(fitted)
    if overlong is Overlong.CLIP:
        assert counts.skipped == 0
        before = lengths(sessions)
        changed = sum(old != new for old, new in zip(before, sizes, strict=True))
        assert max(counts.scaled, counts.clipped) <= changed <= counts.scaled + counts.clipped
    else:
        assert counts.clipped == 0


@given(sessions=plans, limit=st.integers(2, 3000))
def test_a_factor_makes_the_longest_fit(sessions: list[Session], limit: int) -> None:
    longest = max((sum(size) for size in lengths(sessions)), default=0)
    # One token less, because the last piece keeps at least one token.
    factor = 1.0 if longest <= limit else (limit - 1) / longest
    fitted, counts = fit(sessions, limit, Overlong.SKIP, factor)
    assert (counts.skipped, counts.sessions) == (0, 0)
    assert len(fitted) == len(sessions)
    if longest <= limit:
        assert fitted == sessions


def common_start(one: Session, other: Session) -> int:
    """Tokens with which two first prompts begin alike."""
    spelled = [
        [(piece.key, n) for piece in session.turns[0].request.prompt for n in range(piece.tokens)]
        for session in (one, other)
    ]
    pairs = zip(*spelled, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@given(plan_seed=st.integers(0, 20), factor=st.floats(0.0005, 0.2))
def test_scaled_prompts_share_what_they_shared_and_no_more(plan_seed: int, factor: float) -> None:
    whole = OpenLoop(preble_content("toolbench", 100), RandomArrivals(8)).sessions(1.0, plan_seed)
    fitted, _ = fit(whole, 10**6, Overlong.SKIP, factor)
    for one, other in itertools.combinations(range(len(whole)), 2):
        before = common_start(whole[one], whole[other])
        assert common_start(fitted[one], fitted[other]) == math.floor(before * factor)


@given(sessions=plans, factor=st.floats(0.0005, 0.999))
def test_lengths_are_scaled_by_the_factor(sessions: list[Session], factor: float) -> None:
    fitted = fit(sessions, 10**6, Overlong.SKIP, factor).sessions
    for before, after in zip(lengths(sessions), lengths(fitted), strict=True):
        for whole, scaled in zip(before, after, strict=True):
            assert 0 <= scaled - math.floor(whole * factor) <= 1
        assert after[1] == max(1, math.floor(before[1] * factor))


@pytest.mark.parametrize(
    ("prompt", "output", "kept"),
    [
        (60, 40, (60, 40)),
        (90, 40, (60, 40)),
        (30, 500, (30, 70)),
        (200, 300, (50, 50)),
        (51, 50, (50, 50)),
    ],
)
def test_the_longer_part_is_clipped_first(prompt: int, output: int, kept: tuple[int, int]) -> None:
    fitted, counts = fit([session(request([prompt], output))], 100, Overlong.CLIP)
    assert lengths(fitted) == [kept]
    assert counts.clipped == (kept != (prompt, output))


def test_a_session_ends_before_the_turn_that_is_skipped() -> None:
    turns = [request([10], 10, "a"), request([95], 10, "b"), request([10], 10, "c")]
    fitted, counts = fit([session(*turns), session(turns[1])], 100, Overlong.SKIP)
    assert [turn.request.name for turn in fitted[0].turns] == ["a"]
    assert len(fitted) == 1
    assert counts == FitCounts(requests=4, skipped=3, sessions=1)


@given(factor=st.floats(0.25, 1.0), limit=st.integers(100, 400))
def test_prompts_still_grow_from_turn_to_turn(factor: float, limit: int) -> None:
    content = ChatContent("c", Uniform(4, 4), Uniform(5, 90), Uniform(5, 90), system_tokens=20)
    whole = OpenLoop(content, RandomArrivals(4)).sessions(2.0, 3)
    for one in fit(whole, limit, Overlong.SKIP, factor).sessions:
        for before, after in itertools.pairwise(one.turns):
            kept = after.request.prompt[: len(before.request.prompt)]
            assert kept == before.request.prompt


def test_a_backlog_is_fitted_as_it_is_taken() -> None:
    backlog = FittedBacklog(ClosedLoop(be_content(), 8), Fitter(700, Overlong.SKIP))
    whole = ClosedLoop(be_content(), 8).requests(5)
    taken = list(itertools.islice(backlog.requests(5), 20))
    expected = (p for p in whole if p.prompt_tokens + p.output_tokens <= 700)
    assert taken == list(itertools.islice(expected, 20))
    assert backlog.counts.requests - backlog.counts.skipped == 20
    assert (backlog.label, backlog.in_flight, backlog.texts) == ("synthetic, 8 in flight", 8, {})


def test_a_backlog_of_which_nothing_fits_is_an_error() -> None:
    backlog = FittedBacklog(ClosedLoop(be_content(), 8), Fitter(100, Overlong.SKIP))
    with pytest.raises(ConfigError, match="too long for 100 tokens"):
        next(backlog.requests(1))


@pytest.mark.parametrize(("limit", "factor"), [(1, 1.0), (0, 1.0), (10, 0.0), (10, 1.5)])
def test_impossible_limits_and_factors_are_refused(limit: int, factor: float) -> None:
    with pytest.raises(ConfigError):
        fit([], limit, Overlong.CLIP, factor)
