"""The command line without an engine: what is parsed, what is refused, what is imported."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from bros import __version__
from bros.cli.main import main
from bros.core.config import Config
from bros.core.errors import ConfigError, EngineDeadError, ModelError
from bros.transport import engine_start
from bros.transport.engine_start import EngineProcess
from support.processes import children, exists

Serve = Callable[[Config], int]


class FakeBuild(types.ModuleType):
    """Stands for bros.server.build."""

    def __init__(self) -> None:
        super().__init__("bros.server.build")
        self.configs: list[Config] = []
        self.messages: list[list[dict[str, str]]] = []
        self.failure: BaseException | None = None
        self.status = 0
        self.is_rank = False
        self.first: FakeProcess | None = None

    def serve(
        self, config: Config, *, is_rank: bool = False, first: FakeProcess | None = None
    ) -> int:
        self.configs.append(config)
        self.is_rank = is_rank
        self.first = first
        assert first is None or first.runs
        if self.failure is not None:
            raise self.failure
        return self.status

    @contextlib.asynccontextmanager
    async def local_chat(self, config: Config) -> AsyncIterator[FakeBuild]:
        self.configs.append(config)
        yield self

    async def stream(self, messages: list[dict[str, str]]) -> AsyncIterator[str]:
        self.messages.append(messages)
        yield "fine, "
        yield "thanks"


class FakeProcess:
    """Stands for EngineProcess."""

    def start(self) -> None:
        self.runs = True

    def discard(self) -> None:
        self.runs = False


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> FakeBuild:
    fake = FakeBuild()
    monkeypatch.setitem(sys.modules, "bros.server.build", fake)
    monkeypatch.setattr(engine_start, "EngineProcess", FakeProcess)
    return fake


def run(*arguments: str, **environ: str) -> int:
    return main(arguments, environ)


def test_serve_gets_the_configuration(build: FakeBuild) -> None:
    assert run("serve", "folder/model", "--port", "9000", "--weights=bf16", BROS_SEED="7") == 0
    [config] = build.configs
    assert config.engine.model == "folder/model"
    assert config.engine.weights == "bf16"
    assert config.engine.seed == 7
    assert config.server.port == 9000


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--tp", "2"),
        ("--replicas", "2"),
        ("--min-replicas", "1"),
        ("--max-replicas", "2"),
        ("--cluster", "auto"),
    ],
    ids=" ".join,
)
def test_a_single_engine_is_started_before_the_server_is_imported(
    build: FakeBuild, options: tuple[str, ...]
) -> None:
    build.failure = ConfigError("the port is taken")
    assert run("serve", *options) == 2
    assert (build.first is not None) == (not options)
    assert build.first is None or not build.first.runs


def test_the_server_reports_that_no_process_can_be_started(
    build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tries again; the command line only tries to be early."""

    def refused(self: FakeProcess) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(FakeProcess, "start", refused)
    assert run("serve") == 0
    assert build.configs and build.first is None


