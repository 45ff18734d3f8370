"""Renders the page about the BROS paper's figures from stored results: paper.md and its plots.

    python benchmarks/paper_report.py [FOLDER]      (default: benchmarks/results)

The text is in paper_template.md. There `{{part.block}}` stands for a table or a plot of a part,
made from FOLDER/paper_<part>.json; for a part without results the page says how to measure it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import paper_alone
import paper_memory
import paper_overhead
import paper_real
import paper_settings
import paper_tight
from harness import results_folder
from matplotlib.figure import Figure
from paper_common import RESULTS, Part, Rendering, Results

# In the order of the page. For another figure, add a module with a PART.
PARTS = (
    paper_settings.PART,
    paper_alone.PART,
    paper_memory.PART,
    paper_tight.PART,
    paper_overhead.PART,
    paper_real.PART,
)
TEMPLATE = Path(__file__).with_name("paper_template.md")
_OTHER_RESULTS = "> The text speaks of the results in benchmarks/results, these are others.\n\n"
_PLACEHOLDER = re.compile(r"\{\{(\w+)\.(\w+)\}\}")


def measured(folder: Path) -> Iterator[tuple[Part, Results]]:
    """(part, results) of the parts with results in the folder."""
    for part in PARTS:
        if part.path(folder).exists():
            yield part, json.loads(part.path(folder).read_text())


def page(template: str, folder: Path) -> tuple[str, dict[str, Figure]]:
    """(Markdown, file name -> plot). Raises KeyError for an unknown block in the template."""
    texts = {part.name: _how_to_measure(part) for part in PARTS}
    explained: set[str] = set()
    blocks: dict[str, dict[str, str]] = {}
    pictures: dict[str, Figure] = {}
    for part, results in measured(folder):
        rendering = part.render(results)
        blocks[part.name] = {
            "made": _made(results),
            **rendering.blocks,
            **_images(part, rendering),
        }
        for name, (_, figure) in rendering.plots.items():
            pictures[_file_name(part, name)] = figure

    def block(placeholder: re.Match[str]) -> str:
        name, wanted = placeholder.groups()
        if name in blocks:
            return blocks[name][wanted]
        text = "" if name in explained else texts[name]
        explained.add(name)
        return text

    return re.sub(r"\n{3,}", "\n\n", _PLACEHOLDER.sub(block, template)), pictures


def _images(part: Part, rendering: Rendering) -> dict[str, str]:
    return {
        name: f"![{caption}]({_file_name(part, name)})"
        for name, (caption, _) in rendering.plots.items()
    }


def _file_name(part: Part, plot: str) -> str:
    return f"paper_{part.name}_{plot}.png"


def _made(results: Results) -> str:
    """One sentence about the conditions of the measurement."""
    environment = results["environment"]
    text = f"bros {environment['bros']}, commit {(environment['commit'] or 'unknown')[:12]}"
    if "cpu" in environment:
        text += f", Python {environment['python']} on {environment['cores']} cores of "
        text += environment["cpu"]
    text += f"; {results['duration_s']:g} s per run"
    if results["warm_up_s"]:
        text += f", of which the first {results['warm_up_s']:g} s do not count"
    wall_s = results["wall_s"]
    took = f"{wall_s / 60:.0f} minutes" if wall_s >= 120 else f"{wall_s:.0f} s"
    return f"{text}; seed {results['seed']}; {took} in all."


def _how_to_measure(part: Part) -> str:
    command = f'make reproduce-bros ARGS="--parts {part.name}"'
    return f"*Not measured here yet: `{command}` ({part.takes}).*"


def write(folder: Path) -> None:
    """Write the page and its plots into the folder of the results."""
    text, pictures = page(TEMPLATE.read_text(), folder)
    if folder.resolve() != RESULTS:
        text = _OTHER_RESULTS + text
    for name, figure in pictures.items():
        figure.savefig(folder / name)
    (folder / "paper.md").write_text(text)
    print(f"saved {folder / 'paper.md'} and {len(pictures)} pictures beside it")


def main() -> None:
    write(results_folder(__doc__, RESULTS))


if __name__ == "__main__":
    main()
