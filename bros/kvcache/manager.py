"""The only door to KV memory: every slot that is read or written was handed out here.

Real-time requests grow from the left of a block, best-effort requests from the right, so that
both may live in one block (stacks.py). Who gets what room, and from whom, is in allocator.py.

Whoever is robbed misses these tokens from then on. They are copied to the host (host_pool.py) if
there is room; they come back, to wherever there is room then, with its next step. If there is no
room they are lost, and it computes them again. (BROS section 5; the copies are made by the
executor, see KvCopies.)

Full blocks that were computed can be found by what they hold (prefix_cache.py), so that
requests that begin alike share them, and later ones find them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence

from bros.core.plan import KvCopies
from bros.kvcache.allocator import Allocator, Robbed
from bros.kvcache.blocks import CACHE, Side, Stacks
from bros.kvcache.holding import Holding
from bros.kvcache.host_pool import Checkpoints, HostPool, Loss
from bros.kvcache.prefix_cache import PrefixCache
from bros.kvcache.sharing import NO_MATCH, CommonPart, Match, Sharing


class KvCacheManager:
    """KV memory of many requests, by slots.

    A request exists here from its first `append` until `free`. Tokens are immutable once
    written. shared: with False all grow from the left, so that blocks have one owner.
    num_host_blocks: room for copies of tokens that had to make way. literal: the paper's own
    rules for finding blocks. prefixes: where blocks are found by what they hold, if at all.
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
        self._room = Allocator(
            self._stacks, self._cache, self._by_number, self._checkpoints,
            lose=self._lose_all, literal=literal,
        )  # fmt: skip

    @property
    def block_size(self) -> int:
        return self._stacks.block_size

    @property
    def num_blocks(self) -> int:
        return self._stacks.num_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody has, but somebody may ask for again."""
        return self._cache.num_idle

    @property
    def num_parked_blocks(self) -> int:
        """Blocks of the prefixes that are to be kept; some may be gone, or in use."""
        return self._cache.num_kept

    @property
    def num_shared_blocks(self) -> int:
        """Blocks of prefixes that several requests have, or had."""
        return self._cache.num_held

    @property
    def num_kept_blocks(self) -> int:
        """Shared ones, and idle ones that best-effort requests may not have."""
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
        """Blocks that somebody has."""
        return self._stacks.num_blocks - self._stacks.num_free - self._cache.num_idle

    def num_available_blocks(self, side: Side, match: Match = NO_MATCH) -> int:
        """Blocks that requests of a side get without anybody losing anything.

        match: beside those that are in there.
        """
        return self._room.available(side, match.idle_nodes)

    def num_free_slots(self, request_id: str, side: Side, match: Match = NO_MATCH) -> int:
        """Tokens, missing ones included, that a request gets without anybody losing any.

        match: what it begins with, if it is not here yet.
        """
        holding = self._by_id.get(request_id)
        tail = holding.tail if holding is not None else -1
        room = self._stacks.room(tail) if tail >= 0 else 0
        return room + self.num_available_blocks(side, match) * self.block_size

    def num_evicted_blocks(self, side: Side) -> int:
        """Blocks that the prefix cache had to give up so far for requests of a side."""
        return self._room.evicted[side]

    def blocks_of(self, request_id: str) -> int:
        """Blocks with tokens that only this request has; 0 for a request that is not here."""
        holding = self._by_id.get(request_id)
        return len(holding.runs) if holding else 0

    def blocks_without(self, request_ids: Iterable[str]) -> int:
        """Blocks that nobody has but these requests, on their own or together: what others gain
        by robbing them all."""
        found = (self._by_id[request_id] for request_id in request_ids)
        robbed = {holding.number: holding for holding in found}
        alone = sum(holding.alone for holding in robbed.values())
        return alone + len(self._room.shared_among(robbed))

    def num_tokens(self, request_id: str) -> int:
        """Tokens of a request that were computed, missing or not; 0 if it is not here."""
        holding = self._by_id.get(request_id)
        return holding.num_tokens if holding else 0

    def num_missing(self, request_id: str) -> int:
        """How many of them have to be brought back before it can run."""
        holding = self._by_id.get(request_id)
        return holding.num_missing if holding else 0

    def num_shared_tokens(self, request_id: str) -> int:
        """How many of them lie in blocks of the prefix cache."""
        holding = self._by_id.get(request_id)
        return holding.num_shared * self.block_size if holding else 0

    @property
    def has_common_parts(self) -> bool:
        """Whether `common_parts` says anything of anybody."""
        return self._sharing.num_common > 0

    @property
    def sharing_changes(self) -> int:
        """Another number whenever what `common_parts` says may be something else."""
        return self._sharing.changes

    def common_parts(self, request_id: str) -> Sequence[CommonPart]:
        """What a request has in common with others, from its first token on, piece by piece.

        The first of each pair stands for all blocks up to there: whoever has it has all of these.
        """
        holding = self._by_id.get(request_id)
        return self._sharing.common_parts(holding) if holding is not None else ()

    def match(self, keys: Sequence[bytes], earlier: Match = NO_MATCH) -> Match:
        """What is there of a prompt, by the keys of its full blocks (see `extend_keys`).

        earlier: what was found for the same keys before. Only good until memory changes hands.
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
        """Bring back what is missing of a request, and make room for `num_tokens` >= 1 more.

        side: of its class; a request grows on that of its first append. victims: asked who may be
        robbed if there is no room otherwise, least deserving first; nobody who is in the step.
        match: with its first append, what it begins with; these tokens count as computed.
        Returns (segments, slots): int32 (block, lo, hi) triples that cover the tokens before
        this call, and the int32 slots of the new ones; None, with nothing changed, if they do
        not fit.
        """
        holding = self._by_id.get(request_id)
        if holding is not None and not holding.missing:
            # A decode row and its last block: most of the calls.
            grown = self._room.extend(holding, num_tokens)
            if grown is not None:
                return grown
        is_new = holding is None
        if holding is None:
            holding = self._newcomer(request_id, side, match)
        robbed = self._who_makes_way(holding, side, holding.num_missing + num_tokens, victims)
        if robbed is None:
            if is_new:
                self._sharing.leave(holding)
            return None
        if is_new:
            self._by_id[request_id] = self._by_number[holding.number] = holding
            self._sharing.begin(holding, match, side)
        if holding.missing:
            self._restore(holding, side, robbed)
        elif num_tokens == 1 and robbed:
            grown = self._room.extend_over(holding, robbed)
            if grown is not None:
                return grown
        before = holding.segments[:]
        holding.pushed_last.clear()
        slots = self._room.place(holding, side, (holding.num_tokens, num_tokens), robbed)
        holding.num_tokens += num_tokens
        return before, slots

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Take back the latest append of a request, which left it with `num_tokens` before.

        Only for tokens that no step has computed. What it brought back stays.
        """
        holding = self._by_id[request_id]
        for block, count in reversed(holding.pushed_last):
            self._room.pop(holding, block, count)
            holding.num_tokens -= count
        holding.pushed_last.clear()
        assert holding.num_tokens == num_tokens, "only the latest append can be taken back"

    def computed(self, request_id: str, keys: Sequence[bytes], side: Side) -> None:
        """The latest append of a request was computed: others may find its full blocks now.

        keys: of all its full blocks so far, see `extend_keys`; at most those that are computed.
        """
        holding = self._by_id.get(request_id)
        if holding is not None:
            self._sharing.publish(holding, keys, side, self._room.pop)
            holding.pushed_last.clear()

    def free(self, request_id: str, *, keep: bool = True) -> None:
        """Drop everything of a request, copies included.

        keep: the blocks of its chain stay until they are needed, for others to find; say False
        if what was computed may be wrong.
        """
        holding = self._by_id.pop(request_id, None)
        if holding is None:
            return
        self._sharing.end(holding, keep)
        for block in holding.blocks_from_end():
            self._room.pop(holding, block, self._stacks.height(block, holding.side))
        self._sharing.leave(holding)
        self._cache.stop_filling(holding.number)
        self._checkpoints.forget(holding)
        del self._by_number[holding.number]

    def expect(self, keys: Iterable[bytes], waits: bool) -> None:
        """A request that will ask for these begins to wait, or does not wait any more."""
        if waits:
            self._cache.expect(keys)
        else:
            self._cache.expect_no_more(keys)

    def keep(self, keys: Iterable[bytes]) -> None:
        """Whole prefixes that are idle, or will be, go after all other idle blocks from now on.

        Those before a block are kept already, or come before it.
        """
        self._cache.keep(keys)

    def keep_no_more(self, keys: Iterable[bytes]) -> None:
        """They go as others do; those after a block come before it, if they were kept."""
        self._cache.keep_no_more(keys)

    def watch(self) -> None:
        """Have `take_kept` say something from now on, first of all that is cached."""
        self._cache.watch()

    def take_kept(self, everything: bool) -> dict[str, int]:
        """Request -> how many of its first tokens can be found, see origins.py; only of those of
        which this has changed since the last call, in the order of that, or of all that there are.
        """
        origins = self._cache.origins
        if origins is None:
            return {}
        blocks = origins.everything() if everything else origins.take_changes()
        return {request_id: count * self.block_size for request_id, count in blocks.items()}

    def take_copies(self) -> KvCopies | None:
        """What has to be copied before the next step, told once; None if nothing has."""
        return self._checkpoints.take_copies()

    def take_losses(self) -> dict[str, Loss]:
        """Who has had to give up tokens since the last call, and how many."""
        return self._checkpoints.take_losses()

    def take_cuts(self) -> dict[str, int]:
        """Requests some tokens of which are lost since the last call: how many they have left.

        They go on from there; those with none left are not here any more.
        """
        cuts, self._checkpoints.cuts = self._checkpoints.cuts, {}
        for request_id in cuts:
            cuts[request_id] = self._cut_to(self._by_id[request_id], cuts[request_id])
        return cuts

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is free or has one owner, and nothing is lost."""
        self._stacks.check_integrity()
        self._host.check_integrity()
        self._cache.check_integrity()
        held = self._sharing.check_integrity()
        for holding in self._by_id.values():
            holding.check_integrity(self.block_size)
            alone = 0
            for block, stack in holding.runs.items():
                assert self._stacks.owner(block, holding.side) == holding.number
                height = self._stacks.height(block, holding.side)
                assert height == sum(count for _, count in stack)
                alone += self._stacks.height(block, holding.side.other) == 0
                held += height
            assert alone == holding.alone, f"{holding.request_id}: {alone=} {holding.alone=}"
            if holding.request_id not in self._checkpoints.cuts:
                runs = holding.missing
                missing = sorted(token for start, n in runs for token in range(start, start + n))
                assert missing == self._host.needed(holding.number)
        used = sum(
            self._stacks.height(block, side) for block in range(self.num_blocks) for side in Side
        )
        assert held == used, f"{used - held} slots are nobody's"

    def _newcomer(self, request_id: str, side: Side, match: Match) -> Holding:
        holding = Holding(request_id, self._next_number, side if self._shared else Side.LEFT)
        self._next_number += 1
        self._sharing.join(holding, match)
        return holding

    def _who_makes_way(
        self, holding: Holding, side: Side, wanted: int, victims: Callable[[], Iterable[str]]
    ) -> Robbed | None:
        """Nobody, if there is room for `wanted` tokens; None if there is none in any case."""
        if self._room.fits_freely(holding, side, wanted):
            return {}
        robbed: dict[int, Holding] = {}
        free = self._room.available(Side.LEFT)
        for victim in map(self._by_id.__getitem__, victims()):
            robbed[victim.number] = victim
            free += victim.alone
            if wanted <= free * self.block_size:
                return robbed
        return robbed if self._room.fits(holding, wanted, robbed) else None

    def _lose_all(self, victim: Holding) -> None:
        """What others need is not even in blocks of its own: it starts over."""
        for block in victim.blocks_from_end():
            self._room.rob(victim, block, self._stacks.height(block, victim.side))
        if not victim.num_shared:
            return
        count = victim.num_shared * self.block_size
        self._sharing.leave(victim)
        self._checkpoints.give_up_shared(victim, count)

    def _restore(self, holding: Holding, side: Side, robbed: Robbed) -> None:
        runs = sorted(holding.missing)
        holding.missing.clear()
        holding.num_missing = 0
        for run in runs:
            slots = self._room.place(holding, side, run, robbed)
            self._checkpoints.bring_back(holding, run, slots)

    def _cut_to(self, holding: Holding, num_tokens: int) -> int:
        """Keep the first tokens of a request, as far as they can be kept; returns how many."""
        if num_tokens == 0 or not holding.sorted:
            self.free(holding.request_id)
            return 0
        for block in holding.blocks_from_end():
            while (runs := holding.runs.get(block)) and sum(runs[-1]) > num_tokens:
                start, count = runs[-1]
                self._room.pop(holding, block, min(count, start + count - num_tokens))
        missing, holding.missing, holding.num_missing = holding.missing, [], 0
        self._host.release(holding.number, num_tokens)
        for start, count in missing:
            if start < num_tokens:
                holding.lose((start, min(count, num_tokens - start)))
        holding.num_tokens = num_tokens
        holding.pushed_last.clear()
        return num_tokens
