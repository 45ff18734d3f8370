"""Packing for policies that do not ask how long a step takes: in order, while there is room."""

from __future__ import annotations

from collections.abc import Iterable

from bros.scheduler.selection import Bounds, C, Packing, Reservations


def pack_untimed(
    urgent: Iterable[C],
    filler: Iterable[C],
    bounds: Bounds,
    memory: Reservations[C],
    *,
    exclusive: bool,
) -> Packing[C]:
    """See packing.pack. A candidate that finds no memory is passed over."""
    packing: Packing[C] = Packing()
    tokens_left = _fill(packing, urgent, bounds, memory, bounds.tokens)
    packing.num_urgent = len(packing.selected)
    if not (exclusive and packing.selected):
        _fill(packing, filler, bounds, memory, tokens_left)
    return packing


def _fill(
    packing: Packing[C],
    candidates: Iterable[C],
    bounds: Bounds,
    memory: Reservations[C],
    tokens_left: int,
) -> int:
    """Returns how many tokens are left then."""
    selected = packing.selected
    for candidate in candidates:
        if tokens_left == 0 or len(selected) == bounds.rows:
            packing.full |= tokens_left > 0
            packing.urgent_stop = packing.filler_stop = "rows" if tokens_left else "tokens"
            break
        if not (candidate.running or memory.look_up(candidate)):
            packing.passed_over.append((candidate, "prefix"))
            continue
        num_tokens = min(candidate.remaining, tokens_left)
        if memory.reserve(candidate, num_tokens):
            selected.append((candidate, num_tokens))
            tokens_left -= num_tokens
        else:
            packing.passed_over.append((candidate, memory.refusal))
    return tokens_left
