"""What a client hands in: calls with placeholders, and how soon their values are wanted.

The same on the wire (server/session_messages.py), from the front end, and in the simulator.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


class Role(enum.StrEnum):
    """What a placeholder stands for."""

    INPUT = "input"
    OUTPUT = "output"


class Perf(enum.StrEnum):
    """What matters about a value: LATENCY, when it is complete; TTFT and TPOT, when it begins and
    how fast it goes on (somebody reads along); THROUGHPUT, that many are done some time."""

    LATENCY = "latency"
    TTFT = "ttft"
    TPOT = "tpot"
    THROUGHPUT = "throughput"


_MAX_S = 1e9
"""Longest time that anybody may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """How soon a value is wanted. Times are seconds; None: the server's defaults, no deadline.

    deadline_s: until the value is complete, from when this is asked for on.
    """

    perf: Perf = Perf.LATENCY
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None


def checked_seconds(name: str, value: float | None, *, zero: bool = False) -> float | None:
    """value, before it goes on its way together with what could fail with it.

    zero: whether none at all will do. Raises ValueError in terms of who gave it under that name.
    """
    if value is None:
        return None
    is_number = isinstance(value, int | float) and value <= _MAX_S
    if not is_number or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name} must be seconds, {'0 or more' if zero else 'above 0'}: {value!r}")
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One placeholder of a call.

    role: None takes that of the template; it must not say another one.
    variable: id of a variable of the session, which comes into being if it is not there; None: a
    new one. value: of an input instead of that (a constant). transforms: see transforms.py.
    sampling: of an output, on top of the call's. criteria: of an output: it is wanted at once.
    """

    name: str
    role: Role | None = None
    variable: str | None = None
    value: str | None = None
    transforms: str | None = None
    sampling: Mapping[str, Any] | None = None
    criteria: Criteria | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One of a conversation whose content is a template."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call as a client describes it: exactly one of template and messages, or native.

    name: of the function; calls of one name are expected to be alike in length.
    template: a text with {{input:x}} and {{output:y}}. chat: make a conversation of it by the
    model's chat template: what stands before an output is what the user says, the output is the
    answer. messages: a conversation whose contents are templates; without an output placeholder
    the answer to it is an output with the name "output".
    native: no call of the model but a function that the client runs: parameters alone say what it
    reads and sets; it is there so that the graph is known.
    sampling: for all outputs, the fields of SamplingParams.
    """

    name: str = ""
    template: str | None = None
    messages: Sequence[Message] | None = None
    chat: bool = False
    native: bool = False
    parameters: Sequence[Parameter] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedCall:
    """Answer to one CallSpec. variables: placeholder -> id of its variable."""

    request_id: str
    variables: Mapping[str, str]
