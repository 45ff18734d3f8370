"""How requests use the prefix cache: look up, publish, pin, and announce what will be looked up."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from bros.core.request import EngineRequest, ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import extend_keys
from bros.kvcache.sharing import NO_MATCH
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.state import RequestState

# ---- Pins: blocks of an ended request stay cached for the next call of its session (Hints.keep_s).
#
#     entries     "a" until 7 s    "b" until 9 s       the oldest one is released first
#                       |                |
#     keys     k0 - k1 - k2       k0 - k1 - k2' - k3'
#              `--------`---------`--------`            shared keys are pinned and counted once
#
# The cache evicts pinned blocks after all other idle blocks, but before any request is preempted:
# a pin costs only the other idle blocks that could have stayed in its place.


@dataclass(slots=True)
class _Link:
    """A pinned key.

    parent: the key of the block before it, None for a first block.
    uses: entries that end here, and keys right after it.
    """

    parent: bytes | None
    uses: int = 0


@dataclass(frozen=True, slots=True)
class _Entry:
    """What one request has pinned.

    last_key: of the last pinned block; the blocks before it are pinned as well.
    until_s: when the pin expires, in the clock of `now`.
    """

    last_key: bytes
    until_s: float


class Pins:
    """Pinned blocks by the id of the request that computed them.

    max_blocks: most different blocks that are pinned at once.
    max_entries: most requests whose blocks are pinned at once.
    Beyond either bound the oldest entry is released.
    """

    def __init__(self, cache: KvCacheManager, max_blocks: int, max_entries: int = 10_000) -> None:
        self._cache = cache
        self._max_blocks = max_blocks
        self._max_entries = max_entries
        self._entries: dict[str, _Entry] = {}  # the oldest one first
        self._links: dict[bytes, _Link] = {}
        self._ends: list[tuple[float, str]] = []  # (until_s, id) of each entry, by until_s

    def pin(self, request_id: str, keys: Sequence[bytes], until_s: float) -> None:
        """Pin the blocks of a request; an earlier pin of this id is released.

        keys: of its full blocks from the first one on, see `extend_keys`. Blocks beyond the
        first max_blocks are not pinned.
        """
        self.release(request_id)
        keys = keys[: self._max_blocks]
        if not keys:
            return
        known = len(keys)
        while known and keys[known - 1] not in self._links:
            known -= 1
        for index in range(known, len(keys)):
            self._links[keys[index]] = _Link(keys[index - 1] if index else None)
            if index:
                self._links[keys[index - 1]].uses += 1
        self._links[keys[-1]].uses += 1
        self._cache.pin(keys[known:])
        self._entries[request_id] = _Entry(keys[-1], until_s)
        bisect.insort(self._ends, (until_s, request_id), key=itemgetter(0))
        while len(self._links) > self._max_blocks or len(self._entries) > self._max_entries:
            self.release(next(iter(self._entries)))

    def release(self, request_id: str) -> None:
        """Unpin the blocks of a request, except blocks that another entry pins."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        same = bisect.bisect_left(self._ends, entry.until_s, key=itemgetter(0))
        del self._ends[self._ends.index((entry.until_s, request_id), same)]
        links, gone = self._links, []
        key: bytes | None = entry.last_key
        while key is not None:
            links[key].uses -= 1
            if links[key].uses:
                break
            gone.append(key)
            key = links.pop(key).parent
        self._cache.unpin(gone)

    def expire(self, now: float) -> None:
        """Release all entries that have expired."""
        while self._ends and self._ends[0][0] <= now:
            self.release(self._ends[0][1])

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts of uses are right and the bounds hold."""
        uses = dict.fromkeys(self._links, 0)
        for link in self._links.values():
            if link.parent is not None:
                uses[link.parent] += 1
        for entry in self._entries.values():
            uses[entry.last_key] += 1
        assert all(link.uses == uses[key] > 0 for key, link in self._links.items())
        assert len(self._links) <= self._max_blocks and len(self._entries) <= self._max_entries
        ends = [(entry.until_s, request_id) for request_id, entry in self._entries.items()]
        assert sorted(self._ends) == sorted(ends)
        assert all(before[0] <= after[0] for before, after in itertools.pairwise(self._ends))


def look_up(kv: KvCacheManager, state: RequestState) -> None:
    """Update `match` and `num_computed_tokens` of a waiting request from the prefix cache."""
    if kv.finds_prefixes:
        keys = state.keys(kv.block_size, state.num_reusable)
        state.match = kv.match(keys, state.match)
        state.num_computed_tokens = state.match.num_tokens


class Prefixes:
    """The scheduler's use of the prefix cache; does nothing if the cache is off.

    The last token of a prompt is never looked up, since the first output token is sampled from its
    logits, nor is any token whose hidden state is still to be read. A prefill-only request
    recomputes its last block for that reason, unless its whole prompt is cached on arrival
    (`has_cached`).
    """

    def __init__(self, kv: KvCacheManager, counters: Mapping[ServiceClass, ClassCounters]) -> None:
        self._kv = kv
        self._counters = counters
        self.pins = Pins(kv, kv.num_blocks // 2)

    def cached_tokens(self, request: EngineRequest) -> int:
        """Tokens of a prompt that are cached now."""
        if not self._kv.finds_prefixes:
            return 0
        prompt, size = array("i", request.prompt_token_ids), self._kv.block_size
        most = request.num_read if request.reads_prompt else len(prompt) - 1
        keys: list[bytes] = []
        extend_keys(
            keys, prompt, size, most // size, request.kv_salt,
            request.hints.private_from, request.hints.private_salt, request.public_tokens,
        )  # fmt: skip
        return self._kv.match(keys).num_tokens

    def whole_blocks_of(self, request: EngineRequest) -> EngineRequest:
        """A prefill-only request cut to whole blocks, which are all that the cache keeps.

        Without a prefix cache no token is left.
        """
        size = self._kv.block_size if self._kv.finds_prefixes else len(request.prompt_token_ids) + 1
        whole = len(request.prompt_token_ids) // size * size
        return replace(request, prompt_token_ids=request.prompt_token_ids[:whole])

    def has_cached(self, state: RequestState) -> bool:
        """Whether the whole prompt of a new prefill-only request is cached."""
        keys = state.keys(self._kv.block_size, state.prompt_len)
        if self._kv.match(keys).num_tokens < state.prompt_len:
            return False
        self._note_start(state, state.prompt_len)
        return True

    def publish(self, filled: Sequence[tuple[RequestState, int]], failed: Container[str]) -> None:
        """Enter the full blocks that a step has computed into the prefix cache.

        filled: see Gains.
        failed: ids of requests whose KV may be wrong; their blocks are left out.
        """
        if not self._kv.finds_prefixes:
            return
        size = self._kv.block_size
        for state, num_tokens in filled:
            computed = state.num_computed_tokens
            if state.num_reused is None:
                self._note_start(state, computed - num_tokens)
            fills = computed % size < num_tokens  # not all that run for the first time do
            if fills and not state.record.left and state.request_id not in failed:
                keys = state.keys(size, computed)
                self._kv.computed(state.request_id, keys, state.side, computed)

    def _note_start(self, state: RequestState, num_cached: int) -> None:
        """Count the prompt tokens that were cached when a request began."""
        state.num_reused = min(num_cached, state.prompt_len)
        self._counters[state.service_class].prefix_tokens += state.num_reused

    def keep(self, state: RequestState, now: float) -> None:
        """Pin the blocks of an ended request for the next call of its session."""
        keep_s = state.request.hints.keep_s
        if keep_s > 0.0 and self._kv.finds_prefixes:
            num_computed = len(state.token_ids) - state.samples  # the last sample never was
            if state.grammar is not None:  # nor were the tokens that it forced behind the sample
                num_computed = min(num_computed, state.num_computed_tokens)
            keys = state.keys(self._kv.block_size, num_computed)
            self.pins.pin(state.request_id, keys, now + keep_s)

    def enqueue(self, state: RequestState) -> None:
        """A request joins the waiting queue: its prompt's blocks are expected to be looked up."""
        self._expect(state, waits=True)

    def dequeue(self, state: RequestState) -> None:
        """A request leaves the waiting queue."""
        self._expect(state, waits=False)
        state.match = NO_MATCH

    def _expect(self, state: RequestState, waits: bool) -> None:
        if self._kv.finds_prefixes and state.service_class is ServiceClass.BE:
            # By what was asked, not by what is still to be read: that may change before `dequeue`.
            known = 0 if state.request.reads_prompt else state.prompt_len
            self._kv.expect(state.keys(self._kv.block_size, known), waits)
