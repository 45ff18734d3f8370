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
from bros.executor.quantized import GROUP, GROUP_BYTES, SUFFIXES, Int4Groups, dequantize_raw

INDEX_FILE = "model.safetensors.index.json"

Part = tuple[range, ...]
"""Of a tensor: a range along each axis, none of which has steps."""


def slices(part: Part) -> tuple[slice, ...]:
    """What a tensor is indexed with to have the part."""
    return tuple(slice(axis.start, axis.stop) for axis in part)


def part_shape(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    return shape if part is None else tuple(len(axis) for axis in part)


class Weights(Protocol):
    """Tensors by name, wherever they come from.

    shape: always of the whole tensor; part: what is wanted of it, None for all.
    """

    @property
    def unread(self) -> frozenset[str]:
        """Names nobody has asked for yet."""
        ...

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The values in fp32 on the CPU. Raises ModelError if there is no tensor of this shape."""
        ...

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        """The matrix as 4-bit groups, which a part has a multiple of in each row."""
        ...

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """Fill `out`, of any device and dtype. Raises ModelError as `dense` does."""
        ...


class WeightSource:
    """The tensors of a folder with *.safetensors, one file or several with an index.

    A name may be stored dense, or (converted GGUF) in groups under name + suffix, as described
    in quantized.py. Use as a context manager; files are memory-mapped while it is open. Of a
    tensor that is wanted in part nothing else is read.
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

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The values in fp32. Raises ModelError if they are missing or not of this shape."""
        return self._values(name, shape, part).float()

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """Fill `out`, of any device and dtype. Raises ModelError as `dense` does.

        No copy of the whole model is made on the host: files are memory-mapped.
        """
        out.copy_(self._values(name, shape, part))

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        """The matrix as 4-bit groups: as stored if it is stored so and the part begins with a
        whole group, else rounded to them."""
        suffix = self._suffix(name)
        begins_whole = part is None or part[1].start % GROUP == 0
        if suffix in (".q4_0", ".q4_1") and begins_whole:
            return Int4Groups.from_raw(self._groups(name, suffix, shape, part), suffix)
        return Int4Groups.from_dense(self.dense(name, shape, part))

    def _suffix(self, name: str) -> str | None:
        return next((suffix for suffix in SUFFIXES if name + suffix in self._file_of), None)

    def _values(self, name: str, shape: tuple[int, ...], part: Part | None) -> Tensor:
        """In the dtype in which they are stored; fp32 for groups."""
        suffix = self._suffix(name)
        if suffix is None:
            self._check(name, self._stored_shape(name), shape)
            return self._read(name, part)
        values = dequantize_raw(self._groups(name, suffix, shape, part), suffix)
        if part is None:
            return values
        first = part[1].start % GROUP
        return values[:, first : first + len(part[1])]

    def _groups(self, name: str, suffix: str, shape: tuple[int, ...], part: Part | None) -> Tensor:
        """Raw rows, of a part those with all groups of which it has some."""
        size = GROUP_BYTES[suffix]
        rows, row_bytes = self._stored_shape(name + suffix)
        self._check(name, (rows, row_bytes // size * GROUP), shape)
        if part is not None:
            columns = part[1]
            part = part[0], range(columns.start // GROUP * size, -(-columns.stop // GROUP) * size)
        return self._read(name + suffix, part)

    def _check(self, name: str, stored: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if stored != shape:
            raise ModelError(
                f"{name} in {self._folder} has shape {list(stored)}, but config.json "
                f"asks for {list(shape)}"
            )

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self._folder} has no tensor named {name}")
        return tuple(file.get_slice(name).get_shape())

    def _read(self, name: str, part: Part | None) -> Tensor:
        file = self._file_of[name]
        self._unread.discard(name)
        values = file.get_tensor(name) if part is None else file.get_slice(name)[slices(part)]
        assert isinstance(values, Tensor)
        return values


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
