"""Functions of the client in the middle of a program: their inputs come, they run, they answer."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from bros.core.errors import BrosError
from bros.semantic.backend import Backend
from bros.semantic.calls import Call
from bros.semantic.errors import SessionGoneError, UpstreamError
from bros.semantic.variables import SemanticVariable

logger = logging.getLogger(__name__)

_MESSAGE_CHARS = 2000


async def run_native(
    call: Call,
    fetch: Callable[[SemanticVariable], Awaitable[str]],
    backend: Backend,
    session_id: str,
) -> None:
    """Wait for the inputs, run the function on a thread (or here if it is a coroutine function),
    and set its outputs; or say that it failed. Raises nothing."""
    assert call.request_id is not None
    try:
        try:
            values = await _result(call, fetch)
        except (UpstreamError, SessionGoneError):
            return  # the server knows that, and what follows from it
        except Exception as error:
            await backend.fail(session_id, call.request_id, _describe(error))
            return
        for name, value in values.items():
            await backend.set(session_id, call.outputs[name].id, value)
    except BrosError as error:
        # Its outputs were cancelled meanwhile, or there is no session or server any more.
        logger.info("what %s() has to say is not wanted: %s", call.form.name, error)


async def _result(
    call: Call, fetch: Callable[[SemanticVariable], Awaitable[str]]
) -> Mapping[str, str]:
    """Output -> its text."""
    variables = list(call.inputs())
    values = await asyncio.gather(*(fetch(variable) for variable in variables))
    texts = dict(zip(variables, values, strict=True))
    arguments = {name: _filled(argument, texts) for name, argument in call.arguments.items()}
    function = call.form.native
    assert function is not None
    if inspect.iscoroutinefunction(function):
        returned = await function(**arguments)
    else:
        returned = await asyncio.to_thread(function, **arguments)
    return _outputs(call, returned)


def _filled(argument: Any, texts: Mapping[SemanticVariable, str]) -> Any:
    """The argument with texts in place of variables."""
    if isinstance(argument, SemanticVariable):
        return texts[argument]
    if isinstance(argument, list | tuple):
        parts = [_filled(part, texts) for part in argument]
        return parts if isinstance(argument, list) else tuple(parts)
    return argument


def _outputs(call: Call, returned: Any) -> dict[str, str]:
    names = call.form.outputs
    if len(names) == 1:
        return {names[0]: _text(returned)}
    if not isinstance(returned, list | tuple) or len(returned) != len(names):
        raise TypeError(f"it must return {len(names)} values ({', '.join(names)})")
    return {name: _text(value) for name, value in zip(names, returned, strict=True)}


def _text(value: Any) -> str:
    """Lists and mappings as JSON, like the results of transforms; None is no value."""
    if isinstance(value, str):
        return value
    if value is None:
        raise TypeError("it returned None; what it makes must be returned")
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _describe(error: Exception) -> str:
    text = str(error)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return message[:_MESSAGE_CHARS]
