"""From the fields of a request that say what its output must look like to a Grammar.

response_format                                  OpenAI: text, json_object, json_schema
structured_outputs                               vLLM: json, regex, choice, grammar, json_object
guided_json, guided_regex, guided_choice, ...    vLLM's older names of the same
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pydantic_core import from_json

from bros.core import grammars
from bros.core.errors import InvalidRequestError
from bros.core.request import MAX_GRAMMAR_BYTES, Grammar
from bros.server.openai.schema import GrammarFields, StructuredOutputs


def grammar_of(request: GrammarFields) -> Grammar | None:
    """What the output must match; None if it is free.

    Raises InvalidRequestError naming the field, if there is more than one, or what is wrong with
    it. It is cheap: whether the grammar compiles is checked later (text/grammar_check.py).
    """
    found = list(_asked(request))
    if len(found) > 1:
        names = ", ".join(f"'{name}'" for name, _ in found)
        raise InvalidRequestError(
            f"The output can match one grammar only; this request has {names}.",
            param=found[1][0],
        )
    return found[0][1]() if found else None


def _asked(request: GrammarFields) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    """(field, how to make its grammar) for each field that asks for one."""
    form = request.response_format
    if form is not None and form.type != "text":
        yield "response_format", lambda: _response_format(request)
    if request.structured_outputs is not None:
        yield from _structured("structured_outputs.", request.structured_outputs)
    older = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        choice=request.guided_choice,
        grammar=request.guided_grammar,
        whitespace_pattern=request.guided_whitespace_pattern,
    )
    yield from _structured("guided_", older)


def _response_format(request: GrammarFields) -> Grammar:
    form, param = request.response_format, "response_format"
    assert form is not None
    if form.type == "json_object":
        return grammars.json_object(param=param)
    if form.json_schema is None:
        raise InvalidRequestError(
            "Missing required parameter: 'response_format.json_schema'.",
            "response_format.json_schema",
            "missing_required_parameter",
        )
    schema = form.json_schema.schema_
    # OpenAI's API takes a format without a schema, for any object.
    return grammars.json_schema({"type": "object"} if schema is None else schema, param=param)


def _structured(
    prefix: str, fields: StructuredOutputs
) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    whitespace = fields.whitespace_pattern
    if fields.json_ is not None:
        json_name, schema = f"{prefix}json", fields.json_
        yield (
            json_name,
            lambda: grammars.json_schema(
                _parsed(schema, json_name), param=json_name, whitespace=whitespace
            ),
        )
    if fields.json_object:
        yield f"{prefix}json_object", lambda: grammars.json_object(param=f"{prefix}json_object")
    if fields.regex is not None:
        pattern = fields.regex
        yield f"{prefix}regex", lambda: grammars.regex(pattern, param=f"{prefix}regex")
    if fields.choice is not None:
        options = fields.choice
        yield f"{prefix}choice", lambda: grammars.choice(options, param=f"{prefix}choice")
    if fields.grammar is not None:
        text = fields.grammar
        yield f"{prefix}grammar", lambda: grammars.lark(text, param=f"{prefix}grammar")


def _parsed(schema: str | bool | dict[str, Any], param: str) -> Any:
    """The schema; vLLM also takes it as a string."""
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"The schema in '{param}' has more than {MAX_GRAMMAR_BYTES} bytes.",
            param,
            "string_above_max_length",
        )
    try:
        return from_json(schema, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequestError(
            f"The schema in '{param}' is not valid JSON: {error}.", param, "invalid_json"
        ) from None
