"""Tokens of suspended steps: what the executor keeps of them, and when it is dropped.

    suspend -> Suspended -> a step continues them, all or the first ones -> done
                         -> dropped: their request is preempted or ends, or too much is kept

Only the scheduler decides. A plan says of each chunk where it continues, and what is dropped, so
that what the executor keeps is always what is listed here, and what the next plan drops.

    request     [ computed .... ][ suspended | after it ][ to compute .... )
    KV memory   [ all layers ...][ lower layers ........ ]
"""

from __future__ import annotations

from collections.abc import Callable

from bros.core.plan import Chunk, Kept
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.state import RequestState, Suspended

_PARTS = 64
"""Shares of layers are multiples of 1/64: sums of loads with them are exact."""


def share_done(layer: int, num_layers: int) -> float:
    """The share of the layers below `layer`, rounded down to a multiple of 1 / _PARTS."""
    return (layer * _PARTS // num_layers) / _PARTS


class SuspendedWork:
    """What is suspended of all requests, in the order in which they were suspended first.

    lost_s: time that went into what was dropped for others.
    """

    def __init__(
        self, kv: KvCacheManager, most_tokens: int, on_loss: Callable[[float], None]
    ) -> None:
        """most_tokens: of all requests together, which bounds what the executor keeps. Beyond it
            the oldest are dropped; until the next plan the executor may keep twice as much.
        on_loss: called with the seconds that are lost with what is dropped.
        """
        self._kv = kv
        self._most_tokens = most_tokens
        self._on_loss = on_loss
        self._states: dict[str, RequestState] = {}
        self._dropped: list[Kept] = []
        self._emptied: list[RequestState] = []
        self._continuing: dict[str, Suspended] = {}  # in the running step
        self.lost_s = 0.0

    def begin_step(self) -> None:
        """A step is going to be planned; the one before it has ended."""
        self._continuing.clear()

    def take(self, state: RequestState, num_tokens: int) -> Kept:
        """A step continues the first of a request's suspended tokens; returns where."""
        held = state.suspended
        assert held is not None and num_tokens <= held.num_tokens
        first, rest = held, held.after
        if num_tokens < held.num_tokens:
            share = num_tokens / held.num_tokens
            kept, slots = held.kept, held.slots
            first = Suspended(kept, slots[:num_tokens], held.done, share * held.seconds)
            rest = Suspended(
                kept._replace(first=kept.first + num_tokens),
                slots[num_tokens:],
                held.done,
                held.seconds - first.seconds,
                held.after,
            )
        self._set(state, rest)
        first.after = None
        self._continuing[state.request_id] = first
        return first.kept

    def suspend(
        self, state: RequestState, chunk: Chunk, at: Kept, done: float, seconds: float
    ) -> bool:
        """The step of a chunk was suspended; returns whether the executor keeps any of it.

        at: as it is kept if it had begun.
        done: of `at`.
        seconds: its part of the time of that step.
        """
        held = self._continuing.pop(chunk.request_id, None)
        if held is None or held.kept.layer < at.layer:
            if at.layer == 0:
                return False
            seconds += held.seconds if held is not None else 0.0
            held = Suspended(at, chunk.slots, done, seconds)
        held.after = state.suspended
        self._set(state, held)
        return True

    def limit(self) -> None:
        """Drop the oldest beyond the bound."""
        while self._num_tokens() > self._most_tokens:
            self.drop(next(iter(self._states.values())))

    def abort(self, chunk: Chunk) -> None:
        """The step of a chunk was aborted, so that the executor keeps nothing of it."""
        held = self._continuing.pop(chunk.request_id, None)
        if held is not None:
            self._lose(held)

    def drop(self, state: RequestState) -> None:
        """Undo what is suspended of a request, whose memory becomes free: others need it."""
        held = state.suspended
        assert held is not None
        self.end(state)
        self._kv.truncate(state.request_id, state.num_computed_tokens)
        if state.num_computed_tokens == 0:
            self._emptied.append(state)
        for each in held:
            self._lose(each)

    def end(self, state: RequestState) -> None:
        """A request ends, and what is suspended of it."""
        if state.suspended is not None:
            self._dropped += [each.kept for each in state.suspended]
            self._set(state, None)

    def discard(self, chunk: Chunk, at: Kept) -> None:
        """Of a suspended step: the request of a chunk has ended. at: as in `suspend`."""
        held = self._continuing.pop(chunk.request_id, None)
        kept = at if held is None or held.kept.layer < at.layer else held.kept
        if kept.layer:
            self._dropped.append(kept)

    def take_dropped(self) -> tuple[Kept, ...]:
        """What the executor has to drop with the next plan. Each is returned once."""
        dropped, self._dropped = self._dropped, []
        return tuple(dropped)

    def take_emptied(self) -> list[RequestState]:
        """Requests that had no other tokens than those that were dropped."""
        emptied, self._emptied = self._emptied, []
        return emptied

    def check_integrity(self) -> None:
        """Raise AssertionError unless all requests here are running."""
        assert self._num_tokens() <= self._most_tokens
        for name, state in self._states.items():
            held = state.suspended
            assert name == state.request_id and state.running and held is not None
            assert state.num_missing == 0 and all(each.kept.layer > 0 for each in held)
            assert held.total_tokens <= state.remaining

    def _num_tokens(self) -> int:
        each = (state.suspended for state in self._states.values())
        return sum(held.total_tokens for held in each if held is not None)

    def _set(self, state: RequestState, suspended: Suspended | None) -> None:
        state.suspended = suspended
        if suspended is None:
            self._states.pop(state.request_id, None)
        else:
            self._states[state.request_id] = state

    def _lose(self, suspended: Suspended) -> None:
        self.lost_s += suspended.seconds
        self._on_loss(suspended.seconds)
