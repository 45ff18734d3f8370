"""In which order the rows of a job run: those that begin alike next to each other.

A prompt is cut into pieces, short ones first, and each becomes a hash of itself and of all before
it, so that a prompt of any length is a path of a few numbers. All paths together are a trie:

```
 rows 0, 2, 5: "You are a lawyer. ... "   ┌─ a1 ─ c4 ─ row 0
 rows 1, 3, 4: "Translate ... "           │    └─ c9 ─ rows 2, 5
                                  root ───┴─ b7 ─ rows 1, 3, 4
```

The rows run in the order of a walk through it, where branches are taken by their first row, so
without common prefixes the order of the file is kept. The age term: when a row has been
overtaken by more than `max_overtaken` others, the walk goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

Path = tuple[int, ...]

MAX_OVERTAKEN = 2_000
_FIRST_PIECE = 128
_GROWTH = 1.5
_MAX_PIECES = 24  # of 4 million characters


def prompt_path(prompt: str) -> Path:
    """A hash for each piece of a prompt. Where two paths have the same hash, the prompts are the
    same up to there. What follows the last full piece does not count."""
    path, begin, size = [], 0, float(_FIRST_PIECE)
    digest = b""
    for _ in range(_MAX_PIECES):
        end = begin + int(size)
        if end > len(prompt):
            break
        piece = prompt[begin:end].encode("utf-8", "surrogatepass")
        digest = blake2b(piece, digest_size=8, key=digest).digest()
        path.append(int.from_bytes(digest, "little"))
        begin, size = end, size * _GROWTH
    return tuple(path)


def run_order(paths: Sequence[Path], max_overtaken: int = MAX_OVERTAKEN) -> list[int]:
    """Indexes of the rows, in the order in which they should run."""
    walk = _walk(paths)
    if max_overtaken >= len(paths):
        return walk
    return _bounded(walk, max_overtaken)


def _walk(paths: Sequence[Path]) -> list[int]:
    """Depth first, branches and rows in the order of their first row.

    Sorting by paths would give the same, in one piece of work that holds up all other threads.
    """
    return list(_visit(paths, range(len(paths)), 0))


def _visit(paths: Sequence[Path], rows: Iterable[int], depth: int) -> Iterator[int]:
    """`rows`, in the order of the file, that have the first `depth` nodes in common."""
    branches: dict[int, list[int]] = {}
    for row in rows:
        path = paths[row]
        node = path[depth] if depth < len(path) else -1 - row  # where it ends: a leaf of its own
        branches.setdefault(node, []).append(row)
    for members in branches.values():
        if len(members) == 1:
            yield members[0]
        else:
            yield from _visit(paths, members, depth + 1)


def _bounded(walk: Sequence[int], max_overtaken: int) -> list[int]:
    """The same walk, but no row runs after more than `max_overtaken` younger ones.

    A cursor goes along the walk. Before a row runs, the oldest one that is left is looked at:
    each younger row that has run since overtook it. Is it overdue, the cursor jumps there.
    """
    place = {row: i for i, row in enumerate(walk)}
    done = [False] * len(walk)
    order: list[int] = []
    oldest, cursor = 0, 0
    while len(order) < len(walk):
        while done[oldest]:
            oldest += 1
        # All rows before the oldest one have run, so all others that have are younger.
        if len(order) - oldest >= max_overtaken:
            cursor = place[oldest]
        while done[walk[cursor]]:
            cursor = (cursor + 1) % len(walk)
        done[walk[cursor]] = True
        order.append(walk[cursor])
    return order
