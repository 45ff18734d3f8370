"""Reads tensors by name from the safetensors files of a model folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from bros.core.errors import ModelError
from bros.executor.quantized import SUFFIXES, Int4Groups, dequantize_raw

INDEX_FILE = "model.safetensors.index.json"


class Weights(Protocol):
    """Tensors by name, wherever they come from."""

    @property
    def unread(self) -> frozenset[str]:
        """Names nobody has asked for yet."""
        ...

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in fp32 on the CPU. Raises ModelError if there is none of this shape."""
        ...

    def int4(self, name: str, shape: tuple[int, int]) -> Int4Groups:
        """The matrix as 4-bit groups."""
        ...

    def copy_into(self, out: Tensor, name: str) -> None:
        """Fill `out`, of any device and dtype. Raises ModelError as `dense` does."""
        ...


class WeightSource:
    """The tensors of a folder with *.safetensors, one file or several with an index.

    A name may be stored dense, or (converted GGUF) in groups under name + suffix, as described
    in quantized.py. Use as a context manager; files are memory-mapped while it is open.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ModelError if the files are missing or damaged."""
        self._folder = folder
        self._open_files = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        self._unread: set[str] = set()
        for path in _weight_files(folder):
            try:
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._open_files.close()
                raise ModelError(f"{path} cannot be read as safetensors: {error}") from error
            self._file_of.update((name, file) for name in file.keys())
        self._unread.update(self._file_of)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open_files.close()

    @property
    def unread(self) -> frozenset[str]:
        """Names nobody has asked for yet."""
        return frozenset(self._unread)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of or self._suffix(name) is not None

    def dense(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor in fp32. Raises ModelError if it is missing or not of this shape."""
        return self._values(name, shape).float()

    def copy_into(self, out: Tensor, name: str) -> None:
        """Fill `out`, of any device and dtype. Raises ModelError as `dense` does.

        No copy of the whole model is made on the host: files are memory-mapped.
        """
        out.copy_(self._values(name, tuple(out.shape)))

    def int4(self, name: str, shape: tuple[int, int]) -> Int4Groups:
        """The matrix as 4-bit groups: as stored if it is stored so, else rounded to them."""
        suffix = self._suffix(name)
        if suffix in (".q4_0", ".q4_1"):
            return Int4Groups.from_raw(self._raw(name + suffix), suffix)
        return Int4Groups.from_dense(self.dense(name, shape))

    def _suffix(self, name: str) -> str | None:
        return next((suffix for suffix in SUFFIXES if name + suffix in self._file_of), None)

    def _values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """In the dtype in which they are stored; fp32 for groups."""
        suffix = self._suffix(name)
        if suffix is None:
            tensor = self._raw(name)
        else:
            tensor = dequantize_raw(self._raw(name + suffix), suffix)
        if tensor.shape != shape:
            raise ModelError(
                f"{name} in {self._folder} has shape {list(tensor.shape)}, but config.json "
                f"asks for {list(shape)}"
            )
        return tensor

    def _raw(self, name: str) -> Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self._folder} has no tensor named {name}")
        self._unread.discard(name)
        tensor: Tensor = file.get_tensor(name)
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_FILE
    if not index.exists():
        paths = sorted(folder.glob("*.safetensors"))
    else:
        try:
            names: Mapping[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
        paths = [folder / name for name in sorted(set(names.values()))]
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file; only that format is loaded")
    return paths
