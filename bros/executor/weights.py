"""The weights of a model: tensors by name, from safetensors files or random."""

from __future__ import annotations

import contextlib
import json
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bros.core.errors import ModelError
from bros.kernels.panels import GROUP

# ---- Quantized weights in groups of 32 along the input: GGUF's Q4_0, Q4_1 and Q8_0.
#
# A converted GGUF model keeps such a tensor as its raw rows, uint8 [rows, bytes], under its name
# plus one of SUFFIXES. A group of 32 values is stored as
#
#     q4_0   d f16 | 16 bytes: value j in the low half of byte j, value j + 16 in the high half
#     q4_1   d f16 | m f16 | 16 bytes as above
#     q8_0   d f16 | 32 x int8
#
# and value = code * d + m, where q4_0 has m = -8 * d and q8_0 has m = 0.


SUFFIXES = (".q4_0", ".q4_1", ".q8_0")
_4_BITS = (".q4_0", ".q4_1")
GROUP_BYTES = {".q4_0": 18, ".q4_1": 20, ".q8_0": 34}


@dataclass(frozen=True, slots=True)
class Int4Groups:
    """value[n, k] = codes[n, k] * scale[n, k // 32] + minimum[n, k // 32].

    codes: uint8 [rows, columns] in 0..15.
    scale, minimum: fp32 [rows, columns / 32].
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor

    def dequantize(self) -> Tensor:
        """fp32 [rows, columns]."""
        rows, columns = self.codes.shape
        values = self.codes.view(rows, columns // GROUP, GROUP).float()
        return values.mul_(self.scale[..., None]).add_(self.minimum[..., None]).view(rows, columns)

    @classmethod
    def from_dense(cls, weight: Tensor) -> Int4Groups:
        """Round to the nearest of 16 even steps between a group's smallest and largest value.

        weight: fp32 [rows, columns], columns a multiple of 32.
        """
        rows, columns = weight.shape
        grouped = weight.view(rows, columns // GROUP, GROUP)
        low, high = torch.aminmax(grouped, dim=2)
        scale = (high - low) / 15
        steps = (grouped - low[..., None]) / scale.clamp(min=1e-12)[..., None]
        return cls(steps.round_().to(torch.uint8).view(rows, columns), scale, low)

    @classmethod
    def from_raw(cls, raw: Tensor, suffix: str) -> Int4Groups:
        """raw: uint8 [rows, bytes]; suffix: ".q4_0" or ".q4_1"."""
        rows = raw.shape[0]
        groups = raw.view(rows, -1, GROUP_BYTES[suffix])
        scale = _halves(groups[..., 0:2])
        minimum = scale * -8 if suffix == ".q4_0" else _halves(groups[..., 2:4])
        pairs = groups[..., -GROUP // 2 :]
        codes = torch.cat((pairs & 15, pairs >> 4), dim=2)
        return cls(codes.view(rows, -1), scale, minimum)

    @classmethod
    def concatenate(cls, parts: list[Int4Groups]) -> Int4Groups:
        """Stack the rows of several matrices."""
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scale for part in parts]),
            torch.cat([part.minimum for part in parts]),
        )


def dequantize_raw(raw: Tensor, suffix: str) -> Tensor:
    """raw: uint8 [rows, bytes] in the format of `suffix`. Returns fp32 [rows, columns]."""
    if suffix != ".q8_0":
        return Int4Groups.from_raw(raw, suffix).dequantize()
    groups = raw.view(raw.shape[0], -1, GROUP_BYTES[suffix])
    values = groups[..., 2:].view(torch.int8).float()
    return values.mul_(_halves(groups[..., 0:2])[..., None]).view(raw.shape[0], -1)


def _halves(two_bytes: Tensor) -> Tensor:
    """uint8 [..., 2] holding an f16 each -> fp32 [...]."""
    return two_bytes.contiguous().view(torch.float16).squeeze(-1).float()


INDEX_FILE = "model.safetensors.index.json"

LAYER = re.compile(r"(\w+)\.(weight|bias)$")
"""The end of a tensor's name: its layer, and which of its tensors it is."""

Part = tuple[range, ...]
"""A part of a tensor: a range with step 1 along each axis."""


def slices(part: Part) -> tuple[slice, ...]:
    """The index that selects this part of a tensor."""
    return tuple(slice(axis.start, axis.stop) for axis in part)


def part_shape(shape: tuple[int, ...], part: Part | None) -> tuple[int, ...]:
    return shape if part is None else tuple(len(axis) for axis in part)


