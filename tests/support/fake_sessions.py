"""A back end of the front end that evaluates programs in the simplest way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.semantic.client.connection import Connection
from bros.semantic.core.template import Placeholder, Text, parse_template
from bros.semantic.errors import (
    Cause,
    FailedStage,
    GetTimeoutError,
    SessionGoneError,
    UpstreamError,
)
from bros.semantic.schema import CallSpec, Criteria, Role, SharingMode, SubmittedCall


def shout(name: str, placeholder: str, prompt: str) -> str:
    """What the fake model says by default: a short text that depends on all it was given."""
    return f"<{name}.{placeholder}:{sum(prompt.encode()) % 9973}:{len(prompt)}>"


@dataclass
class Variable:
    value: str | None = None
    cause: Cause | None = None
    producer: str | None = None
    wanted: list[Criteria] = field(default_factory=list)


class FakeBackend:
    """A Backend. Values appear when they are asked for.

    model: what is said for (function, output, prompt so far); an exception it raises fails the
    call. refusal: raised by the next submit, once. Everything that was sent is in `programs` (one
    list of calls per submit), `prompts`, `operations`.
    """

    def __init__(self, model: Callable[[str, str, str], str] = shout) -> None:
        self.model = model
        self.refusal: Exception | None = None
        self.created: list[tuple[Any, ...]] = []
        self.deleted: list[str] = []
        self.programs: list[list[CallSpec]] = []
        self.prompts: list[str] = []
        self.operations: list[tuple[str, ...]] = []
        self.variables: dict[str, dict[str, Variable]] = {}
        self._calls: dict[str, CallSpec] = {}
        self._changed = asyncio.Event()

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        sharing: SharingMode,
        metadata: Mapping[str, str],
    ) -> str:
        self.created.append((criteria, ttl_s, tenant, sharing, dict(metadata)))
        session_id = f"sess-{len(self.created)}"
        self.variables[session_id] = {}
        return session_id

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> list[SubmittedCall]:
        variables = self._session(session_id)
        if self.refusal is not None:
            error, self.refusal = self.refusal, None
            raise error
        self.programs.append(list(calls))
        answers = []
        for call in calls:
            request_id = f"req-{len(self._calls) + 1}"
            self._calls[request_id] = call
            for parameter in call.parameters:
                if parameter.variable is None:
                    assert parameter.role is Role.INPUT and parameter.value is not None
                    continue
                variable = variables.setdefault(parameter.variable, Variable())
                if parameter.role is Role.OUTPUT:
                    assert variable.producer is None and variable.value is None
                    variable.producer = request_id
                if parameter.criteria is not None:
                    variable.wanted.append(parameter.criteria)
            ids = {p.name: p.variable for p in call.parameters if p.variable is not None}
            answers.append(SubmittedCall(request_id=request_id, variables=ids))
        return answers

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None:
        variables = self._session(session_id)
        assert variable_id not in variables
        self.operations.append(("declare", variable_id, name))
        variables[variable_id] = Variable(value)

    async def set(self, session_id: str, variable_id: str, value: str) -> None:
        variable = self._variable(session_id, variable_id)
        assert variable.value is None and variable.cause is None
        self.operations.append(("set", variable_id, value))
        variable.value = value
        self._tell()

    async def fail(self, session_id: str, request_id: str, message: str) -> None:
        self.operations.append(("fail", request_id, message))
        self._fail(session_id, request_id, Cause(request_id, FailedStage.NATIVE, message))

    async def want(self, session_id: str, variable_id: str, criteria: Criteria) -> None:
        self._variable(session_id, variable_id).wanted.append(criteria)
        self.operations.append(("want", variable_id, criteria.perf.value))

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str:
        variable = self._variable(session_id, variable_id)
        variable.wanted.append(criteria)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._value(session_id, variable)
        except TimeoutError:
            raise GetTimeoutError("not there") from None

    async def stream(
        self, session_id: str, variable_id: str, criteria: Criteria
    ) -> AsyncGenerator[str, None]:
        variable = self._variable(session_id, variable_id)
        variable.wanted.append(criteria)
        value = await self._value(session_id, variable)
        for char in value:
            yield char

    async def cancel(self, session_id: str, request_id: str) -> None:
        self.operations.append(("cancel", request_id))
        self._fail(session_id, request_id, Cause(request_id, FailedStage.CANCELLED, "cancelled"))

    async def inspect(self, session_id: str) -> Mapping[str, Any]:
        return {"id": session_id, "requests": [call.name for call in self._calls.values()]}

    async def delete(self, session_id: str) -> None:
        self._session(session_id)
        self.deleted.append(session_id)
        self._tell()

    def _session(self, session_id: str) -> dict[str, Variable]:
        if session_id in self.deleted:
            raise SessionGoneError("It has been deleted.")
        return self.variables[session_id]

    def _variable(self, session_id: str, variable_id: str) -> Variable:
        variables = self._session(session_id)
        if variable_id not in variables:
            raise NotFoundError(f"There is no variable {variable_id!r}.")
        return variables[variable_id]

    async def _value(self, session_id: str, variable: Variable) -> str:
        while variable.value is None:
            self._session(session_id)
            if variable.cause is not None:
                raise UpstreamError(variable.cause)
            call = None if variable.producer is None else self._calls[variable.producer]
            if call is not None:
                assert variable.producer is not None
                await self._run(session_id, variable.producer, call)
            if variable.value is None and variable.cause is None:
                await self._changed.wait()
        return variable.value

    async def _run(self, session_id: str, request_id: str, call: CallSpec) -> None:
        variables = self._session(session_id)
        texts: dict[str, str] = {}
        outputs: dict[str, Variable] = {}
        for parameter in call.parameters:
            if parameter.role is Role.OUTPUT:
                assert parameter.variable is not None
                outputs[parameter.name] = variables[parameter.variable]
            elif parameter.value is not None:
                texts[parameter.name] = parameter.value
            else:
                assert parameter.variable is not None
                try:
                    source = variables[parameter.variable]
                    texts[parameter.name] = await self._value(session_id, source)
                except UpstreamError as error:
                    self._fail(session_id, request_id, error.cause)
                    return
        if call.native:
            return  # the client sets its outputs
        prompt = ""
        for piece in parse_template(_source(call)):
            if isinstance(piece, Text):
                prompt += piece.text
            elif piece.name in texts:
                prompt += texts[piece.name]
            else:
                prompt += self._say(session_id, request_id, call, piece, prompt, outputs)

    def _say(
        self,
        session_id: str,
        request_id: str,
        call: CallSpec,
        piece: Placeholder,
        prompt: str,
        outputs: Mapping[str, Variable],
    ) -> str:
        output = outputs[piece.name]
        if output.value is None and output.cause is None:
            self.prompts.append(prompt)
            try:
                output.value = self.model(call.name, piece.name, prompt)
            except Exception as error:
                cause = Cause(request_id, FailedStage.GENERATE, str(error))
                self._fail(session_id, request_id, cause)
        return output.value or ""

    def _fail(self, session_id: str, request_id: str, cause: Cause) -> None:
        for variable in self.variables[session_id].values():
            if variable.producer == request_id and variable.value is None:
                variable.cause = cause
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def fake_connection(backend: FakeBackend) -> Connection:
    return Connection(lambda: contextlib.nullcontext(backend))


def refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, "requests[0].template")


def _source(call: CallSpec) -> str:
    """What the model is given, as one template."""
    if call.messages is None:
        assert call.template is not None
        return call.template
    return "".join(f"[{message.role}]{message.content}" for message in call.messages)
