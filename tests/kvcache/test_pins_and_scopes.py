"""The order in which idle blocks are evicted if some are pinned, and scopes of sharing."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.kvcache.blocks import Side
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import PrefixCache, extend_keys
from support.tier import examples

SIZE = 4


@dataclass(frozen=True)
class Prompt:
    """Tokens of whole blocks by a path: those of one beginning share that."""

    path: str
    real_time: bool

    @property
    def keys(self) -> list[bytes]:
        return [self.path[: end + 1].encode() for end in range(len(self.path))]


class Blocks:
    """A cache alone, and what is in it by name."""

    def __init__(self, rule: str, protected: int) -> None:
        self.cache = PrefixCache(rule, protected)
        self.rule, self.protected = rule, protected
        self.idle: dict[bytes, bool] = {}  # key -> used by real-time requests
        self.pinned: set[bytes] = set()
        self._count = 0

    def use(self, prompt: Prompt) -> None:
        """A request begins, computes what is missing, and ends."""
        cache, self._count = self.cache, self._count + 1
        found = cache.find(prompt.keys)
        for node in found:
            cache.hold(node, self._count)
        cache.hit(found, prompt.real_time)
        nodes = list(found)
        for key in prompt.keys[len(found) :]:
            parent = nodes[-1] if nodes else None
            nodes.append(cache.add(key, parent, (0, Side.LEFT), self._count, "", prompt.real_time))
        for node in reversed(nodes):
            cache.release(node, self._count)
        self.idle = {node.key: node.real_time for node in cache.nodes()}

    def pin(self, prompt: Prompt) -> None:
        new = [key for key in prompt.keys if key not in self.pinned]
        self.cache.pin(new)
        self.pinned.update(new)

    def unpin(self, prompt: Prompt) -> None:
        """Those of its keys that no other pinned path goes through."""
        for key in reversed(prompt.keys):
            if key in self.pinned and not any(other[:-1] == key for other in self.pinned):
                self.cache.unpin([key])
                self.pinned.discard(key)

    def evict(self, real_time: bool) -> None:
        """The next one has to be of the best kind there is."""
        of_real_time = sum(self.idle.values())
        spared = self.rule == "class-aware" and not real_time and of_real_time <= self.protected

        def kind(key: bytes) -> tuple[bool, bool]:
            return key in self.pinned, self.idle[key] and self.rule == "class-aware"

        allowed = [key for key in self.idle if not (spared and self.idle[key])]
        node = self.cache.evict(real_time)
        assert (node is None) == (not allowed)
        if node is not None:
            assert kind(node.key) == min(map(kind, allowed))
            assert not any(other[:-1] == node.key for other in self.idle)
            del self.idle[node.key]


prompts = st.builds(Prompt, st.text("xyz", min_size=1, max_size=5), st.booleans())


@given(data=st.data())
@settings(max_examples=examples(150))
def test_pinned_blocks_are_evicted_after_all_other_idle_blocks(data: st.DataObject) -> None:
    blocks = Blocks(
        data.draw(st.sampled_from(["class-aware", "lru"])), data.draw(st.integers(0, 4))
    )
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["use", "use", "pin", "unpin", "evict", "evict"]))
        if what == "evict":
            blocks.evict(data.draw(st.booleans()))
        elif what == "use":
            blocks.use(data.draw(prompts))
        elif what == "pin":
            blocks.pin(data.draw(prompts))
        else:
            blocks.unpin(data.draw(prompts))
        blocks.cache.check_integrity()
        assert blocks.cache.num_pinned == len(blocks.pinned)
        assert blocks.cache.num_idle == len(blocks.idle)


def test_pinned_blocks_are_evicted_before_any_request_is_preempted() -> None:
    kv = KvCacheManager(4, SIZE, prefixes=PrefixCache(), num_host_blocks=8)
    keys: list[bytes] = []
    extend_keys(keys, array("i", range(8)), SIZE, 2)
    assert kv.append("ended", 8, Side.LEFT) is not None
    kv.computed("ended", keys, Side.LEFT)
    kv.free("ended")
    kv.pin(keys)
    assert kv.append("be", 8, Side.RIGHT) is not None
    assert kv.append("rt", 8, Side.LEFT, lambda: ["be"]) is not None
    assert kv.num_missing("be") == 0 and kv.match(keys).num_tokens == 0
    kv.check_integrity()
    assert kv.num_pinned_blocks == 2, "pinned again as soon as they are computed again"


# Scopes


@dataclass(frozen=True)
class Asked:
    tokens: tuple[int, ...]
    salt: str
    private_from: int | None
    private_salt: str
    public_tokens: int = 0

    @property
    def keys(self) -> list[bytes]:
        keys: list[bytes] = []
        count = len(self.tokens) // SIZE
        text, known = array("i", self.tokens), count // 2
        for blocks in (known, count):  # as requests do: what is known is extended
            extend_keys(
                keys, text, SIZE, blocks, self.salt, self.private_from, self.private_salt,
                self.public_tokens,
            )  # fmt: skip
        return keys

    def kind(self, tokens: range) -> tuple[str, ...]:
        """What others need besides the same tokens, in order to share these."""
        if self.private_from is not None and any(token >= self.private_from for token in tokens):
            return ("private", self.salt, self.private_salt)
        if self.public_tokens >= tokens.stop:
            return ("public",)
        return ("own", self.salt)

    def shares(self, other: Asked, block: int) -> bool:
        """Whether a block may be one for both, token by token."""
        tokens = range(block * SIZE, (block + 1) * SIZE)
        same = self.tokens[: tokens.stop] == other.tokens[: tokens.stop]
        same = same and len(self.tokens) >= tokens.stop <= len(other.tokens)
        return same and self.kind(tokens) == other.kind(tokens)


asked = st.builds(
    Asked,
    tokens=st.integers(0, 24).map(lambda n: tuple(range(n)))
    | st.lists(st.integers(0, 1), max_size=16).map(tuple),
    salt=st.sampled_from(["", "s"]),
    private_from=st.none() | st.integers(0, 20),
    private_salt=st.sampled_from(["", "p", "q"]),
    public_tokens=st.integers(0, 20),
)


@given(one=asked, other=asked)
def test_two_requests_share_what_their_scopes_allow(one: Asked, other: Asked) -> None:
    blocks = min(len(one.keys), len(other.keys))
    common = 0
    while common < blocks and one.shares(other, common):
        common += 1
    pairs = zip(one.keys, other.keys, strict=False)
    assert [a == b for a, b in pairs] == [block < common for block in range(blocks)]


@pytest.mark.parametrize("private_salt", ["", "p"])
def test_requests_without_a_scope_share_all_up_to_the_first_private_block(
    private_salt: str,
) -> None:
    tokens = tuple(range(24))
    plain = Asked(tokens, "", None, "").keys
    for private_from in range(30):
        scoped = Asked(tokens, "", private_from, private_salt).keys
        common = min(private_from // SIZE, 6)
        assert scoped[:common] == plain[:common]
        assert not set(scoped[common:]) & set(plain)


def test_no_salt_passes_for_tokens() -> None:
    tokens = array("i", [0x61616161] * 8)
    plain: list[bytes] = []
    extend_keys(plain, tokens, SIZE, 2)
    private: list[bytes] = []
    extend_keys(private, tokens[:4], SIZE, 1, "", 0, "a" * 16)
    assert private[0] not in plain
