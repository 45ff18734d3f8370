"""What whoever watches an engine is told of it: what is cached, and how busy it is."""

from __future__ import annotations

from bros.core.interfaces import Notice
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.queues import Queues

_EVERY_S, _DIGEST_S = 0.1, 10.0
"""Least time between notices while the engine works, and most time between digests."""


class Notices:
    """Costs nothing until somebody watches. The first notice is a digest."""

    def __init__(
        self, kv: KvCacheManager, queues: Queues, predictor: StepTimePredictor | None
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._predictor = predictor
        self._watched = False
        self._version = 0
        self._load = (0, 0, 0, 0)
        self._next_s = self._digest_s = 0.0

    def watch(self) -> None:
        """Keep account of changes from now on."""
        if not self._watched:
            self._watched = True
            self._kv.watch()

    def take(self, now: float, full: bool) -> Notice | None:
        """What has changed since the last one, or everything; None if nothing has, or if nobody
        watches."""
        if not self._watched:
            return None
        full = full or self._version == 0
        kept, load = self._kv.take_kept(full), self._load_now()
        if not (full or kept or load != self._load):
            return None
        self._version += 1
        self._load = load
        self._next_s = now + _EVERY_S
        if full:
            self._digest_s = now + _DIGEST_S
        running, waiting, used_blocks, cached_blocks = load
        return Notice(
            version=self._version,
            full=full,
            kept=tuple(kept.items()),
            running=running,
            waiting=waiting,
            used_blocks=used_blocks,
            cached_blocks=cached_blocks,
            slowdown=self._predictor.slowdown if self._predictor else 1.0,
        )

    def due(self, now: float, rests: bool) -> Notice | None:
        """The same after a step, if it is time for it. rests: there is nothing more to do."""
        if not self._watched:
            return None
        full = now >= self._digest_s
        return self.take(now, full) if full or rests or now >= self._next_s else None

    def _load_now(self) -> tuple[int, int, int, int]:
        waiting = sum(map(len, self._queues.waiting.values()))
        kv = self._kv
        return len(self._queues.running), waiting, kv.num_used_blocks, kv.num_cached_blocks
