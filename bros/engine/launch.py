"""What an engine process is told when it starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from bros.core.config import EngineConfig
from bros.executor.model_store import ModelFiles

SIGNS = 8
"""Of life, that an engine gives within config.tp_timeout if it is one of several, or has ranks."""

_FILE = "launch.json"


@dataclass(frozen=True, slots=True)
class Launch:
    """Lies in the folder of the sockets. profiles: folders, see build_engine.

    starts_ranks: with config.tp > 1, whether bros starts the ranks. If not, torchrun has started
    them, and the process is rank 0, as the environment says. replica: which of several engines on
    this machine it is, each with devices of its own; None if there is one. gives_signs: of life.
    """

    model_folder: str
    model_name: str
    log_level: str
    config: EngineConfig
    profiles: tuple[str, ...] = ()
    starts_ranks: bool = False
    replica: int | None = None
    gives_signs: bool = False

    @property
    def files(self) -> ModelFiles:
        return ModelFiles(folder=Path(self.model_folder), name=self.model_name)

    @property
    def module(self) -> str:
        """Which is to be run, with the folder as its argument."""
        return "bros.engine.launcher" if self.starts_ranks else "bros.engine.process"

    def write(self, folder: Path) -> None:
        """Before the process is started."""
        (folder / _FILE).write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Launch:
        values = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        values["config"] = EngineConfig(**values["config"])
        values["profiles"] = tuple(values["profiles"])
        return cls(**values)
