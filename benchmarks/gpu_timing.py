"""Timing on a device, the limits of the device, and lines of results; for gpu_speed.py.

Times are medians of repeats, each between two CUDA events (on the CPU, by the clock). Launching a
small kernel takes longer than running it, so the device is kept busy until all repeats are
launched, or many calls are captured in a CUDA graph. Ceilings are measured in the same run, by
copies and matrix products; they bound every time from below (its floor).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

Run = Callable[[int], object]
"""run(i): the i-th repeat, on its own inputs."""

WARM_UP = 3
MOST_CALLS = 32  # in a graph: one per layer of the model, so that each reads other memory
GRAPH_S = 3e-3
MOST_AHEAD_S = 0.2
CYCLES_PER_S = 2e9  # roughly; a slower GPU only stays busy for longer


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the median, and the quartiles around it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        ordered = sorted(seconds)
        quarter = len(ordered) // 4
        return cls(statistics.median(ordered), ordered[quarter], ordered[-1 - quarter])

    def over(self, count: int) -> Timing:
        """The time of one, if this is the time of `count`."""
        return Timing(self.median / count, self.low / count, self.high / count)


@dataclass(frozen=True, slots=True)
class Timer:
    """Measures times on one device. budget_s: approximate limit of one measurement."""

    device: torch.device
    repeats: int
    budget_s: float

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def on_device(self, run: Run, *, recorded: bool = False) -> Timing:
        """The time of work on the current stream. recorded: see `alternating`."""
        return self.alternating([run], recorded=recorded)[0]

    def alternating(self, runs: Sequence[Run], *, recorded: bool = False) -> list[Timing]:
        """The times of several runs that are compared; they alternate, so that a slow moment
        affects all.

        recorded: the runs never wait for the device, so they may be captured in a CUDA graph, which
        removes the host from their times.
        """
        for index, run in itertools.product(range(WARM_UP), runs):  # compiles and warms up
            run(index)
        timed = [self._recorded(run) if recorded and self.on_cuda else (run, 1) for run in runs]
        launching, done = self._once(lambda index: [run(index) for run, _ in timed])
        repeats = self._affordable(done)
        taken: list[list[Callable[[], float]]] = [[] for _ in runs]
        self._keep_busy(repeats * launching)
        for index in range(repeats):
            for (run, _), times in zip(timed, taken, strict=True):
                times.append(self._timed(run, index))
        self.synchronize()
        return [
            Timing.of([seconds() for seconds in times]).over(calls)
            for (_, calls), times in zip(timed, taken, strict=True)
        ]

    def by_the_clock(self, run: Run) -> Timing:
        """The time of a run whose result is on the host at its end."""
        return self.by_the_clock_in_turn([run])[0]

    def by_the_clock_in_turn(self, runs: Sequence[Run]) -> list[Timing]:
        """Likewise for several runs that are compared; they alternate."""
        for index, run in itertools.product(range(2), runs):
            run(index)
        _, done = self._once(lambda index: [run(index) for run in runs])
        taken: list[list[float]] = [[] for _ in runs]
        for index in range(self._affordable(done)):
            for run, times in zip(runs, taken, strict=True):
                began = time.perf_counter()
                run(index)
                times.append(time.perf_counter() - began)
        return [Timing.of(times) for times in taken]

    def _once(self, run: Run) -> tuple[float, float]:
        """(seconds until the run is launched, until it is done)"""
        self.synchronize()
        began = time.perf_counter()
        run(2)
        launched = time.perf_counter()
        self.synchronize()
        return launched - began, time.perf_counter() - began

    def _affordable(self, once: float) -> int:
        """The number of repeats within the budget, at least 3 and at most `repeats`."""
        affordable = max(3, int(self.budget_s / max(once, 1e-6)))
        return min(self.repeats, affordable)

    def _recorded(self, run: Run) -> tuple[Run, int]:
        """(graph of a few milliseconds of calls, their number), or (run, 1) if capturing fails."""
        calls = max(1, min(MOST_CALLS, int(GRAPH_S / max(self._once(run)[1], 1e-6))))
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        try:
            # Not by torch.cuda.graph, which frees cached memory each time: that is slow.
            with torch.cuda.stream(stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for index in range(calls):
                        run(index)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            print(f"  not recorded: {error}"[:200])
            return run, 1
        graph.replay()
        return lambda _: graph.replay(), calls

    def _keep_busy(self, seconds: float) -> None:
        """Occupy the device for about twice as long, while the host launches the timed work."""
        if self.on_cuda:
            torch.cuda._sleep(int(CYCLES_PER_S * min(MOST_AHEAD_S, 1e-3 + 2 * seconds)))

    def _timed(self, run: Run, index: int) -> Callable[[], float]:
        """Run once; returns a function for its seconds, to be called after synchronize."""
        if not self.on_cuda:
            began = time.perf_counter()
            run(index)
            seconds = time.perf_counter() - began
            return lambda: seconds
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        run(index)
        after.record()
        return lambda: before.elapsed_time(after) / 1e3


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy: bytes read plus written per second. matmul: FLOP/s. to_host, to_device: bytes/s."""

    copy: float
    matmul: float
    to_host: float
    to_device: float

    def floor_s(self, num_bytes: float, flops: float = 0.0) -> float:
        """The minimum time to read or write num_bytes and compute flops."""
        return max(num_bytes / self.copy, flops / self.matmul)


