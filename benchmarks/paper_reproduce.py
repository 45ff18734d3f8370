"""Reproduces figures 10 to 14 of the BROS paper.

    python benchmarks/paper_reproduce.py [--parts LIST] [--quick] [--jobs 2] [--out FOLDER]

Parts are measured one after the other. Each stores its results in FOLDER as JSON and rewrites the
page paper.md, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import paper_report
from paper_common import RESULTS, ROOT, Options, Part, as_text

QUICK_OUT = ROOT / "build" / "paper_quick"


def main() -> None:
    args = _parse()
    options = Options(quick=args.quick, jobs=args.jobs, seed=args.seed)
    folder: Path = args.out or (QUICK_OUT if args.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    for part in args.parts:
        takes = "" if args.quick else f" (about {part.takes})"
        print(f"Figure {part.figures}: part {part.name}{takes}", flush=True)
        began = time.perf_counter()
        part.path(folder).write_text(as_text(part.run(options)))
        print(f"saved {part.path(folder)} after {time.perf_counter() - began:.0f} s", flush=True)
        paper_report.write(folder)


def _parse() -> argparse.Namespace:
    parts = {part.name: part for part in paper_report.PARTS}
    takes = "; ".join(
        f"{part.name} (figure {part.figures}): {part.takes}" for part in parts.values()
    )

    def some(text: str) -> Sequence[Part]:
        names = [name.strip() for name in text.split(",")]
        unknown = [name for name in names if name not in parts]
        if unknown:
            raise argparse.ArgumentTypeError(f"no {unknown[0]!r}, there are {', '.join(parts)}")
        return [parts[name] for name in names]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], epilog=takes)
    parser.add_argument(
        "--parts", type=some, default=list(parts.values()), metavar="LIST",
        help=f"comma-separated, of {', '.join(parts)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--quick", action="store_true",
        help="one model and short runs: only tests the program",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="parallel simulations")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out", type=Path,
        help="folder for results (default: benchmarks/results, with --quick build/paper_quick)",
    )  # fmt: skip
    return parser.parse_args()


if __name__ == "__main__":
    main()
