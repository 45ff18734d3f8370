"""Launch configurations per device: defaults, overridden by values tuned on such a device.

tuned/DEVICE.json, where DEVICE is the device's name with underscores, contains

    {"device": ..., "programs_per_processor": {"one": 4, "tile": 1},
     "launches": [{"kind": "one", "element_bytes": 2, "head_dim": 128, "rows": 16,
                   "block_m": 16, "block_n": 64, "warps": 4, "stages": 3}, ...],
     "products": [{"rows": 16, "outputs": 4096, "inputs": 4096, "element_bytes": 2,
                   "block_n": 32, "block_k": 128, "warps": 2, "stages": 6}, ...]}

launches: of attention. kind: `one` for rows of one token, `tile` for tiles of queries. rows:
queries times heads of a program, a power of two; head_dim is rounded up to a power of two as well.
products: of few rows with a matrix; those that are not listed are torch's.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Literal, NamedTuple

import torch

from bros.core.errors import ConfigError

Kind = Literal["one", "tile"]

_TILE_BYTES = 16384  # of K or V per stage, by default
_INTERPRETED, _HOPPER = 0, 9  # major compute capabilities


class Shape(NamedTuple):
    """The key of a launch configuration. The kernel uses at most LaunchConfig.block_m of `rows`."""

    kind: Kind
    element_bytes: int
    head_dim: int
    rows: int


class LaunchConfig(NamedTuple):
    """How to launch a kernel.

    block_m: query rows of a program.
    block_n: keys per tile.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int


ROW_STEPS = (1, 16, 32, 64, 128)
MIN_ROWS = 16
"""The least rows of a matrix product in Triton."""


def rows_step(rows: int) -> int | None:
    """The first of ROW_STEPS that is not below `rows`; None for none or more rows."""
    if not rows:
        return None
    return next((step for step in ROW_STEPS if rows <= step), None)


class ProductShape(NamedTuple):
    """The key of a product's launch configuration.

    rows: one of ROW_STEPS.
    """

    rows: int
    outputs: int
    inputs: int
    element_bytes: int


class ProductLaunch(NamedTuple):
    """How to launch a product.

    block_n: outputs of a program, a divisor of all outputs.
    block_k: inputs at a time, a divisor of all inputs.
    """

    block_n: int
    block_k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class TritonSettings:
    """Launch configurations of one device.

    processors: its multiprocessors.
    major: its major compute capability.
    programs: per kind, how many programs run on a multiprocessor at once.
    early: whether kernels are launched before their predecessors have ended (programmatic dependent
        launch): a decode step of one row of Llama-3-8B took 6.19 instead of 6.31 ms (H100).
    """

    device: str
    processors: int
    major: int
    programs: Mapping[Kind, int] = field(default_factory=lambda: {"one": 4, "tile": 1})
    tuned: Mapping[Shape, LaunchConfig] = field(default_factory=dict)
    products: Mapping[ProductShape, ProductLaunch] = field(default_factory=dict)
    early: bool = False

    @property
    def interpreted(self) -> bool:
        return self.major == _INTERPRETED

    @property
    def launching(self) -> Mapping[str, bool]:
        """Arguments of every launch."""
        return {"EARLY": True, "launch_pdl": True} if self.early else {"EARLY": False}

    def launch(self, shape: Shape) -> LaunchConfig:
        """The tuned configuration if there is one, else the default."""
        return self.tuned.get(shape) or self.default(shape)

    def default(self, shape: Shape) -> LaunchConfig:
        """A configuration that fits a few programs' shared memory on a multiprocessor and spills no
        registers (except a few at head_dim 256 in fp32 with a 16-bit cache)."""
        if self.interpreted:
            return LaunchConfig(shape.rows, 64, 4, 1)
        stages = 3 if self.major >= _HOPPER else 2
        if shape.element_bytes > 2:
            # No tensor cores, so that fp32 stays exact: registers limit the size of the tile.
            return LaunchConfig(16, 16 if shape.head_dim > 64 else 32, 8, stages)
        keys = min(128, max(16, _TILE_BYTES // (shape.head_dim * shape.element_bytes)))
        if shape.kind == "one":
            return LaunchConfig(shape.rows, keys, 4 if shape.rows <= 32 else 8, stages)
        wide = shape.rows > 64 or shape.head_dim > 128
        return LaunchConfig(shape.rows, min(keys, 64), 8 if wide else 4, stages)


def power_of_two(number: int) -> int:
    """The smallest power of two >= number. triton.next_power_of_2 takes 5 us a call: for all
    launches of a step, that is as long as a small model computes."""
    return 1 << max(0, number - 1).bit_length()


def settings_for(device: torch.device) -> TritonSettings:
    """The settings of a CUDA device, with those tuned for its name; for the CPU, where kernels are
    interpreted, those of a tiny device."""
    if device.type != "cuda":
        return TritonSettings("interpreter", 4, _INTERPRETED)
    properties = torch.cuda.get_device_properties(device)
    name = properties.name
    settings = TritonSettings(
        name,
        properties.multi_processor_count,
        properties.major,
        early=properties.major >= _HOPPER,
    )
    file = resources.files(__package__).joinpath("tuned", file_name(name))
    return with_tuned(settings, file.read_text("utf-8")) if file.is_file() else settings


def file_name(device: str) -> str:
    """The name of the file with the configurations tuned for a device."""
    return "".join(c if c.isalnum() or c in "-." else "_" for c in device) + ".json"


def with_tuned(settings: TritonSettings, text: str) -> TritonSettings:
    """Settings with the tuned configurations of a file. Raises ConfigError if it is malformed."""
    try:
        data = json.loads(text)
        tuned = dict(_entry(entry) for entry in data["launches"])
        products = dict(_product(entry) for entry in data.get("products", ()))
        programs: dict[Kind, int] = {
            "one": int(data["programs_per_processor"]["one"]),
            "tile": int(data["programs_per_processor"]["tile"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"Launch configurations of {settings.device} cannot be read: {error!r}"
        ) from error
    return dataclasses.replace(settings, programs=programs, tuned=tuned, products=products)


def as_json(settings: TritonSettings) -> str:
    """The contents of a file for with_tuned."""
    launches = [
        {**shape._asdict(), **launch._asdict()} for shape, launch in sorted(settings.tuned.items())
    ]
    data = {
        "device": settings.device,
        "programs_per_processor": dict(settings.programs),
        "launches": launches,
        "products": [
            {**shape._asdict(), **launch._asdict()}
            for shape, launch in sorted(settings.products.items())
        ],
    }
    return json.dumps(data, indent=1) + "\n"


def _entry(entry: Mapping[str, Any]) -> tuple[Shape, LaunchConfig]:
    kind: Kind = {"one": "one", "tile": "tile"}[entry["kind"]]  # type: ignore[assignment]
    shape = Shape(kind, *(int(entry[name]) for name in Shape._fields[1:]))
    return shape, LaunchConfig(*(int(entry[name]) for name in LaunchConfig._fields))


def _product(entry: Mapping[str, Any]) -> tuple[ProductShape, ProductLaunch]:
    shape = ProductShape(*(int(entry[name]) for name in ProductShape._fields))
    launch = ProductLaunch(*(int(entry[name]) for name in ProductLaunch._fields))
    if shape.outputs % launch.block_n or shape.inputs % launch.block_k:
        raise ValueError(f"{launch} does not divide {shape}")
    return shape, launch