def measure_ceilings(timer: Timer, dtype: torch.dtype, tiny: bool) -> Ceilings:
    """A large copy within the device, a large product of random matrices, pinned copies."""
    device = timer.device
    size, side = (2**18, 64) if tiny else (2**31, 8192)
    buffers = [torch.randn(size // 8, device=device).repeat(2) for _ in range(3)]  # fp32: size
    nbytes = buffers[0].nbytes
    copy = timer.on_device(lambda i: buffers[i % 3].copy_(buffers[(i + 1) % 3]))
    pairs = [torch.randn(2, side, side, device=device).to(dtype) for _ in range(2)]
    product = torch.empty(side, side, device=device, dtype=dtype)
    matmul = timer.on_device(lambda i: torch.mm(*pairs[i % 2], out=product))
    host = torch.ones(nbytes // 4, pin_memory=timer.on_cuda)
    out = timer.on_device(lambda i: host.copy_(buffers[i % 3], non_blocking=True))
    back = timer.on_device(lambda i: buffers[i % 3].copy_(host, non_blocking=True))
    return Ceilings(
        copy=2 * nbytes / copy.median,
        matmul=2 * side**3 / matmul.median,
        to_host=nbytes / out.median,
        to_device=nbytes / back.median,
    )


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement.

    measured, floor: in `unit`.
    share: the judged ratio, e.g. floor / measured; share_of says of what.
    asked: target of `share`, (">=" or "<=", number).
    spread: quartiles around `measured`.
    skipped: why there is no measurement.
    """

    part: str
    name: str
    unit: str = "ms"
    measured: float | None = None
    floor: float | None = None
    share: float | None = None
    share_of: str = ""
    asked: tuple[str, float] | None = None
    spread: tuple[float, float] | None = None
    note: str = ""
    skipped: str | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or a measurement."""
        if self.asked is None or self.share is None:
            return None
        sign, bound = self.asked
        return self.share >= bound if sign == ">=" else self.share <= bound

    def as_json(self) -> dict[str, object]:
        fields = {**dataclasses.asdict(self), "met": self.met}
        return {name: value for name, value in fields.items() if value not in (None, "")}


def timed_line(
    part: str,
    name: str,
    timing: Timing,
    floor_s: float | None,
    *,
    asked: float | None = None,
    note: str = "",
) -> Line:
    """Milliseconds with a floor. asked: required minimum of floor / measured."""
    return Line(
        part=part,
        name=name,
        measured=timing.median * 1e3,
        floor=None if floor_s is None else floor_s * 1e3,
        share=None if floor_s is None else floor_s / timing.median,
        share_of="of the floor's speed" if floor_s is not None else "",
        asked=None if asked is None else (">=", asked),
        spread=(timing.low * 1e3, timing.high * 1e3),
        note=note,
    )


@dataclass(slots=True)
class Report:
    """Collects lines; calls `save` after each, so that a time limit loses little."""

    save: Callable[[list[Line]], None]
    say: Callable[[str], None]
    lines: list[Line] = field(default_factory=list)

    def run(self, part: str, measure: Callable[[], Iterator[Line]]) -> None:
        """Run a part. A failure becomes a line, and the next part can run."""
        began = time.perf_counter()
        try:
            for line in measure():
                self._add(line)
        except Exception as error:  # any failure: the other parts must still run
            self._add(Line(part, "stopped", skipped=f"{type(error).__name__}: {error}"[:500]))
        self.say(f"{part}: {time.perf_counter() - began:.1f} s")

    def _add(self, line: Line) -> None:
        self.lines.append(line)
        self.save(self.lines)
        if line.skipped is not None:
            self.say(f"  {line.name}: {line.skipped}")
        else:
            share = "" if line.share is None else f", {line.share:.3g} {line.share_of}"
            self.say(f"  {line.name}: {line.measured:.4g} {line.unit}{share}")
