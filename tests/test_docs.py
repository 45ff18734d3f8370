"""Documents name files that exist: a path that was moved has to be moved there, too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
HISTORY = ROOT / "docs" / "decisions"  # decisions name files as they were
CODE = ("bros", "csrc", "tests", "benchmarks")
FILES = [path.relative_to(ROOT).as_posix() for name in CODE for path in (ROOT / name).rglob("*.*")]
PATH = re.compile(r"`((?:[\w.]+/)+[\w.]+\.(?:py|h|cu|cpp|sh))`")


@pytest.mark.parametrize(
    "document",
    [path for path in DOCUMENTS if HISTORY not in path.parents],
    ids=lambda path: path.name,
)
def test_paths_in_a_document_exist(document: Path) -> None:
    """Relative to the root or to any package, as `policies/base.py` in a section on scheduling."""
    named = set(PATH.findall(document.read_text(encoding="utf-8")))
    missing = {path for path in named if not any(f"/{file}".endswith(f"/{path}") for file in FILES)}
    assert not missing


def test_a_path_that_does_not_exist_would_be_found() -> None:
    assert PATH.findall("see `scheduler/packing.py` and `a.py`") == ["scheduler/packing.py"]
