"""Outputs in their short form."""

from __future__ import annotations

from collections.abc import Iterable

from bros.core.request import Output, RequestOutput, expanded, shortened
from bros.engine.messages import Outputs


def expand_all(outputs: Iterable[Output]) -> list[RequestOutput]:
    """What a scheduler has returned, which has to be in the short form where that says all."""
    found = []
    for output in outputs:
        assert not isinstance(output, RequestOutput) or shortened(output) is output, output
        found.append(expanded(output))
    return found


def outputs_of(outputs: Iterable[RequestOutput]) -> Outputs:
    """Outputs in their short form, where they have one."""
    return Outputs(tuple(map(shortened, outputs)))
