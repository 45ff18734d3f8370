"""Submitting calls and waiting for what they give, in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from bros.semantic.program import CallSpec, Criteria, Perf, SubmittedCall
from bros.semantic.views import VariableView
from bros.server.session_access import Place

_IN_PASSING = Criteria(perf=Perf.THROUGHPUT)
"""For values that are there, or are hurried up already by what needs them."""


class _Output(NamedTuple):
    """call: index of its call. is_final: no other call of the program needs it."""

    call: int
    placeholder: str
    variable: str
    criteria: Criteria | None
    is_final: bool


async def wait_for_outputs(
    place: Place,
    calls: Sequence[CallSpec],
    submitted: Sequence[SubmittedCall],
    timeout_s: float,
) -> list[dict[str, str]]:
    """By call, placeholder -> value: the outputs with criteria; if none has any, all of the model.

    Only what the program ends with is asked for then, for the rest would count as wanted for
    itself; it is there when that is. Raises what SessionService.get raises, the first time.
    """
    outputs = _outputs(place, calls, submitted)
    if any(output.criteria is not None for output in outputs):
        outputs = [output for output in outputs if output.criteria is not None]
    ends = [output for output in outputs if output.criteria is not None or output.is_final]
    values: list[dict[str, str]] = [{} for _ in calls]
    for output, view in zip(ends, await _get_all(place, ends, timeout_s), strict=True):
        values[output.call][output.placeholder] = view.value or ""
    for output in outputs:
        if output.placeholder not in values[output.call]:
            view = await place.service.get(
                place.tenant, place.session_id, output.variable, _IN_PASSING, timeout_s
            )
            values[output.call][output.placeholder] = view.value or ""
    return values


def _outputs(
    place: Place, calls: Sequence[CallSpec], submitted: Sequence[SubmittedCall]
) -> list[_Output]:
    ids = {call.request_id for call in submitted}
    found = []
    for index, (spec, call) in enumerate(zip(calls, submitted, strict=True)):
        criteria = {parameter.name: parameter.criteria for parameter in spec.parameters}
        for placeholder, variable_id in call.variables.items():
            view = place.service.variable(place.tenant, place.session_id, variable_id)
            wanted = criteria.get(placeholder)
            if view.producer != call.request_id or (spec.native and wanted is None):
                continue
            is_final = ids.isdisjoint(view.consumers)
            found.append(_Output(index, placeholder, variable_id, wanted, is_final))
    return found


async def _get_all(
    place: Place, outputs: Sequence[_Output], timeout_s: float
) -> list[VariableView]:
    """All at once, so that all are begun; the first that fails ends the waiting for the others."""
    gets = [
        asyncio.ensure_future(
            place.service.get(
                place.tenant, place.session_id, output.variable, output.criteria, timeout_s
            )
        )
        for output in outputs
    ]
    try:
        return await asyncio.gather(*gets)
    finally:
        for get in gets:
            get.cancel()
        await asyncio.gather(*gets, return_exceptions=True)
