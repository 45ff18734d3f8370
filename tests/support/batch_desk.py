"""`bros batch` beside a server that is told what becomes of each batch."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from rich.console import Console

from bros.cli.batch import run_batch
from bros.cli.flags import add_arguments
from bros.core.clock import ManualClock
from support.fake_batches import CREATED_AT, FakeBatches, counts

ROW = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {}}
OUTPUT = b'{"custom_id":"1"}\n{"custom_id":"2"}\n'
ERRORS = b'{"custom_id":"3"}\n'
RUNNING = {"status": "in_progress", "request_counts": counts(3)}
COMPLETED = {
    "status": "completed",
    "request_counts": counts(2, 2),
    "output_file_id": "file-out",
    "completed_at": CREATED_AT + 60,
}
SOME_FAILED = COMPLETED | {"request_counts": counts(3, 2, 1), "error_file_id": "file-err"}
EXPIRED = SOME_FAILED | {"status": "expired", "request_counts": counts(3, 2, 0)}
CANCELLED = EXPIRED | {"status": "cancelled"}
INVALID = {
    "status": "failed",
    "request_counts": counts(0),
    "errors": {
        "data": [
            {"code": "invalid_json_line", "message": "Not JSON.", "line": 3, "param": None},
            {"code": "empty_file", "message": "All wrong.", "line": None, "param": None},
        ]
    },
}


class Ran(NamedTuple):
    status: int
    out: str
    err: str


class Desk:
    """Runs commands beside a fake server, on a clock that moves when they pause."""

    def __init__(self) -> None:
        self.fake = FakeBatches()
        self.fake.files |= {"file-out": OUTPUT, "file-err": ERRORS}
        self.clock = ManualClock(epoch_s=CREATED_AT)
        self.err = Timed(self.clock)
        self.interrupt_after: int | None = None
        self.pauses: list[float] = []

    def run(self, *arguments: str, terminal: bool = False, **environ: str) -> Ran:
        parser = argparse.ArgumentParser()
        add_arguments("batch", parser)
        out, self.err = io.StringIO(), Timed(self.clock)
        status = run_batch(
            parser.parse_args(arguments),
            environ,
            pytest.fail,
            self.clock,
            pause=self._pause,
            transport=httpx.MockTransport(self.fake),
            out=Console(file=out, force_terminal=terminal, width=80, color_system=None),
            err=Console(file=self.err, force_terminal=terminal, width=80),
        )
        return Ran(status, out.getvalue(), self.err.getvalue())

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        if len(self.pauses) == self.interrupt_after:
            raise KeyboardInterrupt
        self.clock.advance(seconds)


class Timed(io.StringIO):
    """Standard error that knows when what was written."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.times: list[float] = []

    def write(self, text: str) -> int:
        if text.strip():
            self.times.append(self._clock.now())
        return super().write(text)


def write_rows(path: Path, *found: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path
