"""Under which ids the engine knows the latest requests."""

from __future__ import annotations

from collections import OrderedDict

from bros.engine.generation import numbered

_CAPACITY = 4096
"""More than engines keep traces of, and less than a megabyte."""


class RecentRequests:
    """The prompts and choices of the latest requests, the oldest forgotten first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._shapes: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def note(self, request_id: str, *, prompts: int, n: int) -> None:
        """A request of so many prompts with n choices each was accepted by the engine."""
        self._shapes[request_id] = (prompts, n)
        if len(self._shapes) > self._capacity:
            self._shapes.popitem(last=False)

    def parts(self, request_id: str) -> tuple[str, ...]:
        """What its choices are called in the engine, by index; the id itself if it is unknown."""
        prompts, n = self._shapes.get(request_id, (1, 1))
        return tuple(
            choice_id
            for prompt_id in numbered(request_id, prompts)
            for choice_id in numbered(prompt_id, n)
        )
