"""Sessions as they look from outside, made up for tests of what shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bros.core.request import ServiceClass
from bros.semantic.schema import (
    CallKind,
    CallState,
    CallView,
    Criteria,
    SessionView,
    SharingMode,
    VariableState,
    VariableView,
)


def make_call(
    call_id: str, inputs: Sequence[str] = (), outputs: Sequence[str] = (), **fields: Any
) -> CallView:
    """A finished real-time call."""
    return CallView(
        **{
            "id": call_id,
            "name": call_id,
            "kind": CallKind.LLM,
            "state": CallState.FINISHED,
            "service_class": ServiceClass.RT,
            "level": "rt",
            "stage": 0,
            "depth": 0,
            "group": None,
            "deadline_s": None,
            "inputs": tuple(inputs),
            "outputs": tuple(outputs),
            "submitted_s": 0.0,
            "queued_s": 0.25,
            "first_token_s": 0.5,
            "end_s": 1.75,
            "prompt_tokens": 300,
            "cached_tokens": 100,
            "output_tokens": 20,
            "error": None,
            "llm_calls": (),
        }
        | fields
    )


def make_session(calls: Sequence[CallView], names: Mapping[str, str] | None = None) -> SessionView:
    """With the variables that the calls have. names: of variables, their ids if not given."""
    producers = {output: call.id for call in calls for output in call.outputs}
    consumers: dict[str, list[str]] = {output: [] for output in producers}
    for call in calls:
        for variable in call.inputs:
            consumers.setdefault(variable, []).append(call.id)
    return SessionView(
        id="sess-1",
        state="open",
        created_at=1_700_000_000,
        expires_in_s=None,
        ttl_s=600.0,
        tenant="",
        sharing=SharingMode.TENANT,
        criteria=Criteria(),
        metadata={},
        calls=tuple(calls),
        variables=tuple(
            VariableView(
                id=variable,
                name=(names or {}).get(variable, variable),
                state=VariableState.READY,
                value="a value",
                producer=producers.get(variable),
                consumers=tuple(reading),
            )
            for variable, reading in consumers.items()
        ),
    )
