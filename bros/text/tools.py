"""The tools of a request, and grammars of answers that call them, in llguidance's dialect of Lark.

    required   calls, and nothing else
    free       text, and calls wherever their marker is: from there on they are complete
    either     calls, or an answer with a grammar of its own

The arguments of a call match the JSON schema of its function, so that they are always valid.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bros.core.errors import InvalidRequestError
from bros.core.grammars import json_rule, loosened
from bros.core.request import MAX_GRAMMAR_BYTES, TOO_LONG, grammar_too_large


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    description: empty if there is none.
    parameters: JSON schema of its arguments, an object; empty: it has none.
    strict: arguments always match the schema.
    param: field of the request that has the schema, for errors.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    param: str = "tools"

    @property
    def definition(self) -> dict[str, Any]:
        """As templates expect it, OpenAI's form."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The tools of one request, and what the model may do with them.

    tools: that are described to the model.
    allowed: names of those that it may call.
    required: it must call one; else it may.
    parallel: it may call several at once.
    """

    tools: tuple[Tool, ...] = ()
    allowed: frozenset[str] = frozenset()
    required: bool = False
    parallel: bool = True

    @property
    def enforced(self) -> bool:
        """Whether answers need a grammar."""
        return self.required or any(tool.strict for tool in self.callable)

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.allowed)


NO_TOOLS = ToolUse()


# ---- How calls are written, as rules.


def literal(text: str) -> str:
    """A text in a rule."""
    return json.dumps(text, ensure_ascii=False)


def _object(key: str) -> Callable[[Tool, str], str]:
    """{"name": "f", "arguments": {...}}, where `key` is the name of the arguments."""

    def one(tool: Tool, arguments: str) -> str:
        return f'{literal(f"""{{"name": "{tool.name}", "{key}": """)} {arguments} "}}"'

    return one


def _named(tool: Tool, arguments: str) -> str:
    return f"{literal(tool.name)} [ARGS] {arguments}"


def _python(tool: Tool, arguments: str) -> str:
    return f'{literal(tool.name + "(")} {arguments} ")"'


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The rules of one format. Markers in them are written [BEGIN], [END] and [ARGS].

    one: (tool, name of the rule of its arguments) -> a call.
    before, between, after: around and between the calls that follow one marker; without `between`
        each call has a marker of its own.
    apart: between calls with markers of their own.
    bare: the character that calls begin with, in formats whose calls need no marker.
    python: arguments are keywords, and not an object.
    """

    one: Callable[[Tool, str], str]
    before: str = ""
    between: str = ""
    after: str = ""
    apart: str = ""
    bare: str = ""
    python: bool = False


HERMES_SYNTAX = CallSyntax(_object("arguments"), before=r'"\n"', after=r'"\n" [END]', apart=r'"\n"')
MISTRAL_SYNTAX = CallSyntax(_object("arguments"), before='"["', between='", "', after='"]"')
NAMED_SYNTAX = CallSyntax(_named)
LLAMA3_SYNTAX = CallSyntax(_object("parameters"), between='"; "', bare="{")
PYTHONIC_SYNTAX = CallSyntax(
    _python, before='"["', between='", "', after='"]"', bare="[", python=True
)


class CallGrammar:
    """The grammar of answers that call tools of one request."""

    def __init__(self, syntax: CallSyntax, use: ToolUse, markers: Mapping[str, str]) -> None:
        """markers: BEGIN, END and ARGS -> how the format's markers are written in a rule: a token
        as <[5]>, a text as a literal.

        Raises InvalidRequestError naming the parameters of a tool that cannot be enforced, if it is
        strict. Others are enforced as far as possible.
        """
        self._syntax = syntax
        self._markers = markers
        self._parallel = use.parallel
        self._rules: list[str] = []
        calls = []
        for number, tool in enumerate(use.callable):
            rule = f"args{number}"
            self._rules += _arguments(tool, rule, syntax.python)
            calls.append(self._marked(syntax.one(tool, rule)))
        self._rules.append(f"call: {' | '.join(calls)}")

    def required(self, name: str, *, marked: bool = False) -> str:
        """The rule `name`, and those that it needs: calls, and nothing else.

        marked: with a marker also where it may be left out, if it is a token: an answer that may
            begin like a call is an alternative.
        """
        begin, body = self._begin, self._body()
        if self._syntax.bare and not (marked and begin.startswith("<")):
            main = body
        elif self._repeats:
            main = f"{begin} {body} ({self._syntax.apart} {begin} {body})*"
        else:
            main = f"{begin} {body}"
        return "\n".join([f"{name}: {main}", *self._rules])

    def free(self, name: str) -> str:
        """The rule `name`, and those that it needs: text, and calls after their marker."""
        begin, body, bare = self._begin, self._body(), self._syntax.bare
        is_token = begin.startswith("<")
        if bare:
            marked = f" | {begin} {body}" if is_token else ""
            rules = [f"{name}: PLAIN | {body}{marked}", rf"PLAIN: /([^\{bare}\s](.|\n)*)?/"]
        else:
            main = "marked* TEXT" if self._repeats else "marked | TEXT"
            head = f"head: TEXT {begin}" if is_token else f"head[lazy]: TEXT {begin}"
            rules = [f"{name}: {main}", f"marked: head {body}", head, r"TEXT: /(.|\n)*/"]
        return "\n".join([*rules, *self._rules])

    @property
    def _begin(self) -> str:
        return self._markers["BEGIN"]

    @property
    def _repeats(self) -> bool:
        """Whether several calls have a marker each."""
        return self._parallel and not self._syntax.between

    def _body(self) -> str:
        """What follows a marker."""
        syntax = self._syntax
        more = f"({syntax.between} call)*" if self._parallel and syntax.between else ""
        return self._marked(f"{syntax.before} call {more} {syntax.after}")

    def _marked(self, rule: str) -> str:
        for name, marker in self._markers.items():
            rule = rule.replace(f"[{name}]", marker)
        return rule


# ---- Arguments.


def _arguments(tool: Tool, rule: str, python: bool) -> list[str]:
    """Rules of the arguments of a tool; the first is `rule`.

    What cannot be enforced of a tool that is not strict is left out.
    """
    try:
        schema = _closed(tool)
        if not python:
            return [f"{rule}: {json_rule(schema, param=tool.param, lenient=not tool.strict)}"]
        if not tool.strict:
            schema = loosened(schema, param=tool.param)
        return _keywords(tool, schema, rule)
    except InvalidRequestError as error:
        if tool.strict or error.code == TOO_LONG:
            raise
    if not python:
        return [f"{rule}: {_value(tool, {'type': 'object'})}"]
    name = f"{rule.upper()}_NAME"
    return [
        f'{rule}: ({rule}_any (", " {rule}_any)*)?',
        f'{rule}_any: {name} "=" {_value(tool, {})}',
        rf"{name}: /[A-Za-z_][\w.-]{{0,63}}/",
    ]


def _value(tool: Tool, schema: Mapping[str, Any]) -> str:
    return json_rule(schema, param=tool.param)


_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")


def _closed(tool: Tool) -> dict[str, Any]:
    """The schema of an object without members that it does not name: a small model invents some
    without an end, and the function does not know them. Raises InvalidRequestError."""
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequestError(
            f"'{tool.param}' must be the schema of an object.",
            param=tool.param,
            code="invalid_json_schema",
        )
    schema: dict[str, Any] = {**tool.parameters, "type": "object"}
    if not any(name in schema for name in (*_COMBINING, "additionalProperties")):
        schema["additionalProperties"] = False
    return schema


_KEYWORD = re.compile(r"[^\W\d][\w.-]*")


def _keywords(tool: Tool, schema: Mapping[str, Any], rule: str) -> list[str]:
    """Rules of the arguments as keywords: those that are required, then some of the others.

        rule: a ", " b after_2                  required: a and b
        rule: | c after_1 | d after_2 | ...     none
        after_1: (", " d)? after_2              and so on, so that the rules do not grow with the
                                                square of the properties

    Values are written as JSON, which is nearly Python; the parser reads both.
    """
    _value(tool, schema)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    named = isinstance(properties, Mapping) and isinstance(required, list)
    if any(name in schema for name in _COMBINING) or not named:
        raise _not_keywords(tool, "schemas with named properties")
    if not all(_KEYWORD.fullmatch(name) for name in properties):
        raise _not_keywords(tool, "properties whose names are words")
    required = {name for name in required if isinstance(name, str)}
    needed = [f"{rule}_{n}" for n, name in enumerate(properties) if name in required]
    others = [f"{rule}_{n}" for n, name in enumerate(properties) if name not in required]
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    rules, size = [], 0
    for number, (name, value) in enumerate(properties.items()):
        value_rule = _value(tool, {**_sub_schema(value), **shared})
        rules.append(f"{rule}_{number}: {literal(name + '=')} {value_rule}")
        size += len(rules[-1])
        if size > MAX_GRAMMAR_BYTES:  # each has all definitions
            raise grammar_too_large(tool.param)
    after = [f"{rule}_after_{place}" for place in range(len(others))]
    following = [*after[1:], ""][: len(others)]
    rules += [
        f'{name}: (", " {other})? {later}'
        for name, other, later in zip(after, others, following, strict=True)
    ]
    if needed:
        options = [" ".join(['", " '.join(f"{name} " for name in needed), *after[:1]])]
    else:
        options = ['""', *map(" ".join, zip(others, following, strict=True))]
    return [f"{rule}: {' | '.join(options)}", *rules]


def _sub_schema(schema: object) -> Mapping[str, Any]:
    return schema if isinstance(schema, Mapping) else {}


def _not_keywords(tool: Tool, what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"Calls of this model have keywords as arguments, so '{tool.param}' can be enforced for "
        f"{what} only.",
        param=tool.param,
        code="invalid_value",
    )
