"""The KV cache manager: allocates every slot that a step reads or writes.

Real-time requests grow from the left of a block, best-effort requests from the right, so that
two requests can use one block (blocks.py). The allocator decides which slots a request gets and
which tokens of victims it preempts for them (allocator.py).

Preempted tokens are *missing* until the victim's next step. They are checkpointed to host memory
if it has room (host_pool.py), and restored to any free slots; else the victim recomputes them. The
executor makes the copies, see KvCopies. (BROS section 5.)

Full computed blocks enter the prefix cache under the hash of their tokens (prefix_cache.py), so
that requests with a common prefix share its blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from bros.core.plan import KvCopies
from bros.kvcache.allocator import Allocator, Victims
from bros.kvcache.blocks import CACHE, LEFT, Side, Stacks
from bros.kvcache.holding import Holding
from bros.kvcache.host_pool import Checkpoints, HostPool, Loss
from bros.kvcache.prefix_cache import PrefixCache
from bros.kvcache.sharing import NO_MATCH, CommonPart, Match, Sharing


class KvCacheManager:
    """KV memory of all requests, in slots.

    The manager knows a request from its first `append` until `free`. KV is immutable once written.

    num_blocks: blocks of device memory.
    block_size: slots per block.
    shared: False lets all requests grow from the left, so that a block has one owner.
    num_host_blocks: host memory for checkpoints, in blocks.
    literal: use the paper's order of finding blocks, see allocator.py.
    prefixes: the prefix cache; None for none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        *,
        shared: bool = True,
        num_host_blocks: int = 0,
        literal: bool = False,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._stacks = Stacks(num_blocks, block_size)
        self._host = HostPool(num_host_blocks, block_size)
        self._shared = shared
        self.finds_prefixes = prefixes is not None
        self._cache = prefixes or PrefixCache()
        self._by_id: dict[str, Holding] = {}
        self._by_number: dict[int, Holding] = {}
        self._next_number = CACHE + 1
        self._checkpoints = Checkpoints(self._host)
        self._sharing = Sharing(self._stacks, self._cache, self._by_number)
        self._allocator = Allocator(
            self._stacks, self._cache, self._by_number, self._checkpoints,
            preempt_all=self._preempt_all, literal=literal,
        )  # fmt: skip

    @property
    def block_size(self) -> int:
        return self._stacks.block_size

    @property
    def num_blocks(self) -> int:
        return self._stacks.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Idle blocks: cached, and held by no request."""
        return self._cache.num_idle

    @property
    def num_pinned_blocks(self) -> int:
        """Pinned blocks, whether in use, idle, or evicted since."""
        return self._cache.num_pinned

    @property
    def num_shared_blocks(self) -> int:
        """Shared blocks: owned by the prefix cache, and held by requests."""
        return self._cache.num_held

    @property
    def num_kept_blocks(self) -> int:
        """Shared blocks, and idle ones that best-effort requests may not evict."""
        idle = self._cache.num_idle - self._cache.num_evictable(real_time=False)
        return self._cache.num_held + idle

    @property
    def num_host_blocks_used(self) -> int:
        return self._host.num_used

    @property
    def num_host_blocks(self) -> int:
        return self._host.num_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        return self._stacks.num_blocks - self._stacks.num_free - self._cache.num_idle

    def num_available_blocks(self, side: Side, match: Match = NO_MATCH) -> int:
        """Blocks that requests of a side get without preemption, without idle ones of `match`."""
        return self._allocator.available(side, match.idle_nodes)

    def num_free_slots(self, request_id: str, side: Side, match: Match = NO_MATCH) -> int:
        """Tokens, missing ones included, that a request gets slots for without preemption.

        match: of a request without KV, the cached prefix that it would begin with.
        """
        holding = self._by_id.get(request_id)
        tail = holding.tail if holding is not None else -1
        in_tail = self._stacks.free_slots(tail) if tail >= 0 else 0
        return in_tail + self.num_available_blocks(side, match) * self.block_size

    def num_evicted_blocks(self, side: Side) -> int:
        """Blocks of the prefix cache that were evicted so far for requests of a side."""
        return self._allocator.evicted[side]

    def blocks_of(self, request_id: str) -> int:
        """Blocks with private tokens of a request; 0 for an unknown id."""
        holding = self._by_id.get(request_id)
        return len(holding.runs) if holding else 0

    def blocks_without(self, request_ids: Iterable[str]) -> int:
        """Blocks that would be freed by preempting all of these requests."""
        found = (self._by_id[request_id] for request_id in request_ids)
        victims = {holding.number: holding for holding in found}
        exclusive = sum(holding.num_exclusive for holding in victims.values())
        return exclusive + len(self._allocator.shared_among(victims))

    def num_tokens(self, request_id: str) -> int:
        """Computed tokens of a request, missing or not; 0 for an unknown id."""
        holding = self._by_id.get(request_id)
        return holding.num_tokens if holding else 0

    def num_missing(self, request_id: str) -> int:
        """Tokens of a request that have to be restored before it can run; 0 for an unknown id."""
        holding = self._by_id.get(request_id)
        return holding.num_missing if holding else 0

    def num_shared_tokens(self, request_id: str) -> int:
        """Tokens of a request in shared blocks; 0 for an unknown id."""
        holding = self._by_id.get(request_id)
        return holding.num_shared * self.block_size if holding else 0

    @property
    def has_common_parts(self) -> bool:
        """Whether `common_parts` is not empty for some request."""
        return self._sharing.num_common > 0

    @property
    def sharing_changes(self) -> int:
        """A version that changes whenever `common_parts` of some request may have changed."""
        return self._sharing.changes

    def common_parts(self, request_id: str) -> Sequence[CommonPart]:
        """The prefix that a request shares with others, in pieces from its first token on.

        Each piece is (node of its last block, tokens); requests with an equal node share all blocks
        up to it.
        """
        holding = self._by_id.get(request_id)
        return self._sharing.common_parts(holding) if holding is not None else ()

    def match(self, keys: Sequence[bytes], earlier: Match = NO_MATCH) -> Match:
        """The cached prefix of a prompt, by the keys of its full blocks (see `extend_keys`).

        earlier: the result of an earlier call with the same keys, which makes this one cheaper.
        The result is valid until the next call that allocates or frees.
        """
        return self._sharing.match(keys, earlier)

    def append(
        self,
        request_id: str,
        num_tokens: int,
        side: Side,
        victims: Callable[[], Iterable[str]] = tuple,
        match: Match = NO_MATCH,
    ) -> tuple[array[int], array[int]] | None:
        """Restore the missing tokens of a request, and allocate slots for `num_tokens` >= 1 more.

        side: of its present class, which decides what it may evict; it grows on the side of its
            first append.
        victims: called if there are not enough free slots; returns the ids of the requests that
            may be preempted, in that order. None of them may be in the step.
        match: for the first append, the cached prefix of its prompt, which counts as computed.

        Returns (segments, slots): int32 (block, lo, hi) triples that cover the tokens before this
        call, and the int32 slots of the new tokens; None, with nothing changed, if they do not fit.
        """
        holding = self._by_id.get(request_id)
        if holding is not None and not holding.missing:
            # A decode row, while its last block has a free slot or another block is free.
            grown = self._allocator.extend(holding, num_tokens)
            if grown is not None:
                return grown
        is_new = holding is None
        if holding is None:
            holding = self._new_holding(request_id, side, match)
        chosen = self._choose_victims(holding, side, holding.num_missing + num_tokens, victims)
        if chosen is None:
            if is_new:
                self._sharing.leave(holding)
            return None
        if is_new:
            self._by_id[request_id] = self._by_number[holding.number] = holding
            self._sharing.begin(holding, match, side)
        if holding.missing:
            self._restore(holding, side, chosen)
        elif num_tokens == 1 and chosen:
            grown = self._allocator.extend_over(holding, chosen)
            if grown is not None:
                return grown
        before = holding.segments[:]
        holding.pushed_last.clear()
        slots = self._allocator.place(holding, side, (holding.num_tokens, num_tokens), chosen)
        holding.num_tokens += num_tokens
        return before, slots

    def append_rows(
        self,
        request_ids: Sequence[str],
        first: int,
        granted: dict[str, tuple[array[int], array[int]]],
    ) -> int:
        """Append one token to each of request_ids[first:], as long as Allocator.extend is enough.

        granted: what `append` would return is added to it, by id.
        Returns the index of the first request left. It needs `append`, which may evict or preempt.
        """
        by_id, extend = self._by_id, self._allocator.extend
        left, right = self._stacks.heights
        numbers, size = self._stacks.numbers, self.block_size
        for index in range(first, len(request_ids)):
            request_id = request_ids[index]
            holding = by_id.get(request_id)
            if holding is None or holding.missing:
                return index
            # Most rows have room in the run on top of their tail. For these, this is Stacks.grow
            # and Holding.grow without their calls, since every row of every step comes here.
            tail, run = holding.tail, holding.tail_run
            on_left, on_right = left[tail], right[tail]  # of any block if there is no tail
            if run is None or on_left + on_right >= size:
                grown = extend(holding, 1)
                if grown is None:
                    return index
                granted[request_id] = grown
                continue
            segments, last = holding.segments, holding.num_tokens
            before = segments[:]
            if holding.side is LEFT:
                left[tail] = on_left + 1
                at = tail * size + on_left + 1
                segments[holding.tail_end] += 1
            else:
                right[tail] = on_right + 1
                at = (tail + 1) * size - on_right
                segments[holding.tail_end] -= 1
            run[1] += 1
            holding.num_tokens = last + 1
            holding.pushed_last = [(tail, 1)]
            granted[request_id] = before, numbers[at : at + 1]
        return len(request_ids)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Undo the latest append of a request, or the last tokens of it: `num_tokens` are left.

        Only for tokens that no step has computed. Tokens that the append restored stay restored.
        """
        holding = self._by_id[request_id]
        for block, count in holding.last_pushed(holding.num_tokens - num_tokens):
            self._allocator.pop(holding, block, count)
            holding.num_tokens -= count
        holding.pushed_last.clear()
        assert holding.num_tokens == num_tokens, "only the latest append can be undone"

    def segments_before(self, request_id: str, num_tokens: int) -> array[int]:
        """The segments of a request's first `num_tokens` tokens; the others are of its latest
        append."""
        holding = self._by_id[request_id]
        return holding.segments_without(holding.num_tokens - num_tokens)

    def computed(
        self, request_id: str, keys: Sequence[bytes], side: Side, num_tokens: int | None = None
    ) -> None:
        """Enter the full blocks of a request's latest append, which is computed, into the cache.

        keys: of its full computed blocks so far, see `extend_keys`.
        num_tokens: how many of its tokens are computed; None for all.
        """
        holding = self._by_id.get(request_id)
        if holding is not None:
            self._sharing.publish(holding, keys, side, self._allocator.pop)
            left = 0 if num_tokens is None else holding.num_tokens - num_tokens
            holding.pushed_last = holding.last_pushed(left)[::-1]

    def free(self, request_id: str, *, keep: bool = True) -> None:
        """Release all blocks of a request, and its checkpoints.

        keep: its full blocks stay in the prefix cache until they are evicted. False if their
            content may be wrong, as after a step that failed.
        """
        holding = self._by_id.pop(request_id, None)
        if holding is None:
            return
        self._sharing.end(holding, keep)
        for block in holding.blocks_from_end():
            self._allocator.pop(holding, block, self._stacks.height(block, holding.side))
        self._sharing.leave(holding)
        self._cache.stop_producing(holding.number)
        self._checkpoints.forget(holding)
        del self._by_number[holding.number]

    def expect(self, keys: Iterable[bytes], waits: bool) -> None:
        """A request that will look up these keys joins the waiting queue, or leaves it."""
        if waits:
            self._cache.expect(keys)
        else:
            self._cache.unexpect(keys)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Evict these blocks after all others. A block's prefix is pinned before the block."""
        self._cache.pin(keys)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Evict these blocks like others again. Blocks after a block are unpinned before it."""
        self._cache.unpin(keys)

    def subscribe(self) -> None:
        """Record changes of the prefix cache from now on, for `take_cached_lengths`."""
        self._cache.subscribe()

    def take_cached_lengths(self, everything: bool) -> dict[str, int]:
        """Request -> how many of its first tokens are cached, see Origins in prefix_cache.py.

        everything: of all requests with cached tokens; else of those whose number has changed
            since the last call, in the order of the changes.
        """
        origins = self._cache.origins
        if origins is None:
            return {}
        blocks = origins.everything() if everything else origins.take_changes()
        return {request_id: count * self.block_size for request_id, count in blocks.items()}

    def take_copies(self) -> KvCopies | None:
        """Copies that the next step has to make; None if there are none. Each is returned once."""
        return self._checkpoints.take_copies()

    def take_losses(self) -> dict[str, Loss]:
        """Request -> tokens that were preempted since the last call."""
        return self._checkpoints.take_losses()

    def take_cuts(self) -> dict[str, int]:
        """Request -> tokens it keeps, for requests that have lost tokens without a checkpoint since
        the last call.

        A request recomputes the tokens after these. One that keeps none is freed.
        """
        cuts, self._checkpoints.cuts = self._checkpoints.cuts, {}
        for request_id in cuts:
            cuts[request_id] = self._cut_to(self._by_id[request_id], cuts[request_id])
        return cuts

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or has exactly one owner."""
        self._stacks.check_integrity()
        self._host.check_integrity()
        self._cache.check_integrity()
        held = self._sharing.check_integrity()
        for holding in self._by_id.values():
            holding.check_integrity(self.block_size)
            exclusive = 0
            for block, stack in holding.runs.items():
                assert self._stacks.owner(block, holding.side) == holding.number
                height = self._stacks.height(block, holding.side)
                assert height == sum(count for _, count in stack)
                exclusive += self._stacks.height(block, holding.side.other) == 0
                held += height
            assert exclusive == holding.num_exclusive, f"{holding.request_id}: {exclusive=}"
            if holding.request_id not in self._checkpoints.cuts:
                runs = holding.missing
                missing = sorted(token for start, n in runs for token in range(start, start + n))
                assert missing == self._host.needed(holding.number)
        used = sum(
            self._stacks.height(block, side) for block in range(self.num_blocks) for side in Side
        )
        assert held == used, f"{used - held} used slots have no owner"

    def _new_holding(self, request_id: str, side: Side, match: Match) -> Holding:
        holding = Holding(request_id, self._next_number, side if self._shared else Side.LEFT)
        self._next_number += 1
        self._sharing.join(holding, match)
        return holding

    def _choose_victims(
        self, holding: Holding, side: Side, wanted: int, victims: Callable[[], Iterable[str]]
    ) -> Victims | None:
        """The shortest list of victims that makes `wanted` slots fit; None if no list does."""
        if self._allocator.fits_freely(holding, side, wanted):
            return {}
        chosen: dict[int, Holding] = {}
        free = self._allocator.available(Side.LEFT)
        for victim in map(self._by_id.__getitem__, victims()):
            chosen[victim.number] = victim
            free += victim.num_exclusive
            if wanted <= free * self.block_size:
                return chosen
        return chosen if self._allocator.fits(holding, wanted, chosen) else None

    def _preempt_all(self, victim: Holding) -> None:
        """Preempt all tokens of a victim, shared ones included, so that it starts over."""
        for block in victim.blocks_from_end():
            self._allocator.preempt(victim, block, self._stacks.height(block, victim.side))
        if not victim.num_shared:
            return
        count = victim.num_shared * self.block_size
        self._sharing.leave(victim)
        self._checkpoints.drop_shared(victim, count)

    def _restore(self, holding: Holding, side: Side, victims: Victims) -> None:
        runs = sorted(holding.missing)
        holding.missing.clear()
        holding.num_missing = 0
        for run in runs:
            slots = self._allocator.place(holding, side, run, victims)
            self._checkpoints.restore(holding, run, slots)

    def _cut_to(self, holding: Holding, num_tokens: int) -> int:
        """Drop the tokens of a request from `num_tokens` on; returns how many it keeps."""
        if num_tokens == 0 or not holding.sorted:
            self.free(holding.request_id)
            return 0
        for block in holding.blocks_from_end():
            while (runs := holding.runs.get(block)) and sum(runs[-1]) > num_tokens:
                start, count = runs[-1]
                self._allocator.pop(holding, block, min(count, start + count - num_tokens))
        missing, holding.missing, holding.num_missing = holding.missing, [], 0
        self._host.release(holding.number, num_tokens)
        for start, count in missing:
            if start < num_tokens:
                holding.mark_missing((start, min(count, num_tokens - start)))
        holding.num_tokens = num_tokens
        holding.pushed_last.clear()
        return num_tokens
