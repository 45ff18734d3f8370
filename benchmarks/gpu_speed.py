"""How close bros comes to the limits of the device, on the shape of Llama-3-8B in bf16.

    python benchmarks/gpu_speed.py [--parts decode,prefill] [--json FILE]
    python benchmarks/gpu_speed.py --quick      only tests the program, anywhere

Weights are random, so nothing is downloaded. The limits of the device are measured first, in the
same run: a large copy, a large product of random bf16 matrices, pinned copies over the bus. Times
are medians. The floor of a time is the larger of its bytes over the copy's rate and its operations
over the product's rate. Run nothing else on the device.

    decode     decode steps: pipelined as in the engine (each is launched while the previous one
               runs), one at a time, and without CUDA graphs
    layer      the operations of a decode step, one by one
    prefill    one prompt in one step
    mixed      a chunk of a prompt beside decode rows, and the host's time to launch such a step
    attention  the kernel alone
    layout     blocks with two owners against blocks with one
    shared     a prefix shared by all rows, read once or by each row
    sampling   greedy, top-k and top-p; the kernel alone
    copies     KV to the host and back, also concurrent with steps
    overhead   the overhead of the engine per step
    peers      attention by torch and xformers, steps by transformers
    tune       (only on request) finds tile sizes for this device and stores them
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import gpu_layer
import gpu_parts
import gpu_peers
import torch
from gpu_model import REAL, SMALL, Bench, Model, Sizes
from gpu_timing import Ceilings, Line, Report, Timer, measure_ceilings

from bros.terminal import plain_table

PARTS = {
    "decode": gpu_parts.decode,
    "layer": gpu_layer.layer,
    "prefill": gpu_parts.prefill,
    "mixed": gpu_parts.mixed,
    "attention": gpu_parts.attention,
    "layout": gpu_parts.layout,
    "shared": gpu_parts.shared,
    "sampling": gpu_parts.sampling,
    "copies": gpu_parts.copies,
    "overhead": gpu_parts.overhead,
}
OTHERS = ("peers", "tune")
PACKAGES = ("torch", "triton", "cupy-cuda13x", "transformers", "xformers", "numpy")
ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Returns 1 if there is not the device that this needs, else 0."""
    args = _arguments(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; --quick only tests the program, on the CPU")
        return 1
    if args.device == "cpu" and "tune" in args.parts:
        print("part tune needs a CUDA device")
        return 1
    device = torch.device(args.device)
    sizes = SMALL if args.quick else REAL
    timer = Timer(device, args.repeats, args.budget)
    began = time.perf_counter()
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode():
        ceilings = measure_ceilings(timer, dtype, args.quick)
        environment = _environment(device, args.commit)

        def save(lines: list[Line]) -> None:
            if args.json is not None:
                seconds = time.perf_counter() - began
                _write(args.json, environment, ceilings, lines, seconds, args.quick)

        report = Report(save, lambda text: print(text, flush=True))
        _measure(report, args.parts, sizes, timer, ceilings, args.kernels, args.tuned)
    _show(environment, ceilings, report.lines, judged=not args.quick)
    return 0


def _measure(
    report: Report,
    parts: Sequence[str],
    sizes: Sizes,
    timer: Timer,
    ceilings: Ceilings,
    kernels: str,
    tuned: Path | None,
) -> None:
    if "tune" in parts:
        report.run("tune", lambda: _tune(sizes, timer, tuned))
    if {*PARTS, "peers"} & set(parts):
        bench = Bench(Model(sizes, timer.device, kernels), timer, ceilings)
        for name, part in PARTS.items():
            if name in parts:
                report.run(name, lambda part=part: part(bench))
        if "peers" in parts:
            report.run("peers", lambda: gpu_peers.attention(bench))
        bench.model.runner.close()
        del bench
        gc.collect()
        if timer.on_cuda:
            torch.cuda.empty_cache()
    if "peers" in parts:
        report.run("peers", lambda: gpu_peers.continuous_batching(sizes, timer, ceilings))


def _tune(sizes: Sizes, timer: Timer, folder: Path | None) -> Iterator[Line]:
    # Lazy: it needs Triton.
    from gpu_tune import tune

    quick = dataclasses.replace(timer, repeats=min(timer.repeats, 9), budget_s=0.1)
    return tune(sizes, quick, folder)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", type=_parts, default=[*PARTS, "peers"], metavar="A,B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--kernels", default="auto", help="as for bros serve")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="only test the program: a tiny model, few and short repeats, on the CPU if there is "
        "no CUDA device",
    )
    parser.add_argument("--repeats", type=int, default=30, help="maximum repeats of a measurement")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per measurement")
    parser.add_argument("--tuned", type=Path, help="output folder of part tune; see gpu_tune.py")
    parser.add_argument("--json", type=Path, help="where to save the figures")
    parser.add_argument("--commit", help="commit to record if there is no git")
    args = parser.parse_args(argv)
    if args.quick:
        args.repeats, args.budget = min(3, args.repeats), min(0.01, args.budget)
        args.device = args.device if torch.cuda.is_available() else "cpu"
    return args


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in (*PARTS, *OTHERS):
            known = ", ".join((*PARTS, *OTHERS))
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {known}")
    return names


def _environment(device: torch.device, commit: str | None) -> dict[str, object]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "packages": versions,
        "commit": commit or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "unix_time": int(time.time()),
    }


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _write(
    path: Path,
    environment: dict[str, object],
    ceilings: Ceilings,
    lines: list[Line],
    seconds: float,
    tiny: bool,
) -> None:
    content = {
        "environment": environment,
        "tiny": tiny,
        "seconds": round(seconds, 1),
        "ceilings_per_second": dataclasses.asdict(ceilings),
        "lines": [line.as_json() for line in lines],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _show(
    environment: dict[str, object], ceilings: Ceilings, lines: list[Line], judged: bool
) -> None:
    """judged: with targets, and whether they are met."""
    title = (
        f"{environment['device']}: copy {ceilings.copy / 1e12:.2f} TB/s, "
        f"bf16 product {ceilings.matmul / 1e12:.0f} TFLOP/s, to host "
        f"{ceilings.to_host / 1e9:.0f} GB/s, to device {ceilings.to_device / 1e9:.0f} GB/s"
    )
    headings: tuple[str, ...] = ("", "", "measured", "floor", "")
    rows = [_cells(line) for line in lines]
    if not judged:
        print(plain_table(title, headings, rows, left=2))
        print("test of the program only: the times are meaningless")
        return
    rows = [(*row, *_verdict(line)) for row, line in zip(rows, lines, strict=True)]
    print(plain_table(title, (*headings, "target", ""), rows, left=2))
    asked = [line for line in lines if line.met is not None]
    missed = [f"{line.part}, {line.name}" for line in asked if not line.met]
    print(f"{len(asked) - len(missed)} of {len(asked)} targets are met")
    for name in missed:
        print(f"missed: {name}")


def _cells(line: Line) -> tuple[str, ...]:
    if line.skipped is not None:
        return (line.part, line.name, "-", "", line.skipped)
    return (
        line.part,
        line.name,
        f"{_number(line.measured)} {line.unit}",
        _number(line.floor),
        " ".join(filter(None, (_number(line.share), line.share_of))),
    )


def _verdict(line: Line) -> tuple[str, str]:
    return (
        "" if line.asked is None else f"{line.asked[0]} {line.asked[1]:g}",
        "" if line.met is None else "met" if line.met else "MISSED",
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    raise SystemExit(main())
