"""benchmarks/gpu_speed.py, without a GPU: all of its program on tiny shapes, and its arithmetic.

No time measured here means anything. What runs, and what is made of times, does.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from bros.core.plan import StepPlan

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
KERNELS = ["attention", "layout", "shared", "sampling"]
PARTS = ["decode", "layer", "prefill", *KERNELS, "copies", "overhead", "peers"]


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu_speed")


def module(name: str) -> Any:
    """One that gpu_speed imports."""
    return sys.modules[f"gpu_{name}"]


@pytest.fixture(scope="module")
def model(speed: ModuleType) -> Any:
    model = module("model")
    return model.Model(model.SMALL, torch.device("cpu"), "reference")


def line(**fields: Any) -> Any:
    return module("timing").Line(part="decode", name="1 x 2", **fields)


@pytest.mark.long
@pytest.mark.slow
def test_every_part_runs(
    speed: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures" / "speed.json"
    arguments = ["--device", "cpu", "--quick", "--kernels", "reference"]
    assert speed.main([*arguments, "--commit", "abc", "--json", str(file)]) == 0
    found = json.loads(file.read_text("utf-8"))
    lines = found["lines"]
    assert list(dict.fromkeys(each["part"] for each in lines)) == PARTS
    assert [each for each in lines if each["name"] == "stopped"] == []
    skipped = {each["name"] for each in lines if "skipped" in each}
    optional = {"FlexAttention", "xformers", "transformers", "by Triton"}
    assert {name.split(",")[0] for name in skipped} <= optional
    measured = [each for each in lines if each["name"] not in skipped]
    # What is a difference of two times may be anything here.
    assert all(each["measured"] > 0 for each in measured if "transformers" not in each["name"])
    assert found["environment"]["commit"] == "abc" and found["tiny"] is True
    assert set(found["ceilings_per_second"]) == {"copy", "matmul", "to_host", "to_device"}
    out = capsys.readouterr().out
    assert "the times are meaningless" in out and "Traceback" not in out
    assert "MISSED" not in out and " met" not in out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
def test_tile_sizes_are_found_and_stored(speed: ModuleType, tmp_path: Path) -> None:
    settings = pytest.importorskip("bros.kernels.triton.settings")
    arguments = ["--device", "cpu", "--quick", "--repeats", "1", "--parts", "tune"]
    assert speed.main([*arguments, "--tuned", str(tmp_path)]) == 0
    plain = settings.settings_for(torch.device("cpu"))
    found = settings.with_tuned(plain, (tmp_path / "interpreter.json").read_text("utf-8"))
    shapes = {(shape.kind, shape.rows) for shape in found.tuned}
    assert shapes == {("one", 16), ("tile", 16), ("tile", 128)}
    assert {launch.block_n for launch in found.tuned.values()} <= {32, 64}
    assert found.programs == plain.programs


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")
def test_what_is_found_is_stored_before_the_rest_is_tried(
    speed: ModuleType, tmp_path: Path
) -> None:
    settings = pytest.importorskip("bros.kernels.triton.settings")
    tune = importlib.import_module("gpu_tune")
    timer = module("timing").Timer(torch.device("cpu"), repeats=1, budget_s=0.01)
    lines = tune.tune(module("model").SMALL, timer, tmp_path)
    next(lines)
    [file] = tmp_path.iterdir()
    plain = settings.settings_for(torch.device("cpu"))
    assert len(settings.with_tuned(plain, file.read_text("utf-8")).tuned) == 1


def test_of_launches_those_count_that_run_on_all_workloads_until_the_time_is_up(
    speed: ModuleType,
) -> None:
    tune = importlib.import_module("gpu_tune")
    milliseconds = {"a": (4.0, 1.0), "b": (3.0, None), "c": (1.0, 1.0), "d": (0.1, 0.1)}

    class Work:
        def __init__(self, index: int) -> None:
            self.index = index

        def with_settings(self, option: str) -> Any:
            found = milliseconds[option][self.index]
            if found is None:
                raise RuntimeError("too much shared memory")
            return found

    class Times:
        @staticmethod
        def on_device(run: float, *, recorded: bool) -> Any:
            assert recorded
            return module("timing").Timing(run, run, run)

    options = {name: name for name in milliseconds}
    times = tune.measured([Work(0), Work(1)], options, Times(), float("inf"))
    assert times == pytest.approx({"a": 2.0, "c": 1.0, "d": 0.1})
    late = tune.measured([Work(0), Work(1)], options, Times(), -1.0)
    assert late == pytest.approx({"a": 2.0}), "the first is what was there before"


def test_torch_computes_a_product_only_if_it_is_faster_beyond_the_limit(speed: ModuleType) -> None:
    settings = pytest.importorskip("bros.kernels.triton.settings")
    tune = importlib.import_module("gpu_tune")
    slow, fast = (settings.ProductLaunch(32, 128, 2, stages) for stages in (2, 4))
    gain = tune.LEAST_GAIN
    for torch_s, chosen in ((0.9, fast), (gain * 0.8, fast), (gain * 0.8 - 0.001, None)):
        assert tune.chosen_product({None: torch_s, slow: 1.0, fast: 0.8}) == chosen
    assert tune.chosen_product({None: 1.0}) is None


def test_no_launch_is_tried_that_needs_more_shared_memory_than_there_is(speed: ModuleType) -> None:
    """As the compiler lays it out: 294,912 bytes for the largest of these."""
    settings = pytest.importorskip("bros.kernels.triton.settings")
    tune = importlib.import_module("gpu_tune")
    shape = settings.Shape("tile", 2, 128, 128)
    h200 = settings.TritonSettings("NVIDIA H200", 132, 9)
    tried = list(tune._candidates(shape, h200.default(shape), True))
    assert (
        settings.LaunchConfig(128, 128, 8, 3) in tried
        and settings.LaunchConfig(128, 64, 8, 4) in tried
    )
    assert not [launch for launch in tried if launch.block_n == 128 and launch.stages == 4]


def test_parts_can_be_chosen_and_a_wrong_one_is_named(
    speed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        speed.main(["--parts", "decode,prefil"])
    assert "'prefil' is not one of decode, layer, prefill," in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so(speed: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert speed.main([]) == 1
    assert capsys.readouterr().out.startswith("no CUDA device")


def test_what_is_asked_for_is_shown_with_verdicts(
    speed: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        line(measured=2.0, share=0.9, asked=(">=", 0.8)),
        line(measured=4.0, share=1.5, asked=("<=", 1.02)),
        line(skipped="not installed"),
        line(measured=1.0),
    ]
    ceilings = module("timing").Ceilings(copy=1.0, matmul=1.0, to_host=1.0, to_device=1.0)
    speed._show({"device": "cpu"}, ceilings, lines, judged=True)
    out = capsys.readouterr().out.splitlines()
    assert out[2].endswith(">= 0.8     met") and out[3].endswith("<= 1.02  MISSED")
    assert "not installed" in out[4]
    assert out[6:] == ["1 of 2 targets are met", "missed: decode, 1 x 2"]


def test_a_part_that_fails_does_not_end_the_others(speed: ModuleType) -> None:
    said: list[str] = []
    saved: list[int] = []
    report = module("timing").Report(lambda lines: saved.append(len(lines)), said.append)

    def broken() -> Iterator[Any]:
        yield line(measured=1.0)
        raise ZeroDivisionError("no time")

    report.run("decode", broken)
    report.run("prefill", lambda: iter([line(measured=2.0)]))
    assert saved == [1, 2, 3]
    assert report.lines[1].skipped == "ZeroDivisionError: no time"
    assert report.lines[2].measured == 2.0


@pytest.mark.parametrize(
    ("share", "asked", "met"),
    [
        (0.8, (">=", 0.8), True),
        (0.79, (">=", 0.8), False),
        (1.02, ("<=", 1.02), True),
        (1.03, ("<=", 1.02), False),
        (0.5, None, None),
        (None, (">=", 0.8), None),
    ],
)
def test_what_was_asked_is_judged(
    speed: ModuleType, share: float | None, asked: tuple[str, float] | None, met: bool | None
) -> None:
    assert line(share=share, asked=asked).met is met
    assert line(share=share, asked=asked).as_json().get("met") is met


def test_a_floor_is_the_larger_of_bytes_and_operations(speed: ModuleType) -> None:
    ceilings = module("timing").Ceilings(copy=100.0, matmul=1000.0, to_host=1.0, to_device=1.0)
    assert ceilings.floor_s(200.0, 1000.0) == 2.0
    assert ceilings.floor_s(200.0, 4000.0) == 4.0


def test_timing_is_the_median_with_quartiles(speed: ModuleType) -> None:
    timing = module("timing").Timing.of([9.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.low, timing.median, timing.high) == (2.0, 3.0, 4.0)


class Queue:
    """torch with a device on which a host that launches slowly has an effect on what events tell.

    Seconds: host and device each have a clock of their own; work begins when it is launched and
    all before it is done.
    """

    def __init__(self, records: bool) -> None:
        self.host = self.device = 0.0
        self.recording: float | None = None
        self.cuda, self.records = self, records

    def work(self, launching: float, running: float) -> None:
        self.host += launching
        if self.recording is None:
            self.device = max(self.device, self.host) + running
        elif self.records:
            self.recording += running
        else:
            raise RuntimeError("operation not permitted when stream is capturing")

    def perf_counter(self) -> float:
        return self.host

    def synchronize(self, _: object) -> None:
        self.host = max(self.host, self.device)

    def _sleep(self, cycles: int) -> None:
        self.device = max(self.device, self.host) + cycles / module("timing").CYCLES_PER_S

    def Stream(self, _: object) -> Any:
        return SimpleNamespace(wait_stream=lambda stream: None)

    def current_stream(self, _: object) -> None:
        return None

    def stream(self, _: object) -> Any:
        return nullcontext()

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(seconds=0.0)

        def begin(capture_error_mode: str) -> None:
            self.recording = 0.0

        def end() -> None:
            assert self.recording is not None
            graph.seconds, self.recording = self.recording, None

        graph.capture_begin, graph.capture_end = begin, end
        graph.replay = lambda: self.work(1e-5, graph.seconds)
        return graph

    def Event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace()

        def record() -> None:
            event.at = max(self.device, self.host)

        event.record = record
        event.elapsed_time = lambda after: 1e3 * (after.at - event.at)
        return event


@pytest.mark.parametrize(("recorded", "records"), [(False, True), (True, True), (True, False)])
def test_what_the_host_needs_to_launch_is_no_time_of_the_device(
    speed: ModuleType, monkeypatch: pytest.MonkeyPatch, recorded: bool, records: bool
) -> None:
    timing, queue = module("timing"), Queue(records)
    monkeypatch.setattr(timing, "torch", queue)
    monkeypatch.setattr(timing.time, "perf_counter", queue.perf_counter)
    timer = timing.Timer(torch.device("cuda"), repeats=20, budget_s=1.0)
    runs = [lambda i: queue.work(1e-4, 1e-5), lambda i: queue.work(1e-4, 4e-3)]
    small, large = timer.alternating(runs, recorded=recorded)
    assert (small.median, large.median) == pytest.approx((1e-5, 4e-3), rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_on_a_gpu_a_slow_host_does_not_count(speed: ModuleType, recorded: bool) -> None:
    timer = module("timing").Timer(torch.device("cuda"), repeats=10, budget_s=1.0)
    numbers = torch.zeros(16, device="cuda")
    calls = 0

    def slow(_: int) -> None:
        nonlocal calls
        calls += 1
        sum(range(100_000))  # a millisecond or more
        numbers.add_(1)

    assert timer.on_device(slow, recorded=recorded).median < 2e-4
    replays = int(numbers[0].item())
    assert replays >= calls > 0 if recorded else replays == calls


def test_sizes_of_llama_3_8b(speed: ModuleType) -> None:
    """8.03 billion parameters, of which 0.53 are the embedding; 128 KiB of KV per token."""
    names = module("model")
    spec = names.ModelSpec.from_config(names.REAL.model)
    model = object.__new__(names.Model)
    model.spec, model.device = spec, torch.device("cuda")
    assert model.layer_weights + model.head_weights == pytest.approx(7.50e9, rel=1e-3)
    cache = torch.empty(1, dtype=torch.bfloat16)

    class Runner:
        class _kv:
            layers = [(cache, cache)] * spec.num_layers

    model.runner = Runner
    assert model.kv_token_bytes == 128 * 1024
    decode = model.bytes_of([4096] * 32, 32)
    assert decode == pytest.approx(15.0e9 + 32 * 4096 * 131072, rel=0.01)
    assert model.flops_of([0], [4096]) == pytest.approx(2 * 6.98e9 * 4096 + 4.4e12, rel=0.02)


def blocks_read(plan: StepPlan) -> list[list[tuple[int, int, int]]]:
    flat = [list(chunk.segments) for chunk in plan.chunks]
    return [list(zip(*(each[i::3] for i in range(3)), strict=True)) for each in flat]


@pytest.mark.parametrize(("rows", "context"), [(1, 32), (4, 50), (4, 1)])
def test_plans_read_and_write_what_they_should(model: Any, rows: int, context: int) -> None:
    plan = model.decode_plan(rows, context)
    segments = blocks_read(plan)
    assert [sum(hi - lo for _, lo, hi in row) for row in segments] == [context] * rows
    blocks = [block for row in segments for block, _, _ in row]
    assert len(set(blocks)) == len(blocks) and max(blocks) < model.sizes.kv_blocks
    written = [slot for chunk in plan.chunks for slot in chunk.slots]
    assert len(set(written)) == rows
    assert not {slot // 16 for slot in written} & set(blocks)


def test_rows_with_more_blocks_than_there_are_read_some_twice(model: Any) -> None:
    plan = model.decode_plan(4, 40 * 16)
    blocks = [block for row in blocks_read(plan) for block, _, _ in row]
    assert len(blocks) == 160 > model.sizes.kv_blocks
    counts = sorted(map(blocks.count, set(blocks)))
    assert counts[0] >= 1 and counts[-1] == 2


@pytest.mark.parametrize("rows", [1, 3])
def test_the_operations_of_a_step_are_all_that_it_computes_and_reads(
    model: Any, speed: ModuleType, rows: int
) -> None:
    context = 40
    operations = module("layer").operations(model, rows, context)
    products = [each for each in operations if each.flops]
    weights = model.layer_weights + model.head_weights
    assert sum(each.times * each.flops for each in products) == 2 * rows * weights
    whole = model.bytes_of([context] * rows, rows)
    assert sum(each.times * each.bytes for each in operations) == pytest.approx(whole, rel=0.5)
    assert sum(each.times * each.bytes for each in operations) > 4 * weights
    before = [[cache.clone() for cache in layer] for layer in model.layers]
    for operation in operations:
        operation.run(0)
        operation.run(len(model.layers))  # the first layer again
    changed = [
        [not torch.equal(new, old) for new, old in zip(layer, kept, strict=True)]
        for layer, kept in zip(model.layers, before, strict=True)
    ]
    assert changed[0] == [True, True] and not any(map(any, changed[1:]))


def test_a_runner_is_switched_for_a_block_only(model: Any) -> None:
    before = model.runner._graphs
    with model.without_graphs():
        assert not model.has_graphs
    assert model.runner._graphs is before
