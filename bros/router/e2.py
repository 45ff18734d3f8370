"""Exploit what is cached, or explore for load (Preble 3.2, E2).

    missed < cached   the request goes where the part of it is cached that matters: exploit
    missed < known    most of it was asked for within the window but has been evicted: it goes
                      where that went, if caches are worth something: again
    else              it goes where it costs least: explore; or where answers take most of the
                      time, as prompts fit in there best

`cached` is the most that any replica has. Besides, work is not put behind what takes longer
than computing the prefix again would: then the replica that costs least gets it, and has it cached
from then on. That is what keeps a burst for one prefix from waiting until balance.py moves it.
"""

from __future__ import annotations

from collections.abc import Sequence

from bros.router.cost import cheapest, cost_of, evicted_s
from bros.router.forest import Node
from bros.router.replica import Replica
from bros.router.state import Ask, State

_NEARLY = 0.95
"""Of what the best replica has of a prompt, what others must have to be as good."""

_MOVE = 0.25
"""What it costs to move a prefix at least, also one that nobody has, as a share of computing it."""

_WORTH = 0.25
"""Of what is asked for, what caches must hold for a prefix to come back to one."""

_MORE = 0.1
"""By how much a replica's share of decoding has to be above the mean, to be more than chance."""


class E2:
    """The policy. Has no state of its own: prefixes remember their homes (Node.homes)."""

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        candidates = list(ask.candidates)
        if len(candidates) == 1:
            return candidates[0], "only"
        cached = max((ask.matched.get(r.number, 0) for r in candidates), default=0)
        if ask.length - cached < cached:
            having, reason = _having(state, ask, candidates, cached)
        else:
            having, reason = _formerly(state, ask, candidates)
        if not having:
            return _explore(state, ask, candidates)
        found = cheapest(state, ask, having)
        other = _instead(state, ask, found, [r for r in candidates if r not in having])
        return (found, reason) if other is None else (other, "explore")


def _having(
    state: State, ask: Ask, candidates: Sequence[Replica], cached: int
) -> tuple[list[Replica], str]:
    """Where what is cached of the request is, or where its key was moved to.

    That is all of it and not just the key, unlike in the paper: where prefixes are nested (the
    examples, then the problem), the key is everywhere, and what comes after it would be as well.
    """
    key = ask.key(cached)
    assert key is not None, "the first node is longer than nothing"
    least = _NEARLY * cached
    having = [r for r in candidates if ask.matched.get(r.number, 0) >= least]
    parked = [replica for replica in having if replica.number == ask.parked]
    if parked:
        return parked, "parked"
    homes, reason = _homes(state, key, candidates)
    return (homes, reason) if homes else (having, "exploit")


def _formerly(state: State, ask: Ask, candidates: Sequence[Replica]) -> tuple[list[Replica], str]:
    """Where a prefix that was evicted went within the window, and where most of it is left.

    Computing it takes as long elsewhere, but what is known of caches is behind by what waits: if
    prefixes moved whenever they seem to be gone, they would be in several caches at once, and all
    of these would hold less. Not where caches hold so little of what is asked for that it would be
    gone again the next time.
    """
    known = ask.path.end
    if ask.length - known >= known or state.hits < _WORTH:
        return [], ""
    key = ask.key(known)
    assert key is not None, "more than nothing is known"
    homes, reason = _homes(state, key, candidates)
    if homes:
        return homes, reason
    where = {
        number
        for node in ask.path.nodes
        if min(node.end, known) >= _NEARLY * known
        for number in node.asked
    }
    most = max(ask.matched.values(), default=0)
    where |= {number for number, tokens in ask.matched.items() if tokens >= _NEARLY * most}
    return [replica for replica in candidates if replica.number in where], "again"


def _homes(state: State, key: Node, candidates: Sequence[Replica]) -> tuple[list[Replica], str]:
    """Where a prefix was moved to; none if it was not."""
    homes = [replica for replica in candidates if replica.number in (key.homes or ())]
    return homes, "planned" if state.settings.plan == "on" else "moved"


def _instead(state: State, ask: Ask, found: Replica, others: Sequence[Replica]) -> Replica | None:
    """Who computes the prefix again, and what makes room for it, sooner than `found` comes to the
    request; None if nobody does."""
    if not others:
        return None
    lightest = min(others, key=lambda replica: state.open_s(replica, ask.service_class))
    wait_s = state.open_s(found, ask.service_class) - state.open_s(lightest, ask.service_class)
    # Below 0 where a prefix has moved and is not there yet: the first request has to wait as well.
    again_s = abs(ask.prefill_s(lightest) - ask.prefill_s(found))
    again_s = max(again_s, _MOVE * ask.prefill_s(lightest))
    patience = state.settings.patience
    if wait_s <= patience * again_s:
        return None
    again_s += evicted_s(state, ask, lightest)
    return lightest if wait_s > patience * again_s else None


def _explore(state: State, ask: Ask, candidates: list[Replica]) -> tuple[Replica, str]:
    """Prompts are limited by arithmetic and answers by memory: each fits in beside the other.

    Not where that costs more by as much as the prompt takes.
    """
    found = cheapest(state, ask, candidates)
    decoding = _decoding(state, candidates) if state.settings.decode_aware else []
    if decoding and found not in decoding:
        other = cheapest(state, ask, decoding)
        more_s = cost_of(state, ask, other).total_s - cost_of(state, ask, found).total_s
        if more_s <= ask.prefill_s(other):
            return other, "decode"
    return found, "explore"


def _decoding(state: State, candidates: Sequence[Replica]) -> list[Replica]:
    """Where answers take more of the time than they should, and than they do on average, unless
    these have been given much more than others."""
    settings = state.settings
    shares = [replica.window.decode_share for replica in candidates]
    share = max(settings.decode_share, sum(shares) / len(shares) + _MORE)
    if max(shares) <= share:
        return []
    limit_s = settings.balance * min(map(state.given_s, candidates))
    return [
        replica
        for replica in candidates
        if replica.window.decode_share > share and state.given_s(replica) <= limit_s
    ]
