"""Which requests go on elsewhere, now that there is one more replica to serve them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from bros.router.member import Member, Routed


def to_move(replicas: Sequence[Member]) -> list[Routed]:
    """So many that all replicas that take requests have equally many open, but only what waits in
    the queue of one: nothing of it has been computed. The latest first."""
    taking = [replica for replica in replicas if replica.takes]
    if len(taking) < 2:
        return []
    fair = -(-sum(len(replica.open) for replica in taking) // len(taking))
    moved = []
    for replica in taking:
        going = sum(item.moving for item in replica.open.values())
        count = min(replica.notice.waiting, len(replica.open) - fair) - going
        waiting = [item for item in replica.open.values() if _waits(item)]
        moved += waiting[max(0, len(waiting) - max(0, count)) :][::-1]
    return moved


def _waits(item: Routed) -> bool:
    done = item.begun or item.given or item.aborted
    return item.accepted and not (done or item.moving or item.suspect)
