"""What replicas say of their caches, in the forest.

    path of request r    [ node a ][ node b ][ node c ]
    (r, all)               there     there     there
    (r, a + half of b)     there     half      gone         nodes after what is kept are gone too

A notice says how things are and not what has changed, and of each request the latest one counts:
repeated ones and old ones change nothing. One that is lost leaves the forest wrong until the next
digest, which is everything that the replica has.
"""

from __future__ import annotations

from bros.core.interfaces import Notice
from bros.router.forest import Forest, Node
from bros.router.replica import Origin, Replica


def take_notice(forest: Forest, replica: Replica, notice: Notice) -> None:
    """Have the forest say what a replica says."""
    if notice.version > replica.version:
        replica.version = notice.version
        replica.running, replica.slowdown = notice.running, notice.slowdown
    if notice.version <= replica.digest_version:
        return
    if notice.full:
        replica.digest_version = notice.version
        _take_digest(forest, replica, notice)
        return
    for request_id, kept in notice.kept:
        origin = replica.origins.get(request_id)
        if origin is not None and origin.version < notice.version:
            origin.version = notice.version
            _keep(forest, replica, request_id, origin, kept)


def _keep(forest: Forest, replica: Replica, request_id: str, origin: Origin, kept: int) -> None:
    """Of a request's path, so many tokens are there."""
    work = replica.works.get(request_id)
    if work is not None and not work.begun:
        return  # what it is going to compute counts as there
    if kept:
        origin.leaf = forest.revive(origin.leaf)
    leaf = node = origin.leaf
    number = replica.number
    while node.parent is not None:
        parent, tokens = node.parent, min(kept, node.end) - node.start
        if tokens > 0 and node.cached.get(number) == tokens == node.end - node.start:
            break  # and all before it
        if node.alive:
            forest.mark(node, number, max(tokens, 0))
        if tokens <= 0 and work is None:
            origin.leaf = parent
        node = parent
    forest.prune(leaf)


def _take_digest(forest: Forest, replica: Replica, notice: Notice) -> None:
    """What it names is there, and what requests that run have or are going to have."""
    number, origins = replica.number, replica.origins
    named = {request_id: kept for request_id, kept in notice.kept if request_id in origins}
    for request_id in named:
        origin = origins[request_id]
        origin.version = notice.version
        origin.leaf = forest.revive(origin.leaf)  # which may split nodes: before any is looked at
        origins.move_to_end(request_id)
    there: dict[Node, int] = {}
    for request_id, kept in named.items():
        _collect(origins[request_id].leaf, kept, there)
    for work in replica.works.values():
        _collect(work.leaf, work.leaf.end, there)
    for request_id in [
        other for other in origins if not (other in named or other in replica.works)
    ]:
        del origins[request_id]
    for node, tokens in there.items():
        if node.cached.get(number) != tokens:
            forest.mark(node, number, tokens)
    for node in [node for node in forest.caches[number].nodes if node not in there]:
        forest.mark(node, number, 0)
    for request_id in named:
        forest.prune(origins[request_id].leaf)


def _collect(leaf: Node, kept: int, there: dict[Node, int]) -> None:
    """Note of a path what is kept."""
    node = leaf
    while node.parent is not None:
        tokens = min(kept, node.end) - node.start
        if tokens > 0:
            if there.get(node) == node.end - node.start:
                return
            there[node] = max(there.get(node, 0), tokens)
        node = node.parent
