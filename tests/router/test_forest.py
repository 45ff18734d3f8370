"""The forest beside a set of prefixes."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.request import EngineRequest, Hints
from bros.kvcache.prefix_cache import extend_keys
from bros.router.forest import Forest, ReplicaCache
from support.routing import BLOCK, ask, fleet_of
from support.tier import examples


def known(forest: Forest, request: EngineRequest) -> int:
    return forest.walk(forest.root(request), forest.pieces(request)).end


def insert(forest: Forest, request: EngineRequest, replica: int = 0) -> None:
    pieces = forest.pieces(request)
    path = forest.walk(forest.root(request), pieces)
    forest.mark_used(forest.insert(forest.root(request), pieces, path), replica)


def new_forest(max_tokens: int = 10**6) -> Forest:
    forest = Forest(BLOCK, max_tokens)
    forest.caches[0] = ReplicaCache()
    return forest


token_lists = st.lists(st.integers(0, 1), min_size=1, max_size=30)


@settings(max_examples=examples(150, long=3000))
@given(st.lists(st.tuples(token_lists, st.sampled_from(["", "a"])), max_size=12), token_lists)
def test_a_prompt_is_known_as_far_as_one_before_it_began_alike(
    before: list[tuple[list[int], str]], tokens: list[int]
) -> None:
    forest = new_forest()
    for number, (other, salt) in enumerate(before):
        insert(forest, ask(f"{number}", other, salt=salt))
    whole = (len(tokens) - 1) // BLOCK
    common = 0
    for other, salt in before:
        blocks = min(whole, (len(other) - 1) // BLOCK)
        while blocks and other[: blocks * BLOCK] != tokens[: blocks * BLOCK]:
            blocks -= 1
        common = max(common, blocks if salt == "" else 0)
    assert known(forest, ask("r", tokens)) == common * BLOCK
    forest.check_integrity()


def test_what_is_private_is_shared_only_with_the_same_salt() -> None:
    forest = new_forest()
    tokens = range(5 * BLOCK)

    def request(salt: str, private_from: int | None) -> EngineRequest:
        hints = Hints(private_from=private_from, private_salt=salt)
        return ask(salt, tokens, hints=hints)

    insert(forest, request("mine", 2 * BLOCK + 1))
    assert known(forest, request("mine", 2 * BLOCK + 1)) == 4 * BLOCK
    assert known(forest, request("yours", 2 * BLOCK + 1)) == 2 * BLOCK
    assert known(forest, request("", None)) == 2 * BLOCK
    assert known(forest, request("mine", 3 * BLOCK)) == 2 * BLOCK
    insert(forest, request("", None))
    insert(forest, request("yours", BLOCK))
    assert known(forest, request("", None)) == 4 * BLOCK
    assert known(forest, request("mine", 2 * BLOCK + 1)) == 4 * BLOCK
    forest.check_integrity()


def keys_of(request: EngineRequest) -> list[bytes]:
    """As the cache of a replica names the blocks of its prompt."""
    keys: list[bytes] = []
    tokens, hints = array("i", request.prompt_token_ids), request.hints
    extend_keys(
        keys, tokens, BLOCK, (len(tokens) - 1) // BLOCK, request.kv_salt, hints.private_from,
        hints.private_salt, request.public_tokens,
    )  # fmt: skip
    return keys


scoped = st.builds(
    lambda tokens, public, private_from, private_salt, tenant: replace(
        ask("r", tokens, hints=Hints(private_from=private_from, private_salt=private_salt)),
        tenant=tenant,
        public_tokens=public,
    ),
    tokens=st.integers(1, 5 * BLOCK).map(range) | token_lists.filter(bool),
    public=st.sampled_from([0, BLOCK, 2 * BLOCK + 1, 10**9]),
    private_from=st.none() | st.integers(0, 5 * BLOCK),
    private_salt=st.sampled_from(["", "p"]),
    tenant=st.sampled_from(["ann", "bob"]),
)


@settings(max_examples=examples(200))
@given(st.lists(scoped, max_size=6), scoped)
def test_the_forest_shares_what_caches_share(
    before: list[EngineRequest], request: EngineRequest
) -> None:
    forest, cached = new_forest(), set[bytes]()
    for number, other in enumerate(before):
        insert(forest, replace(other, request_id=f"{number}"))
        cached.update(keys_of(other))
    keys = keys_of(request)
    common = next((n for n, key in enumerate(keys) if key not in cached), len(keys))
    assert known(forest, request) == common * BLOCK
    forest.check_integrity()


@pytest.mark.parametrize("length", [0, 1, BLOCK])
def test_a_prompt_without_a_whole_block_leaves_nothing(length: int) -> None:
    forest = new_forest()
    insert(forest, ask("r", range(length), salt="tenant"))
    assert forest.num_nodes == 0 and not forest._roots


def test_a_node_without_requests_and_cached_tokens_is_removed() -> None:
    forest = new_forest()
    first, second = ask("a", [1] * 9 + [2] * 8), ask("b", [1] * 9 + [3] * 8)
    insert(forest, first)
    insert(forest, second)
    assert forest.num_nodes == 3
    for node in list(forest):
        if node.start == 2 * BLOCK:
            forest.set_cached(node, 0, 0)
    assert known(forest, first) == 2 * BLOCK and forest.num_nodes == 1
    forest.set_cached(next(iter(forest)), 0, 0)
    assert forest.num_nodes == 0 and not forest._roots


@given(st.lists(token_lists, min_size=1, max_size=30), st.integers(1, 60))
def test_a_forest_never_has_more_than_it_may(prompts: list[list[int]], max_tokens: int) -> None:
    forest = new_forest(max_tokens)
    for number, tokens in enumerate(prompts):
        insert(forest, ask(f"{number}", tokens))
        forest.shrink()
        assert forest.num_tokens <= max_tokens
        assert forest.caches[0].num_tokens == forest.num_tokens
        forest.check_integrity()


def test_what_was_asked_for_longest_ago_goes_first() -> None:
    forest = new_forest(4 * BLOCK)
    requests = [ask(f"{n}", [n] * (2 * BLOCK + 1)) for n in range(3)]
    for request in (requests[0], requests[1], requests[0], requests[2]):
        insert(forest, request)
    forest.shrink()
    assert [known(forest, request) // BLOCK for request in requests] == [2, 0, 2]


def test_ancestors_of_a_node_that_was_removed_for_others_go_with_their_requests() -> None:
    fleet = fleet_of(1, "e2", window_s=5.0, max_tokens=48, capacity=16)

    def serve(name: str, tokens: list[int], now: float) -> None:
        request = ask(name, tokens)
        fleet.route([request], now)
        fleet.on_finished(name, [], now, cached=False)

    serve("prefix", [1] * 8 + [9], 0.0)
    serve("longer", [1] * 8 + [2] * 8 + [9], 0.0)
    for number, length in enumerate((17, 17, 9)):  # they leave the longer one no room
        serve(f"other-{number}", [20 + number] * length, 1.0)
    fleet._ledger.expire(100.0)
    fleet.check_integrity()
