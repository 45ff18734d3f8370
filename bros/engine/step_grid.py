"""Which steps to measure for a step time model, within what an engine can run.

Three kinds of step, because the model has to tell their costs apart: decode rows alone, one
prompt chunk alone, and mixtures. Where rows read a common prefix together, also decode rows that
have one. Grids only name shapes; step_timing.py runs them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo, Grouping
from bros.scheduler.fitting import ChunkShape, StepShape


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step an engine runs: tokens and rows of a step, tokens of a request, blocks.

    grouping: which prefixes its rows read together, if any.
    """

    tokens: int
    rows: int
    length: int
    blocks: int
    block_size: int
    grouping: Grouping | None = None

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> StepLimits:
        rows, tokens = config.step_bounds(info.device)
        return cls(
            tokens=tokens,
            rows=min(rows, tokens),
            length=info.max_model_len,
            blocks=info.num_kv_blocks,
            block_size=info.block_size,
            grouping=info.grouping,
        )

    def allow(self, shape: StepShape) -> bool:
        """Whether an engine with these limits could come to run such a step."""
        return (
            0 < len(shape) <= self.rows
            and sum(chunk.tokens for chunk in shape) <= self.tokens
            and all(chunk.tokens + chunk.context <= self.length for chunk in shape)
            and self.blocks_of(shape) <= self.blocks
        )

    def blocks_of(self, shape: StepShape) -> int:
        """KV blocks that the rows of a step hold; common ones count once."""
        size = self.block_size
        return sum(
            -(-(chunk.context + chunk.tokens) // size) - chunk.shared // size for chunk in shape
        )


def decode_rows(rows: int, context: int) -> StepShape:
    """Rows of one token after `context` cached ones each."""
    return (ChunkShape(1, context, True),) * rows


def alike_rows(rows: int, context: int, shared: int) -> StepShape:
    """Decode rows whose first `shared` context tokens are the same ones, in full blocks."""
    first, other = ChunkShape(1, context, True), ChunkShape(1, context, True, shared)
    return (first,) + (other,) * (rows - 1)


def prompt(tokens: int, context: int, sampled: bool = True) -> StepShape:
    """A chunk of a prompt; sampled: it is the last one."""
    return (ChunkShape(tokens, context, sampled),)


def quick_grid(limits: StepLimits) -> list[StepShape]:
    """About thirty steps that take a few seconds in all."""
    most = min(limits.tokens, max(limits.length // 2, 2))
    rows = (1, 4, 8, 16, 24, 32, limits.rows)
    tokens = (8, 16, 32, 64, 96, 128, most)
    shapes: list[StepShape] = []
    for count, size in zip(rows, tokens, strict=True):
        short, long = _spread(limits, count)
        shapes += [decode_rows(count, short), decode_rows(count, long), prompt(size, 0)]
        if size >= 32:
            shapes.append(prompt(size, min(512, limits.length - size)))
        if count > 1:
            shapes.append(decode_rows(count // 2, long) + prompt(size, 0, False))
    shapes += _alike(limits, (8, 24), (512,))
    return _allowed(shapes, limits)


def full_grid(limits: StepLimits) -> list[StepShape]:
    """Every combination of sizes that the limits allow, some minutes on two cores."""
    alike = _alike(limits, (2, 4, 8, 16, 24, 32, 48, 64, 128), (256, 512, 1024, 2032))
    return _allowed(itertools.chain(quick_grid(limits), _full_grid(), alike), limits)


def _alike(limits: StepLimits, rows: Iterable[int], prefixes: Iterable[int]) -> list[StepShape]:
    """Rows that are enough to read a common prefix together, with little and with much besides."""
    rule = limits.grouping
    if rule is None:
        return []
    return [
        alike_rows(count, shared + own, shared)
        for count in rows
        for shared in prefixes
        for own in (15, 255)
        if count >= rule.min_rows and _is_read_together(rule, shared)
    ]


def _is_read_together(rule: Grouping, shared: int) -> bool:
    blocks, rest = divmod(shared, rule.block_size)
    return rest == 0 and blocks >= rule.min_blocks


def _full_grid() -> Iterator[StepShape]:
    for rows in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128):
        for context in (15, 127, 511, 1023, 2047):
            yield decode_rows(rows, context)
    for tokens in (2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024):
        for context in (0, 256, 1024):
            yield prompt(tokens, context)
        yield prompt(tokens, 512, False)
    for rows in (2, 8, 24):
        for tokens in (16, 64, 128, 192, 320):
            for context in (0, 512):
                yield decode_rows(rows, 300) + prompt(tokens, context, context == 0)
    for count in (2, 4, 8):
        for tokens in (8, 32, 96):
            yield prompt(tokens, 64) * count


def random_steps(limits: StepLimits, count: int, rng: random.Random) -> list[StepShape]:
    """Up to `count` different steps as they come in practice: all kinds and mixtures, any sizes."""
    shapes: list[StepShape] = []
    for _ in range(50 * count):
        shape: StepShape = ()
        kind = rng.randrange(3 if limits.grouping is None else 4)
        if kind == 3:
            shape += _random_alike(limits, rng)
        elif kind != 0:
            typical = _log_uniform(rng, 8, 1500)
            for _ in range(_log_uniform(rng, 1, limits.rows)):
                shape += decode_rows(1, rng.randint(typical // 2, typical))
        if kind in (0, 2):
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                tokens = _log_uniform(rng, 4, 512)
                shape += prompt(tokens, rng.choice((0, rng.randrange(1024))), rng.random() < 0.5)
        if limits.allow(shape) and shape not in shapes:
            shapes.append(shape)
        if len(shapes) == count:
            break
    return shapes


def _random_alike(limits: StepLimits, rng: random.Random) -> StepShape:
    rule = limits.grouping
    assert rule is not None
    shared = rng.randint(rule.min_blocks, 8 * rule.min_blocks) * rule.block_size
    rows = max(_log_uniform(rng, rule.min_rows, limits.rows), rule.min_rows)
    return alike_rows(rows, shared + _log_uniform(rng, 1, 500), shared)


def _spread(limits: StepLimits, rows: int) -> tuple[int, ...]:
    """A short and a long context that `rows` rows can have at the same time."""
    room = min(limits.blocks, 4096 // limits.block_size) // max(rows, 1) * limits.block_size
    longest = max(min(room, limits.length, 1024) - 1, 0)
    return (min(15, longest), longest)


def _allowed(shapes: Iterable[StepShape], limits: StepLimits) -> list[StepShape]:
    """Each once."""
    return list(dict.fromkeys(shape for shape in shapes if limits.allow(shape)))


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Small sizes as often as large ones: every doubling is equally likely."""
    if high <= low:
        return max(high, 1)
    return int(low * (high / low) ** rng.random())
