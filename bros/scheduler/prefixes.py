"""What the scheduler tells the KV cache about tokens, so that prompts that begin alike share it."""

from __future__ import annotations

from array import array
from collections.abc import Container, Mapping
from dataclasses import replace

from bros.core.request import EngineRequest, ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import extend_keys
from bros.kvcache.sharing import NO_MATCH
from bros.scheduler.counters import ClassCounters
from bros.scheduler.kept import Kept
from bros.scheduler.selection import Packing
from bros.scheduler.state import RequestState


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
        self._kept = Kept(kv, kv.num_blocks // 2)

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
        """A request has ended that somebody may come back to."""
        keep_s = state.request.hints.keep_s
        if keep_s > 0.0 and self._kv.finds_prefixes:
            keys = state.keys(self._kv.block_size, state.num_known)
            self._kept.keep(state.request_id, keys, now + keep_s)

    def release(self, request_id: str) -> None:
        """Nobody comes back to it."""
        self._kept.release(request_id)

    def expire(self, now: float) -> None:
        """Forget those that nobody has come back to in time."""
        self._kept.expire(now)

    def waits(self, state: RequestState) -> None:
        """What waiting best-effort requests begin with is worth keeping."""
        self._expect(state, waits=True)

    def waits_no_more(self, state: RequestState) -> None:
        self._expect(state, waits=False)
        state.match = NO_MATCH

    def _expect(self, state: RequestState, waits: bool) -> None:
        if self._kv.finds_prefixes and state.service_class is ServiceClass.BE:
            self._kv.expect(state.keys(self._kv.block_size, state.prompt_len), waits)