@pytest.mark.multiprocess
def test_an_early_process_does_not_outlive_a_server_that_does_not_start(
    build: FakeBuild, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[EngineProcess] = []

    def failing(config: Config, *, is_rank: bool, first: EngineProcess) -> int:
        found.append(first)
        assert exists(first.pid) and first.folder.exists()
        raise ConfigError("the port is taken")

    monkeypatch.setattr(engine_start, "EngineProcess", EngineProcess)
    monkeypatch.setattr(build, "serve", failing)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run("serve") == 2
    assert not exists(found[0].pid) and not found[0].folder.exists()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.multiprocess
@pytest.mark.parametrize("command", ["serve", "chat"])
def test_a_user_without_a_home_folder_is_told_what_to_give(command: str, tmp_path: Path) -> None:
    """As in a container that runs under any user id. No folder is called `~` then."""
    program = (
        "import pwd, sys; pwd.getpwuid = {}.__getitem__\n"
        "from bros.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    done = subprocess.run(
        [sys.executable, "-c", program, command],
        cwd=tmp_path,
        env=environ | {"BROS_PORT": "0", "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch("bros: error: --data-dir: give a folder .*\n", done.stderr)
    assert not list(tmp_path.iterdir())


LOADING = """
import sys, time, types

def serve(config, **_):
    print("loading", flush=True)
    time.sleep(60)

sys.modules["bros.server.build"] = types.SimpleNamespace(serve=serve)
from bros.cli.main import main
sys.exit(main(["serve"]))
"""


@pytest.mark.multiprocess
def test_the_first_process_of_a_container_can_be_ended_while_it_loads(tmp_path: Path) -> None:
    namespace = ["unshare", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"]).returncode:
        pytest.skip("no process ids of its own can be had here")
    command = [*namespace, sys.executable, "-c", LOADING]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout and process.stdout.readline() == "loading\n"
            (first,) = children(process.pid)
            os.kill(first, signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
        finally:
            process.kill()


def test_serve_without_arguments_takes_the_defaults(build: FakeBuild) -> None:
    assert run("serve") == 0
    assert build.configs == [Config()]
    assert not build.is_rank


def test_model_may_stand_behind_the_options(build: FakeBuild) -> None:
    assert run("serve", "--port", "1", "my/model") == 0
    assert run("serve", "--model", "my/model", "--port", "1") == 0
    assert build.configs[0] == build.configs[1]


def test_exit_status_is_that_of_the_server(build: FakeBuild) -> None:
    build.status = 1
    assert run("serve") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--prot", "1"], "--prot: there is no such option; did you mean --port"),
        (["serve", "--prot=1"], "--prot: there is no such option; did you mean --port"),
        (["serve", "--max-num", "1"], "--max-num: there is no such option"),  # no abbreviations
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port"], "argument --port: expected one argument (see bros serve --help)"),
        (["serve", "--port", "x"], "--port: 'x' is not a whole number"),
        (["serve", "--policy", "lifo"], "--policy: 'lifo' is not one of bros, fcfs, priority"),
        (["serve", "a", "--model", "b"], "--model: the model is given twice, as 'a' and as 'b'"),
        (["serve", "--config", "/no.toml"], "--config: /no.toml cannot be read"),
        (
            ["batch", "submit", "f", "--wiat"],
            "--wiat: there is no such option; did you mean --wait",
        ),
        (["batch", "submit"], "arguments are required: FILE (see bros batch submit --help)"),
        (["batch"], "arguments are required: ACTION (see bros batch --help)"),
        (["train"], "invalid choice: 'train' (choose from"),
        (["chat", "--url", "localhost:8000"], "--url: 'localhost:8000' must start with http://"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(
    build: FakeBuild,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bros: error: ") and err.count("\n") == 1
    assert message in err
    assert build.configs == []


def test_wrong_variable_is_refused_and_unknown_one_warned_about(
    build: FakeBuild, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", BROS_PORT="x") == 2
    assert capsys.readouterr().err == "bros: error: BROS_PORT: 'x' is not a whole number\n"
    assert run("serve", BROS_PROT="1") == 0
    assert capsys.readouterr().err.startswith("bros: warning: BROS_PROT is not an option")


@pytest.mark.parametrize("error", [ModelError("no such model"), EngineDeadError("no such model")])
def test_other_errors_are_one_line_and_status_1(
    build: FakeBuild, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    build.failure = error
    assert run("serve") == 1
    assert capsys.readouterr().err == "bros: error: no such model\n"


def test_interruption_is_quiet(build: FakeBuild, capsys: pytest.CaptureFixture[str]) -> None:
    build.failure = KeyboardInterrupt()
    assert run("serve") == 130
    assert capsys.readouterr().err == ""


def test_errors_in_our_own_code_are_not_hidden(build: FakeBuild) -> None:
    build.failure = ZeroDivisionError("a bug")
    with pytest.raises(ZeroDivisionError):
        run("serve")


def test_version_names_what_bros_runs_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("version") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"bros {__version__}"
    assert {line.split()[0] for line in lines[1:]} >= {"python", "torch", "transformers"}


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("serve", "batch", "chat", "version"))


def test_chat_reads_a_pipe_and_answers(
    build: FakeBuild, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("how are you?\n"))
    assert run("chat", "some/model", "--system", "Be kind.") == 0
    assert capsys.readouterr().out == "fine, thanks\n"
    assert build.configs[0].engine.model == "some/model"
    assert build.messages == [
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "how are you?"},
        ]
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "arguments", [["--help"], ["serve", "--help"], ["batch", "submit", "--help"], ["version"]]
)
def test_quick_commands_import_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from bros.cli.main import main\n"
        "try:\n"
        f"    main({arguments!r}, {{}})\n"
        "except SystemExit:\n"
        "    pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'starlette', 'httpx', 'rich', 'asyncio'}\n"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.multiprocess
def test_module_can_be_run() -> None:
    command = [sys.executable, "-m", "bros", "serve", "--port", "x"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "bros: error: --port: 'x' is not a whole number\n"
