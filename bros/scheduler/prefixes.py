"""What the scheduler tells the KV cache about tokens, so that prompts that begin alike share it."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bros.core.request import EngineRequest, ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import extend_keys
from bros.kvcache.sharing import NO_MATCH
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.packing import Packing
from bros.scheduler.state import RequestState

# ---- Pins: blocks of an ended request stay in the prefix cache for its next turn (Hints.keep_s).
#
#     entries     "a" until 7 s    "b" until 9 s       the oldest one is released first
#                       |                |
#     keys     k0 - k1 - k2       k0 - k1 - k2' - k3'
#              `--------`---------`--------`            pinned once, and counted once
#
# The cache evicts pinned blocks after all other idle blocks, but before any request is preempted:
# a pin costs only the other idle blocks that could have stayed in its place.


_MANY_STALE = 64


class PinnedCache(Protocol):
    """A cache whose blocks can be pinned; KvCacheManager is one."""

    def pin(self, keys: Iterable[bytes]) -> None:
        """Pin the blocks with these keys; a block's key comes after its predecessor's."""
        ...

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Unpin the blocks with these keys; a block's key comes before its predecessor's."""
        ...


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
    number: of entries before it.
    """

    last_key: bytes
    until_s: float
    number: int


class Pins:
    """Pinned blocks by the id of the request that computed them.

    max_blocks: most different blocks that are pinned at once; the oldest entry goes first.
    max_entries: most requests whose blocks are pinned at once.
    """

    def __init__(self, cache: PinnedCache, max_blocks: int, max_entries: int = 10_000) -> None:
        self._cache = cache
        self._max_blocks = max_blocks
        self._max_entries = max_entries
        self._entries: dict[str, _Entry] = {}  # in the order of their numbers
        self._links: dict[bytes, _Link] = {}
        self._ends: list[tuple[float, int, str]] = []  # (until_s, number, id), with stale ones
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

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
        self._count += 1
        self._entries[request_id] = _Entry(keys[-1], until_s, self._count)
        heapq.heappush(self._ends, (until_s, self._count, request_id))
        while len(self._links) > self._max_blocks or len(self._entries) > self._max_entries:
            self.release(next(iter(self._entries)))
        self._forget_stale()

    def release(self, request_id: str) -> None:
        """Unpin the blocks of a request, except blocks that another entry pins."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
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
            _, number, request_id = heapq.heappop(self._ends)
            entry = self._entries.get(request_id)
            if entry is not None and entry.number == number:
                self.release(request_id)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every key is used, as often as it says, and bounds hold."""
        uses = dict.fromkeys(self._links, 0)
        for link in self._links.values():
            if link.parent is not None:
                uses[link.parent] += 1
        for entry in self._entries.values():
            uses[entry.last_key] += 1
        assert all(link.uses == uses[key] > 0 for key, link in self._links.items())
        assert len(self._links) <= self._max_blocks and len(self._entries) <= self._max_entries
        numbers = [entry.number for entry in self._entries.values()]
        assert numbers == sorted(numbers), "the oldest one comes first"

    def _forget_stale(self) -> None:
        """Drop ends of entries that were released; they may be hours away."""
        if len(self._ends) > 2 * len(self._entries) + _MANY_STALE:
            self._ends = [
                (entry.until_s, entry.number, request_id)
                for request_id, entry in self._entries.items()
            ]
            heapq.heapify(self._ends)


def look_up(kv: KvCacheManager, state: RequestState) -> None:
    """See how much of what a waiting request has to compute is there."""
    if kv.finds_prefixes:
        keys = state.keys(kv.block_size, len(state.token_ids) - 1)
        state.match = kv.match(keys, state.match)
        state.num_cached = state.match.num_tokens


class Prefixes:
    """Does nothing if the cache finds no prefixes. The last token of a prompt is never looked up:
    it has to be computed for the first one of the answer. Of a fill it is computed as well, unless
    all is there when it comes."""

    def __init__(self, kv: KvCacheManager, counters: Mapping[ServiceClass, ClassCounters]) -> None:
        self._kv = kv
        self._counters = counters
        self._pins = Pins(kv, kv.num_blocks // 2)

    def cached_tokens(self, request: EngineRequest) -> int:
        """How much of a prompt is there now."""
        if not self._kv.finds_prefixes:
            return 0
        prompt, size = array("i", request.prompt_token_ids), self._kv.block_size
        keys: list[bytes] = []
        extend_keys(
            keys, prompt, size, (len(prompt) - 1) // size, request.cache_salt,
            request.hints.private_from, request.hints.private_salt,
        )  # fmt: skip
        return self._kv.match(keys).num_tokens

    def fillable(self, request: EngineRequest) -> EngineRequest:
        """Without what would not stay in the cache: tokens that fill no block, or all of them."""
        size = self._kv.block_size if self._kv.finds_prefixes else len(request.prompt_token_ids) + 1
        whole = len(request.prompt_token_ids) // size * size
        return replace(request, prompt_token_ids=request.prompt_token_ids[:whole])

    def has_all(self, state: RequestState) -> bool:
        """Whether a fill that has just come need not compute anything."""
        keys = state.keys(self._kv.block_size, state.prompt_len)
        if self._kv.match(keys).num_tokens < state.prompt_len:
            return False
        self._note_start(state, state.prompt_len)
        return True

    def look_up(self, state: RequestState) -> None:
        """See how much of what a waiting request has to compute is there."""
        look_up(self._kv, state)

    def publish(self, packing: Packing[RequestState], failed: Container[str]) -> None:
        """Full blocks that a step has computed can be found from now on, but for those of failed
        requests, which may hold anything."""
        if not self._kv.finds_prefixes:
            return
        size = self._kv.block_size
        for state, num_tokens in packing.selected:
            if state.num_reused is None:
                self._note_start(state, state.num_cached - num_tokens)
            # Whether it has filled a block: its last one holds fewer tokens than it computed.
            filled = state.num_cached % size < num_tokens
            if filled and not state.record.left and state.request_id not in failed:
                self._kv.computed(state.request_id, state.keys(size, state.num_cached), state.side)

    def _note_start(self, state: RequestState, num_cached: int) -> None:
        """The first step of a request is over: it need not compute what was cached then."""
        state.num_reused = min(num_cached, state.prompt_len)
        self._counters[state.service_class].prefix_tokens += state.num_reused

    def keep(self, state: RequestState, now: float) -> None:
        """Pin what an ended request leaves for the next call of its session."""
        keep_s = state.request.hints.keep_s
        if keep_s > 0.0 and self._kv.finds_prefixes:
            keys = state.keys(self._kv.block_size, state.num_known)
            self._pins.pin(state.request_id, keys, now + keep_s)

    def release(self, request_id: str) -> None:
        """Unpin it: no later call needs it."""
        self._pins.release(request_id)

    def expire(self, now: float) -> None:
        """Release pins that have expired."""
        self._pins.expire(now)

    def waits(self, state: RequestState) -> None:
        """What waiting best-effort requests begin with is worth keeping."""
        self._expect(state, waits=True)

    def dequeue(self, state: RequestState) -> None:
        self._expect(state, waits=False)
        state.match = NO_MATCH

    def _expect(self, state: RequestState, waits: bool) -> None:
        if self._kv.finds_prefixes and state.service_class is ServiceClass.BE:
            self._kv.expect(state.keys(self._kv.block_size, state.prompt_len), waits)
