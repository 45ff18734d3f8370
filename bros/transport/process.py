"""The engine process: `python -m bros.transport.process FOLDER`, started by ProcessEngineClient.

FOLDER has launch.json, which says what to load, and the server's sockets. stdin stays open and
silent, and its end means that the server is gone: then this process ends too, whatever it is doing.

With several ranks there are as many of these processes, see launcher.py. Rank 0 talks to the
server, the others only if they fail for a reason of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.errors import BrosError, RanksLostError
from bros.core.rank_env import torchrun_rank_env
from bros.engine.loop import run_engine
from bros.engine.parent import end_with_parent, end_with_server, obey_parent_only
from bros.executor.model_store import ModelFiles
from bros.transport.ipc import ZmqTransport, heartbeats, send_last_words

if TYPE_CHECKING:
    from bros.engine.group import Group


# ---- What an engine process is told when it starts.


HEARTBEATS = 8
"""How many an engine sends within config.tp_timeout, if it is one of several or has ranks."""

_FILE = "launch.json"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Lies in the folder of the sockets.

    profiles: folders, see build_engine.
    starts_ranks: with config.tp > 1, whether bros starts the ranks. If not, torchrun has started
        them, and the process is rank 0, as the environment says.
    replica: which of several engines on this machine it is, each with devices of its own; None if
        there is one.
    sends_heartbeats: to the server; see HEARTBEATS.
    """

    model_folder: str
    model_name: str
    log_level: str
    config: EngineConfig
    profiles: tuple[str, ...] = ()
    starts_ranks: bool = False
    replica: int | None = None
    sends_heartbeats: bool = False

    @property
    def files(self) -> ModelFiles:
        return ModelFiles(folder=Path(self.model_folder), name=self.model_name)

    @property
    def module(self) -> str:
        """Which is to be run, with the folder as its argument."""
        return "bros.transport.launcher" if self.starts_ranks else "bros.transport.process"

    def write(self, folder: Path) -> None:
        """Before the process is started."""
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> LaunchSpec:
        values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        values["config"] = EngineConfig(**values["config"])
        values["profiles"] = tuple(values["profiles"])
        return cls(**values)


logger = logging.getLogger("bros.engine")


def main() -> int:
    folder = Path(sys.argv[1])
    launch = LaunchSpec.read(folder)
    if launch.starts_ranks:
        obey_parent_only()
        end_with_parent()
    else:
        # Both reach the whole process group; when to end is the server's business.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_server(folder)
    try:
        _run(launch, folder)
        return 0
    except Exception:  # the server has been told
        return 1


def _run(launch: LaunchSpec, folder: Path) -> None:
    with _last_words(folder):
        # Late, so that the watch on the parent is up before the seconds this import takes.
        from bros.engine.group import Group
        from bros.executor.target import set_visible_devices

        if launch.replica is not None and launch.config.device != "cpu":
            set_visible_devices(launch.replica, launch.config.tp, os.environ)
        rank_env = torchrun_rank_env(os.environ) if launch.config.tp > 1 else None
        group = Group.join(launch.config, rank_env)
        group.log_to_stderr(launch.log_level, launch.replica)
    with group, _last_words(folder, leads=group.rank == 0):
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
            report=logger.info,
            group=group,
        )
        # What torch and the model have made stays: a full collection that goes through all of it
        # holds up a step by as much as the step takes.
        gc.collect()
        gc.freeze()
        if launch.sends_heartbeats:
            every_s = launch.config.tp_timeout / HEARTBEATS
            stack.enter_context(heartbeats(folder, every_s))
        run_engine(engine, transport)
        engine.close()


@contextlib.contextmanager
def _last_words(folder: Path, leads: bool = True) -> Iterator[None]:
    """If the block fails, have the server told why.

    That others are lost is said by one rank, which leads; those who follow only log it.
    """
    try:
        yield
    except BrosError as error:
        if leads or not isinstance(error, RanksLostError):
            send_last_words(folder, str(error))
        else:
            logger.error("%s", error)
        raise
    except Exception as error:
        logger.exception("the engine stopped")
        send_last_words(folder, f"The engine stopped: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    sys.exit(main())
