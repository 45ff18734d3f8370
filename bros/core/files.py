"""Paths that users name, JSON files of models, and names that outlast a power failure."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from bros.core.errors import ConfigError, ModelError


def home_folder() -> Path:
    """The user's home folder, for the default of --data-dir. Raises ConfigError if there is none,
    as in containers that run under any user id."""
    try:
        return Path.home()
    except RuntimeError:
        raise ConfigError(
            "--data-dir: give a folder (or set BROS_DATA_DIR); there is no home folder for the "
            "default, since HOME is not set and this user is not in /etc/passwd"
        ) from None


def expand_user(text: str | Path) -> Path:
    """The path with ~ expanded; unlike Path.expanduser it never raises."""
    return Path(os.path.expanduser(text))


def check_folder(folder: Path) -> None:
    """Make a folder, and raise OSError unless files can be written there."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def read_model_json(path: Path) -> Any:
    """The JSON in a file of a model's folder; None if there is no file. Raises ModelError."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def read_model_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's folder; {} if there is no file. Raises ModelError."""
    content = read_model_json(path)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk, as after a rename. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_text(name: str) -> str:
    """The name of a file, which may have any bytes, with U+FFFD for those that are not UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
