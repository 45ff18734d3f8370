"""The examples run: against a server, and two of them with a model in their own process."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.program_engine import ProgramEngine, echo
from support.program_server import ProgramServer, program_server
from support.tier import by_tier

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent
MODEL = "SmolLM2-135M-Instruct"
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.stem != "common")
CALLS = {  # example -> (calls in its session, of which are the model's)
    "chain_summary.py": (6, 6),
    "map_reduce_summary.py": (9, 9),
    "multi_agent_coding.py": (16, 15),
    "shared_system_prompt.py": (7, 7),
    "mixed_chat_map_reduce.py": (13, 13),
    "langchain_chain.py": (3, 3),
}


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environ = {"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(Path.home())}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def server() -> Iterator[ProgramServer]:
    engine = ProgramEngine(step_s=0.0001)
    # Its tokens are bytes, or nearly so, and some of the prompts are long.
    engine.info = dataclasses.replace(engine.info, model=MODEL, max_model_len=20_000)
    with program_server(engine) as server:
        yield server


def test_every_example_is_tried() -> None:
    assert set(EXAMPLES) == {*CALLS, "snake_game.py", "tree_search.py"}


@pytest.mark.parametrize(
    "name", by_tier(fast=["tree_search.py"], long=["multi_agent_coding.py", "tree_search.py"])
)
def test_help_is_short(name: str) -> None:
    assert len(run(name, "--help").splitlines()) < 20


@pytest.mark.parametrize("name", CALLS)
def test_example_makes_its_calls_in_one_session(name: str, server: ProgramServer) -> None:
    calls, turns = CALLS[name]
    assert f"\n{calls} calls:\n" in run(name, "--url", server.url)
    assert len(server.engine.llm_calls()) == turns


def test_the_papers_example_gives_code_and_test(server: ProgramServer) -> None:
    code = echo("You are an expert software engineer.\nWrite python code of a snake game.\nCode: ")
    test = echo(
        "You are an experienced QA engineer.\nYou write test code for a snake game.\n"
        f"Code: {code}.\nYour test code: "
    )
    printed = run("snake_game.py", "--url", server.url)
    assert [line for line in printed.splitlines() if line.startswith("<")] == [code, test]


def test_the_python_examples_of_the_manual_run_in_its_order(
    server: ProgramServer, tmp_path: Path
) -> None:
    manual = (ROOT / "docs" / "semantic.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", manual, re.MULTILINE | re.DOTALL)
    script = tmp_path / "manual.py"
    served = "\n".join(block for block in blocks if "LLM()" not in block)  # that needs a model
    script.write_text(served.replace("http://localhost:8000", server.url), encoding="utf-8")
    printed = run(str(script)).splitlines()
    values = [line for line in printed if line.startswith("<")]
    assert len(values) == 7 and len(set(values)) == 7
    (view,) = [line for line in printed if line.startswith("review ")]
    reason = "alone before reason in the same call: all after it waits for it"
    assert view.endswith(f" rt {reason}")


@pytest.mark.long
def test_an_engine_in_the_process_of_the_example() -> None:
    printed = run("chain_summary.py", "--chapters", "2")
    assert "\n2 calls:\n" in printed
    assert "class rt     stage 1" in printed and "class rt     stage 0" in printed


@pytest.mark.long
def test_branches_of_a_search_find_their_common_beginning_in_the_cache() -> None:
    steps = re.findall(
        r"step \d: (\d) branches, (\d+) of (\d+) tokens cached",
        run("tree_search.py", "--steps", "2"),
    )
    branches, cached, prompts = zip(*(map(int, step) for step in steps), strict=True)
    assert branches == (3, 6)
    assert all(found > before / 2 for found, before in zip(cached, prompts, strict=True))
