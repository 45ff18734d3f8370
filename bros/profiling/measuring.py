"""Measures step times and provides the cost model that an engine starts with."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.files import expand_user
from bros.core.interfaces import EngineInfo, Executor, Grouping, LaunchingExecutor, find_launcher
from bros.core.machine import available_cores
from bros.core.plan import Chunk, KvCopies, SampleSpec, SharedPrefix, StepPlan
from bros.core.request import SamplingParams
from bros.executor.cuda.graphs import MIXED_PADDING
from bros.kernels.dispatch import compiled_digest
from bros.profiling.fitting import ChunkShape, CopySample, Fit, Sample, StepShape, fit, with_copies
from bros.profiling.profiles import (
    MEASURED,
    QUICK,
    Profile,
    ProfileKey,
    device_slug,
    find_profile,
    iso_date,
    load_profile,
    versions,
)
from bros.scheduler.build import step_bounds

# ---- Which steps to measure, within the limits of an engine.
#
# Three kinds of step, because the model has to tell their costs apart: decode rows alone, one
# prompt chunk alone, and mixtures. Where kernels read shared prefixes once, also decode rows with
# a shared prefix. Grids only list shapes; measure_steps runs them.


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that an engine runs.

    tokens: per step.
    rows: per step.
    length: tokens per request.
    blocks: KV blocks.
    block_size: slots per block.
    grouping: see EngineInfo.
    """

    tokens: int
    rows: int
    length: int
    blocks: int
    block_size: int
    grouping: Grouping | None = None

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> StepLimits:
        rows, tokens = step_bounds(config, info)
        return cls(
            tokens=tokens,
            rows=min(rows, tokens),
            length=info.max_model_len,
            blocks=info.num_kv_blocks,
            block_size=info.block_size,
            grouping=info.grouping,
        )

    def allow(self, shape: StepShape) -> bool:
        """Whether an engine with these limits could run such a step."""
        return (
            0 < len(shape) <= self.rows
            and sum(chunk.tokens for chunk in shape) <= self.tokens
            and all(chunk.tokens > 0 for chunk in shape)
            and all(0 <= chunk.context <= self.length - chunk.tokens for chunk in shape)
            and self.blocks_of(shape) <= self.blocks
        )

    def blocks_of(self, shape: StepShape) -> int:
        """KV blocks that the rows of a step hold; shared ones count once."""
        size = self.block_size
        return sum(
            -(-(chunk.context + chunk.tokens) // size) - chunk.shared // size for chunk in shape
        )


def decode_rows(rows: int, context: int) -> StepShape:
    """Rows of one token each, after `context` cached tokens."""
    return (ChunkShape(1, context, True),) * rows


def shared_prefix_rows(rows: int, context: int, shared: int) -> StepShape:
    """Decode rows that share the first `shared` of their context tokens, in full blocks."""
    first, other = ChunkShape(1, context, True), ChunkShape(1, context, True, shared)
    return (first,) + (other,) * (rows - 1)


def prompt(tokens: int, context: int, sampled: bool = True) -> StepShape:
    """One prompt chunk. sampled: it is the last chunk of its prompt."""
    return (ChunkShape(tokens, context, sampled),)


_LARGE_TOKENS = (256, 512, 1024, 2048)  # of a step
_LARGE_CONTEXT = 4096  # tokens before a chunk
_LARGE_DECODE = ((32, 4096), (128, 512), (256, 512), (256, 2048))  # rows, context


def quick_grid(limits: StepLimits) -> list[StepShape]:
    """About thirty steps, and sixteen more where steps have many hundred tokens; to measure all of
    them takes a few seconds."""
    rows = (1, 4, 8, 16, 24, 32, limits.rows)
    tokens = (8, 16, 32, 64, 96, 128, min(limits.tokens, max(limits.length // 2, 2)))
    shapes: list[StepShape] = []
    for count, size in zip(rows, tokens, strict=True):
        short, long = _context_range(limits, count)
        shapes += [decode_rows(count, short), decode_rows(count, long), prompt(size, 0)]
        if 32 <= size < limits.length:
            shapes.append(prompt(size, min(512, limits.length - size)))
        if count > 1:
            shapes.append(decode_rows(count // 2, long) + prompt(size, 0, False))
    shapes += _shared_prefix_grid(limits, (8, 24), (512,))
    if limits.tokens >= 2 * _LARGE_TOKENS[0]:
        shapes += _large_grid(limits)
    return _allowed(shapes, limits)


def _large_grid(limits: StepLimits) -> Iterator[StepShape]:
    """Chunks of a size that a GPU computes in a step, at the begin of a prompt, far behind it, and
    beside decode rows; and as many decode rows as it has, with long contexts.

    Without the chunks an H100's times of tokens and of pairs could not be told apart: pairs were
    fitted as five times as long as they take, and mixed steps predicted with errors of 11 %. The
    contexts of a quick grid take it less than a millisecond: without longer ones, a token of
    context was fitted as one and a half times as long as it takes.
    """

    def room(rows: int, reserved: int) -> int:
        """Context of each of so many rows; a small device has not enough memory for long ones."""
        return (limits.blocks * limits.block_size - reserved) // rows - limits.block_size

    for rows, context in _LARGE_DECODE:
        rows = min(rows, limits.rows)
        yield decode_rows(rows, min(context, limits.length - 1, room(rows, 0)))
    for tokens in _LARGE_TOKENS:
        far = min(_LARGE_CONTEXT, limits.length - tokens)
        yield prompt(tokens, 0)
        yield prompt(tokens, far)
        rows = max(1, min(limits.rows, tokens) // 4)
        context = min(far // 4, room(rows, tokens + far))
        yield decode_rows(rows, context) + prompt(tokens - rows, far // 2, False)


def full_grid(limits: StepLimits) -> list[StepShape]:
    """All shapes that the limits allow; to measure them takes some minutes on two cores."""
    rows = (2, 4, 8, 16, 24, 32, 48, 64, 128)
    shared = _shared_prefix_grid(limits, rows, (256, 512, 1024, 1984))
    return _allowed(itertools.chain(quick_grid(limits), _full_grid(), shared), limits)


def _shared_prefix_grid(
    limits: StepLimits, rows: Iterable[int], prefixes: Iterable[int]
) -> list[StepShape]:
    """Rows whose shared prefix is read once, with 15 and with 255 context tokens of their own."""
    rule = limits.grouping
    if rule is None:
        return []
    return [
        shared_prefix_rows(count, shared + own, shared)
        for count in rows
        for shared in prefixes
        for own in (15, 255)
        if count >= rule.min_rows and _is_read_once(rule, shared)
    ]


def _is_read_once(rule: Grouping, shared: int) -> bool:
    blocks, rest = divmod(shared, rule.block_size)
    return rest == 0 and blocks >= rule.min_blocks and blocks % rule.step_blocks == 0


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
    """Up to `count` different random steps of all kinds, as in practice."""
    shapes: list[StepShape] = []
    for _ in range(50 * count):
        shape: StepShape = ()
        kind = rng.randrange(3 if limits.grouping is None else 4)
        if kind == 3:
            shape += _random_shared_prefix(limits, rng)
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


def _random_shared_prefix(limits: StepLimits, rng: random.Random) -> StepShape:
    rule = limits.grouping
    assert rule is not None
    blocks = rng.randint(rule.min_blocks, 8 * rule.min_blocks)
    shared = (blocks - blocks % rule.step_blocks) * rule.block_size
    rows = max(_log_uniform(rng, rule.min_rows, limits.rows), rule.min_rows)
    return shared_prefix_rows(rows, shared + _log_uniform(rng, 1, 500), shared)


def _context_range(limits: StepLimits, rows: int) -> tuple[int, int]:
    """A short and a long context that `rows` rows can have at the same time."""
    room = min(limits.blocks, 4096 // limits.block_size) // max(rows, 1) * limits.block_size
    longest = max(min(room, limits.length, 1024) - 1, 0)
    return (min(15, longest), longest)


def _allowed(shapes: Iterable[StepShape], limits: StepLimits) -> list[StepShape]:
    """The shapes within the limits, without duplicates."""
    return list(dict.fromkeys(shape for shape in shapes if limits.allow(shape)))


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    """A random integer whose logarithm is uniform in [log low, log high]."""
    if high <= low:
        return max(high, 1)
    return int(low * (high / low) ** rng.random())


# ---- Measuring step times on any executor, with synthetic plans.


Progress = Callable[[int, int], None]
"""Called with the number of completed steps and the total."""

_TOUCH_TOKENS = 64
"""Tokens per step that touches memory: few, so that the time limit is kept."""

_TOUCH_SHARE = 0.25
"""Share of the time limit in which steps that touch memory may start."""

_GREEDY = SamplingParams(temperature=0.0)

_LAUNCHED_STEPS = 3
"""Steps to time in a row where the engine launches each while the one before runs."""


def measure_steps(
    executor: Executor,
    info: EngineInfo,
    limits: StepLimits,
    shapes: Sequence[StepShape],
    clock: Clock,
    *,
    repeats: int,
    time_limit_s: float = float("inf"),
    progress: Progress = lambda done, total: None,
    seed: int = 0,
    launcher: LaunchingExecutor | None = None,
) -> list[Sample]:
    """The undisturbed time of each shape: the lower quartile of `repeats` rounds.

    Every round runs all shapes in a new random order, so that a slow moment of the machine affects
    many shapes once rather than one shape always. Other processes only add time, so the lower
    quartile is stable where a median is not, for example when the machine is shared half of the
    time. An additional first round warms up, from small steps to large ones.

    No step starts that would probably end after `time_limit_s`, of which a quarter is for touching
    the KV memory; the smallest one runs in any case. Shapes with fewer rounds use the ones they
    have, if need be the warm-up; the result omits shapes that have not run. Overwrites the
    executor's KV memory.

    launcher: the executor, if the engine launches each step while the one before runs, which hides
        the host's work: a decode step of Llama-3-8B took 6.2 instead of 6.7 ms (H100).
    """
    rng = random.Random(seed)
    maker = _PlanMaker(info, limits, shapes, rng)
    sizes = [sum(chunk.tokens for chunk in shape) for shape in shapes]
    times: list[list[float]] = [[] for _ in shapes]
    touch_end_s = clock.now() + _TOUCH_SHARE * time_limit_s
    for plan in maker.touch_memory():
        if clock.now() < touch_end_s:
            executor.execute(plan)
    # The first of these steps has the operating system map the memory. That took longer than the
    # whole limit where another replica was busy, and a model of a single step is off by factors.
    end_s = clock.now() + (1.0 - _TOUCH_SHARE) * time_limit_s
    # On a GPU, steps with best-effort work that are not launched ahead may be suspended, and have
    # other kernels than steps that may not.
    should_abort = None if info.device == "cpu" else lambda: False
    runs = 1 if launcher is None else _LAUNCHED_STEPS + 1
    token_s = 0.0  # the least time per token so far
    order = sorted(range(len(shapes)), key=lambda index: sizes[index])
    for count in range(len(shapes) * (repeats + 1)):
        index = order[count % len(order)]
        if clock.now() + runs * token_s * sizes[index] < end_s or count == 0:
            plan = maker.plan(shapes[index])
            if launcher is not None:
                times[index].append(_seconds_in_a_row(launcher, plan, clock))
            else:
                start_s = clock.now()
                executor.execute(plan, should_abort)
                times[index].append(clock.now() - start_s)
            per_token = times[index][-1] / sizes[index]
            token_s = min(token_s, per_token) if count > 0 else per_token
        progress(count + 1, len(shapes) * (repeats + 1))
        if (count + 1) % len(order) == 0:
            rng.shuffle(order)
    return _typical(shapes, times)


def _seconds_in_a_row(launcher: LaunchingExecutor, plan: StepPlan, clock: Clock) -> float:
    """The time between the ends of steps, each of which is launched while the one before runs."""
    before, running = launcher.launch(plan), launcher.launch(plan)
    before.result()
    start_s = clock.now()
    for _ in range(_LAUNCHED_STEPS - 1):
        following = launcher.launch(plan)
        running.result()
        running = following
    running.result()
    return (clock.now() - start_s) / _LAUNCHED_STEPS


def _typical(shapes: Sequence[StepShape], times: Sequence[Sequence[float]]) -> list[Sample]:
    return [
        Sample(shape, lower_quartile(taken[1:] or taken))
        for shape, taken in zip(shapes, times, strict=True)
        if taken
    ]


def lower_quartile(values: Sequence[float]) -> float:
    """The value with a quarter of the others below it: of five values, the second smallest."""
    return sorted(values)[len(values) // 4]


class _PlanMaker:
    """Makes plans of given shapes, with blocks scattered over the KV memory as in real steps."""

    def __init__(
        self,
        info: EngineInfo,
        limits: StepLimits,
        shapes: Sequence[StepShape],
        rng: random.Random,
    ) -> None:
        self._limits = limits
        self._vocab = info.vocab_size
        self._rng = rng
        used = max((limits.blocks_of(shape) for shape in shapes), default=0)
        self._blocks = rng.sample(range(limits.blocks), used)
        self._count = 0

    def touch_memory(self) -> list[StepPlan]:
        """Plans that write to every block that measured steps will read.

        The operating system maps memory that was never written to a single page of zeros, which is
        much faster to read than real context. Two tokens per block reach all of its pages.
        """
        size, half = self._limits.block_size, self._limits.block_size // 2
        slots = [block * size + offset for block in self._blocks for offset in {0, half}]
        count = min(self._limits.tokens, self._limits.length, _TOUCH_TOKENS)
        pieces = [array("i", slots[at : at + count]) for at in range(0, len(slots), count)]
        return [StepPlan(0, (self._chunk(0, array("i"), piece, False),)) for piece in pieces]

    def plan(self, shape: StepShape) -> StepPlan:
        """One request per chunk, each in its own blocks except for the shared prefix."""
        size = self._limits.block_size
        chunks, at = [], 0
        for tokens, context, sampled, shared in shape:
            prefix = self._blocks[: shared // size]  # the first blocks of the first request
            count = -(-(context + tokens) // size) - len(prefix)
            blocks = prefix + self._blocks[at : at + count]
            at += count
            segments = array("i")
            for index in range(-(-context // size)):
                segments.extend((blocks[index], 0, min(size, context - index * size)))
            positions = range(context, context + tokens)
            slots = array("i", (blocks[i // size] * size + i % size for i in positions))
            chunks.append(self._chunk(context, segments, slots, sampled))
        return StepPlan(0, tuple(chunks), shared=self._shared(shape))

    def _shared(self, shape: StepShape) -> tuple[SharedPrefix, ...]:
        """The prefix that rows share with the first one, if the grouping has it read once."""
        rule = self._limits.grouping
        shared = max((chunk.shared for chunk in shape), default=0)
        if rule is None or shared // rule.block_size < rule.min_blocks:
            return ()
        rows = array("i", (row for row, chunk in enumerate(shape) if row == 0 or chunk.shared))
        if len(rows) < rule.min_rows:
            return ()
        return (SharedPrefix(rows, 0, shared // rule.block_size),)

    def _chunk(self, start: int, segments: array[int], slots: array[int], sampled: bool) -> Chunk:
        self._count += 1
        return Chunk(
            request_id=str(self._count),
            start=start,
            token_ids=[self._rng.randrange(self._vocab) for _ in slots],
            segments=segments,
            slots=slots,
            sample=SampleSpec(_GREEDY, seed=0) if sampled else None,
        )


# ---- Measuring copies of KV to the host and back, in a step of one row.


COPIED_TOKENS = (16, 512, 2048)
"""Sizes to measure: from one block to about the most that a step copies."""

OVERLAPPED_TOKENS = (4096, 16384, 65536)
"""Sizes for copies that overlap the computation: large enough to take longer than the step."""

_OVERLAPPED_STEPS = 3
"""Steps to run in a row, because copies to the host continue while the next step runs."""

_WAIT_FACTOR = 1.2
"""A step waits for its copies if they make it take more than this many times as long."""

_NO_COPIES = (True, 0)
"""The kind (out, tokens) of a step without copies."""


def measure_copies(
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    *,
    repeats: int,
    sizes: Sequence[int] = COPIED_TOKENS,
    overlap: bool = False,
    time_limit_s: float = float("inf"),
    seed: int = 0,
) -> list[CopySample]:
    """How long copies in each direction take in a step of one row.

    Measures the lower quartile of `repeats` rounds, because other processes only add time.

    sizes: in tokens, limited by the host memory and rounded down to whole blocks.
    overlap: copies overlap the computation; the result omits sizes that it hides.

    An additional first round touches all of the memory. The result is empty if there is no memory
    for copies or no time: no step starts that would probably end after `time_limit_s`. Overwrites
    the executor's KV memory.
    """
    maker = _CopyPlanMaker(info, max(sizes), random.Random(seed))
    steps = _OVERLAPPED_STEPS if overlap else 1
    limit = maker.max_tokens
    sizes = sorted({min(size, limit) // info.block_size * info.block_size for size in sizes})
    # A restore comes first, because it writes to the blocks that the checkpoint then reads.
    kinds = [(out, size) for size in reversed(sizes) for out in (False, True) if size]
    if not kinds:
        return []
    times: dict[tuple[bool, int], list[float]] = {kind: [] for kind in (*kinds, _NO_COPIES)}
    began_s, longest_s = clock.now(), 0.0
    for number in range(repeats + 1):
        for kind in times:
            plan = maker.plan(*kind)
            start_s = clock.now()
            if start_s - began_s + longest_s >= time_limit_s:
                break
            for _ in range(steps):
                executor.execute(plan)
            longest_s = max(longest_s, clock.now() - start_s)
            if number:
                times[kind].append((clock.now() - start_s) / steps)
    if not times[_NO_COPIES]:
        return []
    alone_s = lower_quartile(times[_NO_COPIES])
    with_copies = [
        (out, size, lower_quartile(times[out, size])) for out, size in kinds if times[out, size]
    ]
    if overlap:
        return [CopySample(*found) for found in with_copies if found[-1] > _WAIT_FACTOR * alone_s]
    return [CopySample(out, size, max(both_s - alone_s, 0.0)) for out, size, both_s in with_copies]


class _CopyPlanMaker:
    """Makes steps of one row with copies of scattered blocks.

    max_tokens: the largest copy.
    """

    def __init__(self, info: EngineInfo, max_tokens: int, rng: random.Random) -> None:
        self._size = info.block_size
        blocks = min(info.num_host_kv_blocks, info.num_kv_blocks - 1, max_tokens // info.block_size)
        self.max_tokens = blocks * self._size
        self._blocks = rng.sample(range(1, info.num_kv_blocks), blocks)

    def plan(self, out: bool, tokens: int) -> StepPlan:
        """A row in block 0 and copies of `tokens` tokens: checkpoints if `out`, else restores."""
        device = array("i")
        for block in self._blocks[: tokens // self._size]:
            device.extend(range(block * self._size, (block + 1) * self._size))
        host = array("i", range(tokens))
        if out:
            copies = KvCopies(out_device=device, out_host=host)
        else:
            copies = KvCopies(back_device=device, back_host=host)
        sample = SampleSpec(_GREEDY, seed=0)
        row = Chunk("copies", 0, [0], array("i"), array("i", [0]), sample)
        return StepPlan(step=0, chunks=(row,), copies=copies if tokens else None)


# ---- Profiles.


MAX_STORED_ERROR = 0.10
"""Mean relative error, of steps that were not fitted, above which a quick profile is not stored:
the machine was busy. One with 18 % (10 % of the fitted steps) made predictions wrong by 46 %."""

_QUICK_REPEATS, _QUICK_LIMIT_S = 2, 10.0
_QUICK_TOKENS, _QUICK_GPU_TOKENS = 256, 4096
_QUICK_COPIES_S, _COPIES_S, _COPY_REPEATS = 2.0, 30.0, 8
_HELD_OUT_STEPS = 60


def profile_key(config: EngineConfig, info: EngineInfo) -> ProfileKey:
    """The key of this engine's profiles. The number of threads matters on a CPU only."""
    cores = available_cores()
    on_cpu = info.device == "cpu"
    return ProfileKey(
        device=device_slug(info.device, cores),
        model=info.model,
        weights=info.weights,
        kernels=info.kernels,
        kv_dtype=info.kv_dtype,
        threads=config.threads_of_rank(cores, info.tp) if on_cpu else 0,
        tp=info.tp,
    )


def step_time_profile(
    config: EngineConfig,
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    folders: Sequence[Path],
    report: Callable[[str], None],
    before: str = "",
) -> Profile:
    """The profile at config.profile, else a stored one, else `before`, else a quick measurement.

    folders: where profiles are stored, see profiles.profile_folders. A quick profile is stored in
        the first folder unless its error is above MAX_STORED_ERROR, and is used until the software
        changes: decisions by the prices of older kernels are wrong by factors.
    report: called with one line for each long operation and each warning.
    before: the profile, as JSON, of the engine that this one replaces; empty if there was none. On
        a busy machine it was not stored, and users wait while steps are measured again.

    Measuring overwrites the KV memory. Raises ConfigError if config.profile cannot be read.
    """
    key = profile_key(config, info)
    if config.profile is not None:
        return _load_given(expand_user(config.profile), key, report)
    found = find_profile(folders, key, report, _quick_tokens(config, info), _versions())
    if found is not None:
        return found
    inherited = _read_before(before, key)
    if inherited is not None:
        return inherited
    report("Measuring step times for some seconds; `bros profile` measures them thoroughly ...")
    profile = quick_profile(config, executor, info, clock)
    assert profile.fitted is not None
    error = (profile.held_out or profile.fitted).mape
    if error > MAX_STORED_ERROR:
        report(
            f"the measured step times vary by {error:.0%}, perhaps because the "
            "machine is busy; bros uses them, but does not store them"
        )
    elif profile.max_step_tokens < _quick_tokens(config, info):  # `find_profile` would not take it
        report(
            f"only {profile.steps} steps could be measured in {_QUICK_LIMIT_S:.0f} s; bros uses "
            "their times, but does not store them"
        )
    elif folders:
        _store(profile, folders[0], report)
    return profile


def quick_profile(
    config: EngineConfig, executor: Executor, info: EngineInfo, clock: Clock
) -> Profile:
    """Measure about thirty steps of up to 256 tokens (forty of up to 4,096 on a GPU) and a few with
    copies of KV; takes seconds."""
    limits = StepLimits.of(config, info)
    limits = dataclasses.replace(limits, tokens=_quick_tokens(config, info))
    samples = measure_steps(
        executor,
        info,
        limits,
        quick_grid(limits),
        clock,
        repeats=_QUICK_REPEATS,
        time_limit_s=_QUICK_LIMIT_S,
        launcher=find_launcher(executor, config.async_scheduling),
    )
    fitting = fit(samples, step_padding(config, info))
    copies = _copies(executor, info, clock, _QUICK_REPEATS, _QUICK_COPIES_S)
    return _profile(QUICK, config, info, fitting, samples, copies, clock)


def _copies(
    executor: Executor, info: EngineInfo, clock: Clock, repeats: int, time_limit_s: float
) -> list[CopySample]:
    overlap = _overlaps(info)
    sizes = OVERLAPPED_TOKENS if overlap else COPIED_TOKENS
    return measure_copies(
        executor, info, clock,
        repeats=repeats, sizes=sizes, overlap=overlap, time_limit_s=time_limit_s,
    )  # fmt: skip


def _overlaps(info: EngineInfo) -> bool:
    """Whether copies of KV overlap the computation."""
    return info.device != "cpu"


def _quick_tokens(config: EngineConfig, info: EngineInfo) -> int:
    """Tokens of the largest step in a quick profile."""
    quick = _QUICK_TOKENS if info.device == "cpu" else _QUICK_GPU_TOKENS
    return min(config.step_bounds(info.device).tokens, quick)


@dataclass(frozen=True, slots=True)
class Measured:
    """A full profile and its measurements.

    fitted: steps that the cost model is fitted to.
    held_out: random steps that it is tested with.
    copies: steps with copies of KV.
    """

    profile: Profile
    fitted: tuple[Sample, ...]
    held_out: tuple[Sample, ...]
    copies: tuple[CopySample, ...]


def full_profile(
    config: EngineConfig,
    executor: Executor,
    info: EngineInfo,
    clock: Clock,
    *,
    repeats: int,
    progress: Progress,
) -> Measured:
    """Measure the full grid, and test the fit with random steps held out; takes minutes."""
    limits = StepLimits.of(config, info)
    grid = full_grid(limits)
    others = [
        shape
        for shape in random_steps(limits, _HELD_OUT_STEPS, random.Random(0))
        if shape not in grid
    ]
    samples = measure_steps(
        executor,
        info,
        limits,
        [*grid, *others],
        clock,
        repeats=repeats,
        progress=progress,
        launcher=find_launcher(executor, config.async_scheduling),
    )
    fitted, held_out = samples[: len(grid)], samples[len(grid) :]
    copies = _copies(executor, info, clock, max(repeats, _COPY_REPEATS), _COPIES_S)
    fitting = fit(fitted, step_padding(config, info), held_out)
    profile = _profile(MEASURED, config, info, fitting, fitted, copies, clock)
    return Measured(profile, tuple(fitted), tuple(held_out), tuple(copies))


def step_padding(config: EngineConfig, info: EngineInfo) -> tuple[tuple[int, int], ...]:
    """How the graphs of mixed steps round up the tokens of a step, as CostModel.padding."""
    if info.device == "cpu":
        return ()  # it has no graphs
    if config.cuda_graphs == "off" or config.async_scheduling == "off":
        return ()  # steps that may be suspended are not replayed
    if info.kernels != "triton":
        return ()  # nor are chunks that xformers computes, or steps of kernels without graphs
    largest, tokens = MIXED_PADDING[-1][0], config.step_bounds(info.device).tokens
    return (*MIXED_PADDING, (tokens, 1)) if tokens > largest else MIXED_PADDING


def _profile(
    kind: str,
    config: EngineConfig,
    info: EngineInfo,
    fitting: Fit,
    samples: Sequence[Sample],
    copies: Sequence[CopySample],
    clock: Clock,
) -> Profile:
    return Profile(
        key=profile_key(config, info),
        kind=kind,
        model=with_copies(fitting.model, copies, _overlaps(info)),
        versions=_versions(),
        date=iso_date(clock),
        steps=len(samples),
        max_step_tokens=max(sum(chunk.tokens for chunk in s.chunks) for s in samples),
        fitted=fitting.fitted,
        held_out=fitting.held_out,
    )


def _versions() -> Mapping[str, str]:
    return versions(compiled_digest())


def _load_given(path: Path, key: ProfileKey, report: Callable[[str], None]) -> Profile:
    try:
        profile = load_profile(path)
    except ConfigError as error:
        raise ConfigError(f"--profile: {error}") from None
    for field in dataclasses.fields(ProfileKey):
        here, there = getattr(key, field.name), getattr(profile.key, field.name)
        if here != there:
            name = field.name.replace("_", " ")
            report(f"{path} is for {name} {there}, but this engine has {here}")
    return profile


def _read_before(text: str, key: ProfileKey) -> Profile | None:
    """The profile of the engine before; None without one, or if it had other software."""
    with contextlib.suppress(ConfigError):  # the software may have been updated in between
        profile = Profile.from_json(text)
        if profile.key == key and profile.versions == _versions():
            return profile
    return None


def _store(profile: Profile, folder: Path, report: Callable[[str], None]) -> None:
    """Only report a folder that is not writable: the next start then measures again."""
    try:
        profile.save(folder)
    except OSError as error:
        report(f"the measured step times cannot be stored in {folder}: {error}")
