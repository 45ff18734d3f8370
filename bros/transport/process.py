"""The engine process: `python -m bros.transport.process FOLDER`, started as EngineProcess.

FOLDER has the server's sockets and launch.json (LaunchSpec). A process that was started early
(EngineProcess) finds no launch.json yet, and waits until the server writes a byte to stdin. The
server keeps stdin open; when it closes, the server is gone and this process exits at once.

With several ranks there is one such process per rank, see launcher.py. Rank 0 talks to the server;
another rank only reports why it failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bros.core.clock import SystemClock
from bros.core.collector import Collector
from bros.core.config import EngineConfig
from bros.core.errors import BrosError, RanksLostError
from bros.core.rank_env import torchrun_rank_env
from bros.core.stop_signals import STOP_SIGNALS
from bros.engine.loop import run_engine
from bros.engine.parent import end_with_parent, end_with_server, obey_parent_only
from bros.engine.watchdog import CHECKS_PER_TIMEOUT, Progress, Watchdog
from bros.executor.model_store import ModelFiles
from bros.transport.ipc import ZmqTransport, heartbeats, send_failure

if TYPE_CHECKING:
    from bros.engine.engine import Engine
    from bros.engine.group import Group


HEARTBEATS_PER_TIMEOUT = CHECKS_PER_TIMEOUT
"""Heartbeats that a process sends within the time after which a missing heartbeat is a timeout. An
engine process sends this many per config.hang_timeout, and none if that is 0."""

SHOW_STACKS = signal.SIGUSR1
"""Lets an engine process print the stacks of its threads, also from within a library call."""

_FILE = "launch.json"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What an engine process needs to start; stored in the folder of the sockets.

    profiles: folders of profiles, see build_engine.
    profile_before: see build_engine.
    starts_ranks: with config.tp > 1: bros starts the ranks. Otherwise torchrun has started them,
        and this process is rank 0.
    replica: index among several engines on this machine, each with its own devices; None if there
        is only one.
    """

    model_folder: str
    model_name: str
    log_level: str
    config: EngineConfig
    profiles: tuple[str, ...] = ()
    profile_before: str = ""
    starts_ranks: bool = False
    replica: int | None = None

    @property
    def files(self) -> ModelFiles:
        return ModelFiles(folder=Path(self.model_folder), name=self.model_name)

    @property
    def module(self) -> str:
        """The module to run, with the folder as its argument."""
        return "bros.transport.launcher" if self.starts_ranks else "bros.transport.process"

    def write(self, folder: Path) -> None:
        """Write the folder's file atomically."""
        part = folder / f"{_FILE}.part"
        part.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")
        part.rename(folder / _FILE)

    @classmethod
    def is_in(cls, folder: Path) -> bool:
        return (folder / _FILE).exists()

    @classmethod
    def read(cls, folder: Path) -> LaunchSpec:
        values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        values["config"] = EngineConfig(**values["config"])
        values["profiles"] = tuple(values["profiles"])
        return cls(**values)


logger = logging.getLogger("bros.engine")


def main() -> int:
    folder = Path(sys.argv[1])
    launch = _launch(folder)
    try:
        _run(launch, folder)
        return 0
    except Exception:  # already reported to the server
        return 1


def _launch(folder: Path) -> LaunchSpec:
    """The launch of this process, which from then on ends as the server wants."""
    if LaunchSpec.is_in(folder):
        launch = LaunchSpec.read(folder)
        if launch.starts_ranks:
            obey_parent_only()
            end_with_parent()
        else:
            _leave_end_to_server()
        end_with_server(folder)
        return launch
    # It was started early, and has no ranks.
    _leave_end_to_server()
    begun = end_with_server(folder)
    with contextlib.suppress(Exception):  # `_run` imports the same again, and reports the failure
        import bros.engine.build
        import bros.engine.group  # noqa: F401
    begun.wait()
    return LaunchSpec.read(folder)


def _leave_end_to_server() -> None:
    for number in STOP_SIGNALS:  # they reach the whole process group
        signal.signal(number, signal.SIG_IGN)
    faulthandler.register(SHOW_STACKS)


def _run(launch: LaunchSpec, folder: Path) -> None:
    with _reporting_failure(folder):
        # Late, because this import takes seconds: first watch the parent.
        from bros.engine.group import Group
        from bros.executor.target import set_visible_devices

        if launch.replica is not None and launch.config.device != "cpu":
            set_visible_devices(launch.replica, launch.config.tp, os.environ)
        rank_env = torchrun_rank_env(os.environ) if launch.config.tp > 1 else None
        group = Group.join(launch.config, rank_env)
        group.log_to_stderr(launch.log_level, launch.replica)
    with group, _reporting_failure(folder, leads=group.rank == 0):
        if group.rank == 0:
            _lead(launch, folder, group)
        else:
            group.follow(launch.files)


def _lead(launch: LaunchSpec, folder: Path, group: Group) -> None:
    with contextlib.ExitStack() as stack:
        transport = stack.enter_context(contextlib.closing(ZmqTransport(folder)))
        # Late, for the same reason.
        from bros.engine.build import build_engine

        profiles = [Path(folder) for folder in launch.profiles]
        engine = build_engine(
            launch.config,
            launch.files,
            SystemClock(),
            profiles=profiles,
            profile_before=launch.profile_before,
            report=logger.info,
            group=group,
        )
        engine.load_ahead()
        # The objects of torch and the model stay alive. A collection that visits all of them would
        # delay a step by as long as the step takes.
        collector = stack.enter_context(Collector())
        progress = Progress()
        if launch.config.hang_timeout:
            timeout_s = launch.config.hang_timeout
            stack.enter_context(_watched(engine, progress, timeout_s, folder, group))
        run_engine(engine, transport, progress, collector)
        engine.close()


def _watched(
    engine: Engine, progress: Progress, timeout_s: float, folder: Path, group: Group
) -> AbstractContextManager[None]:
    """Send heartbeats during the block. If the engine hangs, end all its ranks instead."""
    compiles = engine.info.device != "cpu"
    watchdog = Watchdog.of_engine(progress, engine.expected, timeout_s, compiles=compiles)

    def check() -> None:
        reason = watchdog.check()
        if reason is None:
            return
        send_failure(folder, reason, hung=True)  # first: the server then answers the clients
        # Shows where it hangs. Unlike logging, this takes no lock that the other thread may hold.
        faulthandler.dump_traceback(all_threads=True)
        group.kill_others()
        os._exit(1)

    return heartbeats(folder, timeout_s / HEARTBEATS_PER_TIMEOUT, check=check)


@contextlib.contextmanager
def _reporting_failure(folder: Path, leads: bool = True) -> Iterator[None]:
    """If the block raises, report the reason to the server.

    leads: this is rank 0, which alone reports a RanksLostError; the other ranks only log it.
    """
    try:
        yield
    except BrosError as error:
        if leads or not isinstance(error, RanksLostError):
            send_failure(folder, str(error))
        else:
            logger.error("%s", error)
        raise
    except Exception as error:
        logger.exception("the engine stopped")
        send_failure(folder, f"The engine stopped: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    sys.exit(main())
