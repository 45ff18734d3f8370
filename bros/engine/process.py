"""The engine process: `python -m bros.engine.process`, started by ProcessEngineClient.

The first line on stdin says what to load; after that stdin stays open and silent, and its end
means that the server is gone: then this process ends too, whatever it is doing.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.errors import BrosError
from bros.engine.ipc import ZmqTransport
from bros.engine.loop import run_engine
from bros.engine.messages import Failed
from bros.executor.model_store import ModelFiles

logger = logging.getLogger("bros.engine")


@dataclass(frozen=True, slots=True)
class Launch:
    """All an engine process is told when it starts. profiles: folders, see build_engine."""

    socket_folder: str
    model_folder: str
    model_name: str
    log_level: str
    config: EngineConfig
    profiles: tuple[str, ...] = ()

    def to_json(self) -> bytes:
        """One line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_json(cls, line: bytes) -> Launch:
        values = json.loads(line)
        values["config"] = EngineConfig(**values["config"])
        values["profiles"] = tuple(values["profiles"])
        return cls(**values)


def main() -> int:
    # Both reach the whole process group; when to end is the server's business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Unbuffered: a thread that waits in a buffered reader cannot be left behind at exit.
    stdin = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    launch = Launch.from_json(stdin.readline())
    threading.Thread(target=_exit_with_parent, args=(stdin, launch), daemon=True).start()
    logging.basicConfig(
        level=launch.log_level.upper(), format="%(levelname)s %(name)s: %(message)s"
    )
    transport = ZmqTransport(Path(launch.socket_folder))
    try:
        return _serve(launch, transport)
    finally:
        transport.close()


def _serve(launch: Launch, transport: ZmqTransport) -> int:
    try:
        # Late, so that the watch on the parent is up before the seconds this import takes.
        from bros.engine.build import build_engine

        files = ModelFiles(folder=Path(launch.model_folder), name=launch.model_name)
        profiles = [Path(folder) for folder in launch.profiles]
        engine = build_engine(
            launch.config, files, SystemClock(), profiles=profiles, report=logger.info
        )
        # What torch and the model have made stays: a full collection that goes through all of it
        # holds up a step by as much as the step takes.
        gc.collect()
        gc.freeze()
        run_engine(engine, transport)
        engine.close()
        return 0
    except BrosError as error:
        transport.send(Failed(str(error)))
    except Exception as error:
        logger.exception("the engine stopped")
        transport.send(Failed(f"The engine stopped: {type(error).__name__}: {error}"))
    return 1


def _exit_with_parent(stdin: FileIO, launch: Launch) -> None:
    stdin.read(1)
    shutil.rmtree(launch.socket_folder, ignore_errors=True)  # the server had no time to
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
