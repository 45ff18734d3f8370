from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import Config, EngineConfig, ServerConfig, parse_bytes
from bros.core.errors import ConfigError

PARTS = (EngineConfig, ServerConfig)
FIELDS = [(part, field) for part in PARTS for field in dataclasses.fields(part)]
LIMITED = [(part, field) for part, field in FIELDS if field.metadata.keys() - {"help"}]


@pytest.mark.parametrize(("part", "field"), FIELDS, ids=lambda x: getattr(x, "name", ""))
def test_every_option_has_one_line_of_help(part: type, field: dataclasses.Field[Any]) -> None:
    text = field.metadata["help"]
    assert 0 < len(text) <= 100
    assert "\n" not in text


@pytest.mark.parametrize(("part", "field"), LIMITED, ids=lambda x: getattr(x, "name", ""))
def test_limits_are_inclusive_and_enforced(part: type, field: dataclasses.Field[Any]) -> None:
    limits = field.metadata
    good: list[Any] = list(limits.get("choices", ()))
    bad: list[Any] = ["none of them"] if good else []
    if "low" in limits:
        good.append(limits["low"])
        bad.append(limits["low"] - 1)
    if "high" in limits:
        good.append(limits["high"])
        bad.append(limits["high"] + 1)
    if limits.get("size"):
        good.append("3GiB")
        bad.append("3 parsecs")
    if "tenants" in limits:
        good.append("ann=3,bob=1.5")
        bad += ["ann", "ann=0", "ann=1,ann=2"]
    if limits.get("secret"):
        good.append("a key")
        bad.append("")
    if limits.get("address"):
        good += ["auto", "head:6379"]
        bad += ["", "head", "ray://head:6379"]
    assert good and bad
    for value in good:
        assert getattr(part(**{field.name: value}), field.name) == value
    for value in bad:
        with pytest.raises(ConfigError, match="^--" + field.name.replace("_", "-") + ": "):
            part(**{field.name: value})


@pytest.mark.parametrize("name", ["max_num_seqs", "threads", "kv_blocks"])
def test_whole_numbers_have_no_fraction(name: str) -> None:
    with pytest.raises(ConfigError, match="2.5 is not a whole number"):
        EngineConfig(**{name: 2.5})


def test_choice_error_lists_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="^--policy: 'lifo' is not one of bros, fcfs, priority"):
        EngineConfig(policy="lifo")


def test_config_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("17", 17),
        ("17B", 17),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("1ki", 1024),
        ("512MiB", 512 * 2**20),
        ("2GiB", 2**31),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        (" 3 TiB ", 3 * 2**40),
        ("1TB", 10**12),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 gigabyte", "1e9", "1,5GiB", "1GiBB", "i"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size; write for example"):
        parse_bytes(text)


@given(
    st.integers(0, 2**20),
    st.sampled_from(["", "K", "M", "G", "T"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", " "]),
)
def test_parse_bytes_is_number_times_unit(
    number: int, prefix: str, binary: bool, with_b: bool, space: str
) -> None:
    binary = binary and prefix != ""
    unit = prefix + ("i" if binary else "") + ("B" if with_b else "")
    scale = (1024 if binary else 1000) ** " KMGT".index(prefix or " ")
    assert parse_bytes(f"{number}{space}{unit}") == number * scale
    assert parse_bytes(f"{number}{space}{unit.lower()}") == number * scale


@pytest.mark.parametrize(
    ("given", "on_cpu", "on_gpu"),
    [
        ({}, (64, 256), (256, 2048)),
        ({"max_num_seqs": 8}, (8, 256), (8, 2048)),
        ({"max_batch_tokens": 1024}, (64, 1024), (256, 1024)),
        ({"max_num_seqs": 64, "max_batch_tokens": 256}, (64, 256), (64, 256)),
    ],
)
def test_how_much_fits_a_step_depends_on_the_device_unless_it_is_given(
    given: dict[str, int], on_cpu: tuple[int, int], on_gpu: tuple[int, int]
) -> None:
    config = EngineConfig(**given)  # type: ignore[arg-type]
    assert config.step_bounds("cpu") == on_cpu
    assert config.step_bounds("cuda") == config.step_bounds("NVIDIA H200") == on_gpu


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match="^--slo-ttft: "):
        EngineConfig(slo_ttft=value)
