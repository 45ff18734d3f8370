"""Engine processes that start before the server knows what they load."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bros.core.errors import ConfigError, EngineDeadError
from bros.executor.model_store import ModelFiles
from bros.transport.engine_start import EngineProcess
from bros.transport.process_client import ProcessEngineClient
from support.process_engine import TINY_ENGINE, ask, tokens_of
from support.processes import exists
from support.server_process import wait_until

pytestmark = [
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def started_early(*program: str) -> EngineProcess:
    """Returns when the process has found no launch.json: it ignores SIGTERM from then on."""
    process = EngineProcess(*program)
    process.start()
    status = Path(f"/proc/{process.pid}/status")

    def ignores_stops() -> bool:
        found = re.search(r"SigIgn:\s+(\w+)", status.read_text())
        assert found
        return bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_until(ignores_stops, 60.0, "the process waits for its launch")
    return process


def test_files_of_the_working_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "queue.py").write_text("raise SystemExit(3)")
    process = started_early()
    assert exists(process.pid)
    process.discard()


def test_the_folder_of_a_server_that_was_killed_is_removed_by_the_next_one() -> None:
    """But none of a server that lives."""
    program = "from bros.transport.engine_start import EngineProcess as E; e = E(); print(e.folder)"
    command = [sys.executable, "-c", f"{program}; print(flush=True); input()"]
    servers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = []
    for server in servers:
        assert server.stdout is not None
        folders.append(Path(server.stdout.readline().strip()))
    killed, living = servers
    killed.kill()
    killed.communicate()
    with EngineProcess() as own:
        assert [folder.exists() for folder in (*folders, own.folder)] == [False, True, True]
    living.communicate("\n")
    assert not folders[1].exists() and not own.folder.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="machines have an id on Linux only")
def test_no_folder_is_removed_where_the_machine_has_no_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be one of several sandboxes that share the folder, but not their locks."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = tmp_path / "bros-other"
    other.mkdir()
    (other / "owner").touch()

    def no_id(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", no_id)
    with EngineProcess() as own:
        assert other.exists()
        assert [path.name for path in own.folder.iterdir()] == ["owner.new"]


def test_a_folder_for_sockets_with_a_long_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()
    with pytest.raises(ConfigError, match="TMPDIR: .* is too long"):
        EngineProcess()
    assert not list((tmp_path / ("x" * 100)).iterdir())


@pytest.mark.asyncio
async def test_the_first_process_was_started_early_and_later_ones_are_new(
    files: ModelFiles,
) -> None:
    first = started_early()
    pid, folder = first.pid, first.folder
    client = ProcessEngineClient(TINY_ENGINE, files, log_level="error", first=first)
    await client.start()
    assert client.pid == pid
    tokens = await tokens_of(client, ask("first"))
    assert len(tokens) == 8
    async with asyncio.timeout(60):
        await client.restart()
    assert client.pid != pid and not exists(pid) and not folder.exists()
    assert await tokens_of(client, ask("second")) == tokens
    await client.close()
    first.discard()  # as the command line does at the end; it has ended already


def test_a_process_that_is_never_launched_ends_with_its_server() -> None:
    """However it ends: by `discard`, or so that the process only sees that its stdin is closed."""
    for how in ("discard", "close"):
        process = started_early()
        pid, folder = process.pid, process.folder
        assert exists(pid) and folder.exists()
        getattr(process, how)()
        wait_until(lambda pid=pid: not exists(pid), 60.0, f"the process ends after {how}")
        assert not folder.exists()
        process.discard()


@pytest.mark.asyncio
async def test_an_early_process_that_died_is_a_failed_start(files: ModelFiles) -> None:
    first = started_early()
    os.kill(first.pid, signal.SIGKILL)
    assert await first.wait() == -signal.SIGKILL
    deaths: list[str] = []
    client = ProcessEngineClient(
        TINY_ENGINE, files, log_level="critical", first=first, on_final_death=deaths.append
    )
    with pytest.raises(EngineDeadError, match="ended unexpectedly"):
        await client.start()
    assert len(deaths) == 1 and "ended unexpectedly" in deaths[0]


@pytest.mark.asyncio
async def test_an_early_process_that_cannot_import_says_so_once_it_may(
    files: ModelFiles, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "sys.modules['bros.engine.group'] = None\n"
        "from bros.transport.process import main\n"
        "sys.exit(main())\n"
    )
    first = started_early(sys.executable, str(program))
    client = ProcessEngineClient(TINY_ENGINE, files, log_level="critical", first=first)
    with pytest.raises(EngineDeadError, match="bros.engine.group"):
        await client.start()
