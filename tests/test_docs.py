"""Documents name files and classes that exist: a rename in the code has to reach them, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = ("bros", "csrc", "tests", "benchmarks")
FILES = [path.relative_to(ROOT).as_posix() for name in CODE for path in (ROOT / name).rglob("*.*")]
PATH = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|h|cu|cpp|sh))`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_in_a_document_exist(document: Path) -> None:
    """Relative to the root or to any package, as `policies/base.py` in a section on scheduling."""
    named = set(PATH.findall(document.read_text(encoding="utf-8")))
    missing = {path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in FILES)}
    assert not missing


def test_a_path_that_does_not_exist_would_be_found() -> None:
    assert PATH.findall("see `scheduler/packing.py` and `a.py`") == ["scheduler/packing.py"]


def test_the_glossary_names_what_the_code_defines() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    cells = [row.split("|")[3] for row in text.splitlines() if row.startswith("| ")]
    dotted = " ".join(name for cell in cells for name in re.findall(r"`([\w.]+)`", cell))
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "bros").rglob("*.py"))
    found = re.findall(r"^ *(?:(?:class|def) (\w+)|(\w+)(?:: | = ))", source, re.MULTILINE)
    named = set(dotted.replace(".", " ").split())
    defined = {name for pair in found for name in pair}
    assert len(named) > 30
    assert named <= defined
