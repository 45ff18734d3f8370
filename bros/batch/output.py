"""Where results are written: whole files or none, standard output, devices."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from bros.core.errors import BrosError, ConfigError

STDOUT = "-"


def expanded(text: str) -> Path:
    """~ is followed where a shell has not done it; unlike Path.expanduser, this cannot fail."""
    return Path(os.path.expanduser(text))


def writable(flag: str, text: str | None) -> Path | str | None:
    """Where to write, STDOUT for `-`. Found out before hours of waiting. Raises ConfigError."""
    if text is None or text == STDOUT:
        return text
    try:
        path = expanded(text).resolve()
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{flag}: {text} cannot be written: no such folder, or it is one")
    except (OSError, RuntimeError) as error:  # a name that is too long, a link to itself
        raise ConfigError(f"{flag}: {text} cannot be written: {error}") from None
    return path


def write_out(pieces: Iterable[bytes]) -> None:
    """Raises BrosError if standard output cannot be written, BrokenPipeError if nobody reads it."""
    try:
        sys.stdout.buffer.writelines(pieces)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BrosError(f"standard output cannot be written: {error.strerror}") from None


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file under another name, and give it its own once it is whole.

    Raises BrosError if it cannot be written. A device or pipe is written as it is.
    """
    special = path.exists() and not path.is_file()
    written = path if special else path.with_name(f".bros-{os.getpid()}.part")
    try:
        with written.open("wb") as file:
            file.writelines(pieces)
        if not special:
            written.replace(path)
    except OSError as error:
        raise BrosError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        if not special:
            with contextlib.suppress(OSError):  # as a rule it is no longer there
                written.unlink()
