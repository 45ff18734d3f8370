"""Paths that users name, files of models, and names that outlast a power failure."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
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


_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens of a model folder by name. config: its tokenizer_config.json.

    Both files have a token as a string or as an object with `content`. Raises ModelError.
    """
    entries = {**read_model_json_object(folder / "special_tokens_map.json"), **config}
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        token = entries.get(name)
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found[name] = content
    return found


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a model folder by name. config: its tokenizer_config.json.

    Template files take precedence over templates in the configuration. Raises ModelError.
    """
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    if inline is None:
        inline = read_model_json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif inline is not None:
        try:
            sources.update({str(each["name"]): str(each["template"]) for each in inline})
        except (TypeError, KeyError):
            raise ModelError(
                f"the chat_template in {folder} is neither a text nor a list of named ones"
            ) from None
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.is_file():
        sources["default"] = main.read_text(encoding="utf-8")
    return sources


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
