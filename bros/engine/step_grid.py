"""Which steps to measure for a step time model, within what an engine can run.

Three kinds of step, because the model has to tell their costs apart: decode rows alone, one
prompt chunk alone, and mixtures. Grids only name shapes; step_timing.py runs them.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.scheduler.fitting import ChunkShape, StepShape


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step an engine runs: tokens and rows of a step, tokens of a request, blocks."""

    tokens: int
    rows: int
    length: int
    blocks: int
    block_size: int

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> StepLimits:
        rows, tokens = config.step_bounds(info.device)
        return cls(
            tokens=tokens,
            rows=min(rows, tokens),
            length=info.max_model_len,
            blocks=info.num_kv_blocks,
            block_size=info.block_size,
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
        """KV blocks that the rows of a step hold, all of them their own."""
        return sum(-(-(chunk.context + chunk.tokens) // self.block_size) for chunk in shape)


def decode_rows(rows: int, context: int) -> StepShape:
    """Rows of one token after `context` cached ones each."""
    return (ChunkShape(1, context, True),) * rows


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
    return _allowed(shapes, limits)


def full_grid(limits: StepLimits) -> list[StepShape]:
    """Every combination of sizes that the limits allow, some minutes on two cores."""
    return _allowed(itertools.chain(quick_grid(limits), _full_grid()), limits)


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
        kind = rng.randrange(3)
        if kind != 0:
            typical = _log_uniform(rng, 8, 1500)
            for _ in range(_log_uniform(rng, 1, limits.rows)):
                shape += decode_rows(1, rng.randint(typical // 2, typical))
        if kind != 1:
            for _ in range(rng.choice((1, 1, 1, 2, 3))):
                tokens = _log_uniform(rng, 4, 512)
                shape += prompt(tokens, rng.choice((0, rng.randrange(1024))), rng.random() < 0.5)
        if limits.allow(shape) and shape not in shapes:
            shapes.append(shape)
        if len(shapes) == count:
            break
    return shapes


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
