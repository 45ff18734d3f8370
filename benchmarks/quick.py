"""The option `--quick` of benchmarks: the smallest run that exercises the code."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any


class _Quick(argparse.Action):
    """Sets other options to their smallest values; later options override them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        smallest: Mapping[str, Any] = self.const
        for name, value in smallest.items():
            setattr(namespace, name, value)


def add_quick(parser: argparse.ArgumentParser, **smallest: Any) -> None:
    """Add `--quick` to a parser. smallest: name of an option -> its value for a quick run."""
    shown = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in smallest.items())
    parser.add_argument(
        "--quick",
        nargs=0,
        action=_Quick,
        const=smallest,
        default=argparse.SUPPRESS,
        help=f"only test the program: {shown}",
    )