class Weights(Protocol):
    """Tensors by name.

    All methods take the shape of the whole tensor, and the part of it to read; None reads all.
    """

    @property
    def unread(self) -> frozenset[str]:
        """The names of tensors that were not read yet."""
        ...

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The values in fp32 on the CPU. Raises ModelError if there is no tensor of this shape."""
        ...

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        """The matrix as 4-bit groups. The columns of a part must be a multiple of 32."""
        ...

    def is_stored_in_4_bits(self, name: str) -> bool:
        """Whether `int4` can give the stored groups."""
        ...

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """Fill `out`, of any device and dtype. Raises ModelError as `dense` does."""
        ...


def refuse_unused(names: Collection[str], architecture: str) -> None:
    """Raise ModelError if there are any: tensors of a checkpoint that its model does not use."""
    if names:
        shown = ", ".join(sorted(names)[:3])
        raise ModelError(
            f"the checkpoint has {len(names)} tensors that {architecture} as described by its "
            f"config.json does not use, such as {shown}"
        )


class WeightSource:
    """The tensors of a folder with *.safetensors: one file, or several with an index.

    A tensor is stored dense, or (converted GGUF) in quantized groups under name + suffix. Use this
    as a context manager: files are memory-mapped while it is open. Only the requested part of a
    tensor is read.
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

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    @property
    def unread(self) -> frozenset[str]:
        """See Weights."""
        return frozenset(self._unread)

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """The values in fp32. Raises ModelError if they are missing or not of this shape."""
        return self._values(name, shape, part).float()

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """See Weights. Files are memory-mapped, so the host holds no copy of the whole model."""
        out.copy_(self._values(name, shape, part))

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        """See Weights. Rounds the matrix, unless it is stored in 4 bits and the part starts at a
        group's border."""
        suffix = self._suffix(name)
        starts_at_group = part is None or part[1].start % GROUP == 0
        if suffix in _4_BITS and starts_at_group:
            return Int4Groups.from_raw(self._groups(name, suffix, shape, part), suffix)
        return Int4Groups.from_dense(self.dense(name, shape, part))

    def is_stored_in_4_bits(self, name: str) -> bool:
        """See Weights."""
        return self._suffix(name) in _4_BITS

    def _suffix(self, name: str) -> str | None:
        return next((suffix for suffix in SUFFIXES if name + suffix in self._file_of), None)

    def _values(self, name: str, shape: tuple[int, ...], part: Part | None) -> Tensor:
        """In the stored dtype; fp32 if the tensor is quantized."""
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
        """Raw rows: for a part, all groups that overlap it."""
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
    """The files that the index names, else model.safetensors, else all of the folder.

    Beside model.safetensors may be the same weights under other names, such as Mistral's
    consolidated.safetensors, and adapters.
    """
    index, single = folder / INDEX_FILE, folder / "model.safetensors"
    if not index.exists():
        paths = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    else:
        try:
            names: Mapping[str, str] = json.loads(index.read_text("utf-8"))["weight_map"]
            paths = [folder / name for name in sorted(set(names.values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{index} is not a safetensors index: {error!r}") from error
    if not paths:
        raise ModelError(f"{folder} holds no *.safetensors file; only that format is loaded")
    return paths


# ---- Random weights, for measurements and tests without a download.


_BIAS_STD = 0.02


class RandomWeights:
    """Random tensors, which depend only on seed, name, shape and device. Implements Weights.

    Matrices are normal with variance 1 / columns, so that activations neither vanish nor explode;
    biases are normal and small, other vectors are near 1.
    """

    def __init__(self, seed: int = 0, rng_device: torch.device | None = None) -> None:
        """rng_device: the device whose generator is used; by default the device of each tensor.

        Devices generate different numbers; use the CPU to get the same numbers everywhere.
        """
        self._seed = seed
        self._rng_device = rng_device

    @property
    def unread(self) -> frozenset[str]:
        return frozenset()

    def dense(self, name: str, shape: tuple[int, ...], part: Part | None = None) -> Tensor:
        """See Weights."""
        out = torch.empty(part_shape(shape, part))
        self.copy_into(out, name, shape, part)
        return out

    def int4(self, name: str, shape: tuple[int, int], part: Part | None = None) -> Int4Groups:
        return Int4Groups.from_dense(self.dense(name, shape, part))

    def is_stored_in_4_bits(self, name: str) -> bool:
        """See Weights."""
        return False

    def copy_into(
        self, out: Tensor, name: str, shape: tuple[int, ...], part: Part | None = None
    ) -> None:
        """See Weights. Generates the whole tensor, so that the parts of all ranks fit together."""
        device = self._rng_device or out.device
        generator = torch.Generator(device)
        # Some generators use only 32 bits of a seed.
        generator.manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        # Generated in fp32: a generator returns other numbers, not rounded ones, for 16 bits.
        values = torch.empty(shape, device=device)
        if values.dim() > 1:
            values.normal_(std=values.shape[-1] ** -0.5, generator=generator)
        elif name.endswith("bias"):
            values.normal_(std=_BIAS_STD, generator=generator)
        else:
            values.uniform_(0.8, 1.2, generator=generator)
        out.copy_(values if part is None else values[slices(part)])
