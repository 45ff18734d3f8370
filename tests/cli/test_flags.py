"""Numbers as they are written on the command line."""

from __future__ import annotations

import pytest

from bros.cli.flags import number, rates, whole
from bros.core.errors import ConfigError


def test_rates() -> None:
    assert rates("--x", "4") == [4.0]
    assert rates("--x", "1,2.5,4") == [1.0, 2.5, 4.0]
    assert rates("--x", "1:15") == [1.0, 4.5, 8.0, 11.5, 15.0]
    assert rates("--x", "1:15:2") == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0, 13.0, 15.0]
    assert rates("--x", "0.1:0.3:0.1") == [0.1, 0.2, 0.3]
    assert rates("--x", "1:4:2") == [1.0, 3.0]


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "5:1", "1:5:0", "1:5:1:1", "1:15:1e-7", "1,x", "1e15", "0:5e-324"]
)
def test_other_rates_are_refused_by_the_name_of_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="^--x: "):
        rates("--x", text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "x", ""])
def test_no_number(text: str) -> None:
    with pytest.raises(ConfigError, match="^--x: "):
        number("--x", text, low=0)


def test_bounds() -> None:
    assert number("--x", "0.5", above=0) == 0.5
    assert number("--x", "0", low=0) == 0.0
    with pytest.raises(ConfigError, match="must be more than 0"):
        number("--x", "0", above=0)
    assert whole("--x", "3", low=3) == 3
    with pytest.raises(ConfigError, match="must be at least 3"):
        whole("--x", "2", low=3)
    with pytest.raises(ConfigError, match="not a whole number"):
        whole("--x", "2.0", low=1)
