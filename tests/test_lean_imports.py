"""What runs a model needs few libraries: GPU machines often have no others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parent.parent
SERVER = "zmq msgspec pydantic pydantic_core starlette uvicorn aiohttp sqlalchemy alembic multipart"
OTHERS = "anyio prometheus_client matplotlib gguf openai psycopg"
CLIENTS = "rich httpx transformers"  # transformers itself needs the other two

HIDE = """
import sys

class Hide:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return None
        return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = map(Hide, sys.meta_path)
"""


def run_without(names: str, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that behaves as if the libraries `names` were not installed."""
    program = f"NAMES = set({names!r}.split())\n{HIDE}\n{textwrap.dedent(code)}"
    # Other tests have Triton interpreted, which takes seconds.
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environ)


def output_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lean") / "tiny"
    save_tiny_llama(folder, vocab_size=1000)
    return save_tokenizer(folder)


def test_hidden_means_hidden() -> None:
    done = run_without("msgspec", "import msgspec.json")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'msgspec'" in done.stderr


def test_the_engine_in_this_process_generates(model: Path) -> None:
    code = """
        from bros import LLM, SamplingParams
        import bros.engine.build, bros.engine.engine, bros.engine.thread_client
        import bros.transport.local
        import bros.executor.loader, bros.executor.runner, bros.kernels.dispatch, bros.simulator

        with LLM(sys.argv[1], kv_blocks=32, threads=1) as llm:
            params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
            for answer in llm.generate(["one", "two"], params):
                print(len(answer[0].token_ids))
        """
    assert output_of(run_without(f"{SERVER} {OTHERS} {CLIENTS}", code, str(model))) == ["5", "5"]


def test_programs_can_be_written_without_any_library() -> None:
    """Whatever is needed to run them comes when they are."""
    code = """
        import bros.semantic as P

        @P.semantic_function(sampling={"max_tokens": 5})
        def write(task: P.SemanticVariable):
            "Write {{input:task}}. Code: {{output:code}}"

        print(write(write("a game")).value)
        """
    computing = "torch numpy tokenizers jinja2 safetensors regex yaml"
    assert output_of(run_without(f"{SERVER} {OTHERS} {CLIENTS} {computing}", code)) == ["None"]


@pytest.mark.slow
def test_commands_that_measure_run(model: Path, tmp_path: Path) -> None:
    code = "from bros.cli.main import main; sys.exit(main(sys.argv[1:], {}))"
    arguments = ["profile", str(model), "--out", str(tmp_path), "--repeats", "1", "--threads", "1"]
    small = ["--kv-blocks", "40", "--max-num-seqs", "4", "--max-model-len", "128"]
    lines = output_of(run_without(f"{SERVER} {OTHERS} {CLIENTS}", code, *arguments, *small))
    assert any("No module named 'matplotlib'" in line for line in lines)
    assert [line for line in lines if line.startswith(("fitted to ", "held out "))]
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_the_doctor_looks_and_tests_in_plain_text() -> None:
    code = "from bros.cli.main import main; sys.exit(main(['doctor', '--device', 'cpu'], {}))"
    lines = output_of(run_without(f"{SERVER} {OTHERS} {CLIENTS}", code))
    assert lines[-1] == "Everything that is in use works."
    assert any(line.startswith("reference") for line in lines)


@pytest.mark.long
@pytest.mark.slow
def test_tests_of_what_computes_can_be_collected() -> None:
    """Also without the plugin for coroutines, whose options pytest would not know; and without one
    that comes with LangChain, and needs more."""
    code = """
        import pytest
        sys.exit(pytest.main(sys.argv[1:]))
        """
    folders = ["kernels", "executor", "scheduler", "kvcache", "core", "engine"]
    plugins = [f"-pno:{name}" for name in ("cacheprovider", "asyncio", "langsmith_plugin")]
    arguments = ["--collect-only", "-q", *plugins]
    lines = output_of(
        run_without(f"{SERVER} {OTHERS}", code, *arguments, *(f"tests/{name}" for name in folders))
    )
    assert "tests collected" in lines[-1]
