"""What is asked: lengths, shared prefixes, growing prompts, and how loops put them together."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.plan import Piece
from bros.bench.workloads.contents import (
    BE_TEMPLATE,
    RT_TEMPLATE,
    TABLE_1,
    ChatContent,
    ClosedLoop,
    Content,
    Conversation,
    Draft,
    OpenLoop,
    RandomArrivals,
    RecordedArrivals,
    RecordedContent,
    RequestTemplate,
    SharedPrefixContent,
    be_content,
    cut,
    preble_content,
    rt_content,
    texts_of,
)
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass, Slo
from bros.workload.lengths import Uniform


def first(content: Content, count: int, seed: int = 1) -> list[Conversation]:
    return list(itertools.islice(content.conversations(seed), count))


def tokens(pieces: tuple[Piece, ...]) -> int:
    return sum(piece.tokens for piece in pieces)


def in_common(one: tuple[Piece, ...], other: tuple[Piece, ...]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(piece.tokens for piece, _ in pairs)


def test_documents_are_uniform() -> None:
    drafts = [conversation[0] for conversation in first(be_content(), 20_000)]
    prompts = [tokens(draft.prompt) for draft in drafts]
    outputs = [draft.output_tokens for draft in drafts]
    assert (min(prompts), max(prompts)) == (512, 1024)
    assert (min(outputs), max(outputs)) == (32, 128)
    assert statistics.fmean(prompts) == pytest.approx(768, rel=0.01)


def test_drawn_requests_share_nothing() -> None:
    drafts = [c[0] for c in (*first(rt_content("lmsys"), 200), *first(be_content(), 200))]
    assert len({piece.key for draft in drafts for piece in draft.prompt}) == 400


@pytest.mark.parametrize("name", TABLE_1)
def test_rows_of_preble_have_their_statistics(name: str) -> None:
    row = TABLE_1[name]
    drafts = [c[0] for c in first(SharedPrefixContent(name, row, groups=3000), 12_000)]
    prompts = [tokens(draft.prompt) for draft in drafts]
    assert statistics.fmean(prompts) == pytest.approx(row.prompt.mean, rel=0.03)
    assert statistics.pstdev(prompts) == pytest.approx(row.prompt.std, rel=0.06)
    outputs = [draft.output_tokens for draft in drafts]
    assert statistics.fmean(outputs) == pytest.approx(row.output.mean, rel=0.05)
    assert statistics.pstdev(outputs) == pytest.approx(row.output.std, rel=0.1)
    common, key = (sum(draft.prompt[part].tokens for draft in drafts) for part in (0, 1))
    assert (common + key) / sum(prompts) == pytest.approx(row.shared, rel=0.03)
    assert key / (common + key) == pytest.approx(row.key, rel=0.03)


def test_requests_of_a_group_begin_alike_and_go_on_differently() -> None:
    drafts = [c[0] for c in first(preble_content("toolbench", 39 * 5), 200)]
    for one, other in itertools.combinations(drafts, 2):
        common, key, rest = one.prompt
        same_group = key.key == other.prompt[1].key
        assert in_common(one.prompt, other.prompt) == common.tokens + same_group * key.tokens
        assert rest.key != other.prompt[2].key
        assert key.tokens > common.tokens


@pytest.mark.parametrize("name", TABLE_1)
def test_so_many_requests_share_a_key_portion(name: str) -> None:
    requests = 5000
    drafts = [c[0] for c in first(preble_content(name, requests), requests)]
    groups = {draft.prompt[1].key for draft in drafts}
    assert requests / len(groups) == pytest.approx(TABLE_1[name].requests_per_key, rel=0.02)


def test_few_groups_are_popular_with_zipf() -> None:
    count = 50_000
    content = preble_content("toolbench", 39 * 100, zipf=1.1)
    seen = Counter(c[0].prompt[1].key for c in first(content, count))
    total = sum(rank**-1.1 for rank in range(1, 101))
    for rank in (1, 2, 10):
        share = seen[f"toolbench/group {rank - 1}"] / count
        assert share == pytest.approx(rank**-1.1 / total, rel=0.1)


def test_without_zipf_groups_are_equally_popular() -> None:
    seen = Counter(c[0].prompt[1].key for c in first(preble_content("embodied", 480), 20_000))
    assert len(seen) == 10
    assert max(seen.values()) < 1.15 * min(seen.values())


@pytest.mark.parametrize(("groups", "zipf"), [(0, 0.0), (5, -1.0), (5, float("nan"))])
def test_impossible_groups_are_refused(groups: int, zipf: float) -> None:
    with pytest.raises(ConfigError):
        SharedPrefixContent("x", TABLE_1["video"], groups, zipf)


@given(low=st.integers(1, 4), more=st.integers(0, 4), system=st.integers(0, 50), seed=st.integers())
def test_prompts_grow_by_the_answer_and_the_next_question(
    low: int, more: int, system: int, seed: int
) -> None:
    content = ChatContent("c", Uniform(low, low + more), Uniform(5, 30), Uniform(2, 9), system, 3.0)
    for conversation in first(content, 20, seed):
        assert low <= len(conversation) <= low + more
        assert conversation[0].think_s == 0.0
        assert tokens(conversation[0].prompt) - system in range(5, 31)
        for before, after in itertools.pairwise(conversation):
            start = len(before.prompt)
            assert after.prompt[:start] == before.prompt
            answer, question = after.prompt[start:]
            assert answer.tokens == before.output_tokens
            assert question.tokens in range(5, 31)


def test_users_think_as_long_as_asked_on_average() -> None:
    content = ChatContent("c", Uniform(3, 3), Uniform(1, 2), Uniform(1, 2), think_s=8.0)
    pauses = [draft.think_s for c in first(content, 5000) for draft in c[1:]]
    assert statistics.fmean(pauses) == pytest.approx(8.0, rel=0.04)
    assert statistics.pstdev(pauses) == pytest.approx(8.0, rel=0.06)


def test_conversations_share_the_system_text_alone() -> None:
    content = ChatContent("c", Uniform(2, 2), Uniform(5, 9), Uniform(5, 9), system_tokens=70)
    for one, other in itertools.combinations(first(content, 20), 2):
        assert in_common(one[-1].prompt, other[-1].prompt) == 70


def test_negative_chats_are_refused() -> None:
    with pytest.raises(ConfigError, match="must not be negative"):
        ChatContent("c", Uniform(1, 1), Uniform(1, 1), Uniform(1, 1), think_s=-1.0)


RECORDED = RecordedContent(
    "two",
    (
        (Draft((Piece("a", 3), Piece("b", 4)), 5),),
        (Draft((Piece("a", 3), Piece("written", 2)), 6), Draft((Piece("c", 9),), 7, 1.5)),
    ),
    {"written": "as is"},
)


def test_an_open_loop_sends_one_conversation_per_arrival() -> None:
    slo = Slo(ttft_s=1.0)
    template = RequestTemplate(ServiceClass.RT, "q", slo=slo, forced=False)
    loop = OpenLoop(RECORDED, RecordedArrivals((0.0, 2.0)), template)
    one, two = loop.sessions(10.0, 0)
    assert (one.at_s, two.at_s) == (0.0, 2.0)
    [only] = one.turns
    assert only.request.name == "q-0"
    assert only.request.prompt == (Piece("q/a", 3), Piece("q/b", 4))
    assert [turn.request.name for turn in two.turns] == ["q-1.0", "q-1.1"]
    assert [turn.think_s for turn in two.turns] == [0.0, 1.5]
    for turn in (*one.turns, *two.turns):
        assert turn.request.service_class is ServiceClass.RT
        assert turn.request.slo == slo
        assert not turn.request.forced
    assert loop.label == "two, as recorded"


def test_a_content_that_ends_begins_again_with_other_text() -> None:
    loop = ClosedLoop(RECORDED, 2)
    requests = list(itertools.islice(loop.requests(0), 7))
    assert len({request.name for request in requests}) == 7
    assert [request.output_tokens for request in requests] == [5, 6, 7, 5, 6, 7, 5]
    assert [piece.key for piece in requests[1].prompt] == ["be/a", "written"]
    keys = [[piece.key for piece in request.prompt] for request in requests]
    assert keys[3] == ["be1/a", "be1/b"]
    assert keys[4] == ["be1/a", "written"]
    assert keys[6] == ["be2/a", "be2/b"]
    assert all(request.service_class is ServiceClass.BE for request in requests)
    assert loop.label == "two, 2 in flight"


def test_loops_of_a_run_share_no_made_up_text() -> None:
    content = preble_content("toolbench", 100)
    sessions = OpenLoop(content, RandomArrivals(5)).sessions(10.0, 1)
    backlog = itertools.islice(ClosedLoop(content, 1).requests(1), 50)
    one = {piece for session in sessions for piece in session.turns[0].request.prompt}
    other = {piece for request in backlog for piece in request.prompt}
    assert not {piece.key for piece in one} & {piece.key for piece in other}


def test_texts_are_passed_to_the_maker_of_prompts() -> None:
    loops = (OpenLoop(RECORDED, RandomArrivals(1)), ClosedLoop(be_content(), 1))
    assert texts_of(*loops) == {"written": "as is"}
    assert texts_of(ClosedLoop(RECORDED, 1), object()) == {"written": "as is"}


@given(limit=st.integers(1, 300), seed=st.integers(0, 50))
def test_prompts_are_cut_at_their_end(limit: int, seed: int) -> None:
    whole = OpenLoop(rt_content("lmsys"), RandomArrivals(5)).sessions(5.0, seed)
    template = RequestTemplate(ServiceClass.RT, "rt", max_prompt_tokens=limit)
    short = OpenLoop(rt_content("lmsys"), RandomArrivals(5), template).sessions(5.0, seed)
    for one, other in zip(whole, short, strict=True):
        before, after = one.turns[0].request, other.turns[0].request
        assert after.prompt_tokens == min(limit, before.prompt_tokens)
        assert after.output_tokens == before.output_tokens
        assert after.prompt[0].key == before.prompt[0].key


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), limit=st.integers(0, 130))
def test_a_cut_prompt_is_the_beginning_of_the_whole(lengths: list[int], limit: int) -> None:
    prompt = tuple(Piece(str(k), length) for k, length in enumerate(lengths))
    spelled = [(piece.key, n) for piece in prompt for n in range(piece.tokens)]
    kept = [(piece.key, n) for piece in cut(prompt, limit) for n in range(piece.tokens)]
    assert kept == spelled[:limit]


def test_impossible_loops_are_refused() -> None:
    with pytest.raises(ConfigError, match="-1 requests in flight"):
        ClosedLoop(be_content(), -1)
    with pytest.raises(ConfigError, match="cut to 0"):
        RequestTemplate(ServiceClass.RT, "rt", max_prompt_tokens=0)
    assert RT_TEMPLATE.name != BE_TEMPLATE.name
