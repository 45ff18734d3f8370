"""Grammars for what clients ask for: JSON, JSON schemas, regular expressions, choices, grammars.

Everything becomes a text in llguidance's dialect of Lark (Grammar in core/request.py), and parts
of such texts can be put together:

    start: "<tool_call>" call "</tool_call>"
    call: %json {"type": "object", ...}             json_rule(schema)

JSON is written in one form, so that nearly all of it but the values is forced: `{"a": 1, "b": [2]}`
with these spaces and no others, as Python writes it. A `whitespace` pattern allows more.

What is checked here is cheap: sizes, depth, names of keywords. Whether a text compiles, and in what
time, is checked by text/grammar_check.py in a process of its own.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from bros.core.errors import InvalidRequestError
from bros.core.request import MAX_GRAMMAR_BYTES, TOO_LONG, Grammar

MAX_CHOICES = 10_000
MAX_SCHEMA_DEPTH = 60
MAX_SCHEMA_PARTS = 50_000
"""Deepest nesting of objects and lists in a schema: the compiler takes about twice as many."""

_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
"""Formats of strings that are enforced."""

_STANDARD_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template"}
    | {"json-pointer", "relative-json-pointer", "regex"}
)
"""Formats of the standard that cannot be enforced. All others, such as OpenAPI's int32, are remarks
to the reader of a schema."""

_UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties"}
    | {"unevaluatedItems", "$dynamicRef", "$recursiveRef"}
)

_IN_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_ALONE = frozenset({"items", "additionalProperties", "additionalItems"})
"""Keywords whose value has schemas: a map of them, a list of them, one (`items` also a list)."""

Schema = Mapping[str, Any] | bool


def json_object(*, param: str = "grammar", after: str = "") -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param=param, after=after)


def json_schema(
    schema: Schema, *, param: str = "grammar", whitespace: str | None = None, after: str = ""
) -> Grammar:
    """JSON that is valid by a schema.

    whitespace: a regular expression of what may be between the tokens of JSON; None: see above.
    Raises InvalidRequestError naming `param`, and the keyword that cannot be honoured and its path.
    """
    rule = json_rule(schema, param=param, whitespace=whitespace)
    return Grammar(f"start: {rule}", after, param)


def regex(pattern: str, *, param: str = "grammar", after: str = "") -> Grammar:
    """A text that matches a regular expression of Rust's syntax as a whole."""
    _check_text(pattern, param)
    return Grammar(f"start: /{_escaped_regex(pattern)}/", after, param)


def choice(options: Sequence[str], *, param: str = "grammar", after: str = "") -> Grammar:
    """One of some texts."""
    is_list = isinstance(options, list | tuple) and len(options) > 0
    if not is_list or not all(isinstance(option, str) and option for option in options):
        raise InvalidRequestError(
            f"'{param}' must be a list of strings that are not empty.", param, "invalid_value"
        )
    if len(options) > MAX_CHOICES:
        raise InvalidRequestError(
            f"'{param}' takes at most {MAX_CHOICES} choices, got {len(options)}.",
            param,
            "array_above_max_length",
        )
    # One regular expression: thousands of alternatives of a rule would be parsed one by one.
    either = "|".join(_escaped_regex(_literal(option)) for option in dict.fromkeys(options))
    return Grammar(f"start: /{either}/", after, param)


def lark(text: str, *, param: str = "grammar", after: str = "") -> Grammar:
    """A grammar in llguidance's dialect of Lark, or in GBNF (with `::=`), which is converted when
    it is checked."""
    _check_text(text, param)
    return Grammar(text, after, param)


def _check_text(text: object, param: str) -> None:
    if not isinstance(text, str):
        raise InvalidRequestError(f"'{param}' must be a string.", param, "invalid_type")
    if not text.strip():
        raise InvalidRequestError(f"'{param}' must not be empty.", param, "invalid_value")


def is_json(grammar: Grammar) -> bool:
    """Whether an output that matches is JSON, as with `json_object` and `json_schema`."""
    return grammar.text.startswith("start: %json ") and '"x-guidance": ' in grammar.text


def is_gbnf(text: str) -> bool:
    """Whether the text of a grammar is GBNF, and not Lark."""
    return re.search(r"^\s*[\w-]+\s*::=", text, re.MULTILINE) is not None


def from_fields(fields: Mapping[str, Any]) -> Grammar | None:
    """What the fields of a request ask for: `response_format` as in OpenAI's API, and
    `structured_outputs` and `guided_*` as in vLLM's. None if they leave the output free.

    Raises InvalidRequestError naming the field, if there is more than one, or what is wrong with
    it.
    """
    found = list(_asked(fields))
    if len(found) > 1:
        names = ", ".join(f"'{name}'" for name, _ in found)
        raise InvalidRequestError(
            f"The output can match one grammar only; this request has {names}.",
            param=found[1][0],
        )
    return found[0][1]() if found else None


FIELDS = frozenset(
    {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"}
    | {"guided_grammar", "guided_whitespace_pattern"}
)
"""The fields that `from_fields` reads."""


def _asked(fields: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    """(field, how to make its grammar) for each field that asks for one."""
    form = fields.get("response_format")
    if form is not None:
        kind = _mapping(form, "response_format").get("type")
        if kind not in ("text", "json_object", "json_schema"):
            raise InvalidRequestError(
                "'response_format.type' must be text, json_object or json_schema.",
                "response_format.type",
                "invalid_value",
            )
        if kind != "text":
            yield "response_format", lambda: _response_format(form)
    own = fields.get("structured_outputs")
    if own is not None:
        yield from _structured("structured_outputs.", _mapping(own, "structured_outputs"))
    older = {
        name.removeprefix("guided_"): value
        for name, value in fields.items()
        if name.startswith("guided_")
    }
    yield from _structured("guided_", older)


def _mapping(value: object, param: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"'{param}' must be an object.", param, "invalid_type")
    return value


def _response_format(form: Mapping[str, Any]) -> Grammar:
    param = "response_format"
    if form["type"] == "json_object":
        return json_object(param=param)
    inner = form.get("json_schema")
    if inner is None:
        raise InvalidRequestError(
            "Missing required parameter: 'response_format.json_schema'.",
            "response_format.json_schema",
            "missing_required_parameter",
        )
    schema = _mapping(inner, "response_format.json_schema").get("schema")
    # OpenAI's API takes a format without a schema, for any object.
    return json_schema({"type": "object"} if schema is None else schema, param=param)


def _structured(
    prefix: str, fields: Mapping[str, Any]
) -> Iterator[tuple[str, Callable[[], Grammar]]]:
    def of_json(schema: Any, param: str) -> Grammar:
        whitespace = fields.get("whitespace_pattern")
        return json_schema(_parsed(schema, param), param=param, whitespace=whitespace)

    makers: Mapping[str, Callable[[Any, str], Grammar]] = {
        "json": of_json,
        "json_object": lambda _, param: json_object(param=param),
        "regex": lambda pattern, param: regex(pattern, param=param),
        "choice": lambda options, param: choice(options, param=param),
        "grammar": lambda text, param: lark(text, param=param),
    }
    for name, make in makers.items():
        value = fields.get(name)
        if value is not None and not (name == "json_object" and value is False):
            yield prefix + name, functools.partial(make, value, prefix + name)


def _parsed(schema: Any, param: str) -> Any:
    """The schema; vLLM also takes it as a string."""
    if not isinstance(schema, str):
        return schema
    if len(schema) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError(
            f"The schema in '{param}' has more than {MAX_GRAMMAR_BYTES} bytes.",
            param,
            TOO_LONG,
        )
    try:
        return json.loads(schema, parse_int=short_int)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise InvalidRequestError(
            f"The schema in '{param}' is not valid JSON: {reason}.", param, "invalid_json"
        ) from None


MAX_DIGITS = 40
"""Most digits in a row of a number in JSON. Python takes 0.1 to 0.6 ms to read or write one of
4,300 digits, and holds the interpreter meanwhile."""


def short_int(text: str) -> int:
    """As `parse_int` of json.loads. Raises ValueError for more than MAX_DIGITS."""
    if len(text.removeprefix("-")) > MAX_DIGITS:
        raise ValueError(f"it has a number of more than {MAX_DIGITS} digits")
    return int(text)


def json_rule(schema: Schema, *, param: str = "grammar", whitespace: str | None = None) -> str:
    """The right side of a Lark rule for JSON that is valid by a schema: `%json {...}`. Raises what
    json_schema raises."""
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(
            f"'{param}' must be a JSON schema: an object, or true.", param, "invalid_type"
        )
    _check_size(schema, param)
    checked: Any = {} if schema is True else _Schema(schema, param).checked()
    style: dict[str, Any] = {"item_separator": ", ", "key_separator": ": "}
    if whitespace is None:
        style["whitespace_flexible"] = False
    elif not isinstance(whitespace, str):
        raise InvalidRequestError(
            f"The white space of '{param}' must be a regular expression.", param, "invalid_type"
        )
    else:
        style = {"whitespace_flexible": True, "whitespace_pattern": whitespace}
    return f"%json {json.dumps({**checked, 'x-guidance': style}, ensure_ascii=False)}"


def _check_size(schema: Schema, param: str) -> None:
    """Raises InvalidRequestError for a schema that is too deep or has too many parts, without
    recursion."""
    level: list[object] = [schema]
    parts = 0
    for _ in range(MAX_SCHEMA_DEPTH):
        parts += len(level)
        if parts > MAX_SCHEMA_PARTS:
            raise InvalidRequestError(
                f"The schema in '{param}' has more than {MAX_SCHEMA_PARTS} values.",
                param,
                "invalid_json_schema",
            )
        level = [
            inner
            for value in level
            if isinstance(value, Mapping | list)
            for inner in (value.values() if isinstance(value, Mapping) else value)
        ]
        if not level:
            return
    raise InvalidRequestError(
        f"The schema in '{param}' is nested more than {MAX_SCHEMA_DEPTH} levels deep.",
        param,
        "invalid_json_schema",
    )


# ---- Schemas: what cannot be honoured is refused, what has no meaning is removed.


class _Schema:
    """A schema that is being checked.

    param: the request's field.
    """

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param

    def checked(self) -> dict[str, Any]:
        """The schema for the compiler."""
        if self._root is False:
            raise self._error("no value is valid by it", ())
        if not isinstance(self._root, Mapping):
            return {}
        checked: dict[str, Any] = self._check(self._root, ())
        return checked

    def _check(self, schema: object, path: tuple[str, ...]) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._error("must be an object, or true or false", path)
        for name in schema:
            if name in _UNSUPPORTED:
                raise self._error(f"the keyword {name!r} is not supported", (*path, name))
        if schema.get("uniqueItems"):
            raise self._error("the keyword 'uniqueItems' is not supported", (*path, "uniqueItems"))
        self._check_ref(schema, path)
        checked: dict[str, Any] = {}
        for name, value in schema.items():
            if self._has_meaning(name, value, path):
                checked[name] = self._check_keyword(name, value, (*path, name))
        if schema.get("type") != "integer":
            _close_bounds(checked)
        if "oneOf" in checked and "anyOf" not in checked and self._excludes(schema["oneOf"]):
            checked["anyOf"] = checked.pop("oneOf")
        return checked

    def _check_keyword(self, name: str, value: object, path: tuple[str, ...]) -> Any:
        if name in _IN_MAPS:
            if not isinstance(value, Mapping):
                raise self._error("must be an object of schemas", path)
            return {key: self._check(inner, (*path, key)) for key, inner in value.items()}
        if name in _IN_LISTS or (name == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise self._error("must be a list of schemas", path)
            return [self._check(inner, (*path, str(i))) for i, inner in enumerate(value)]
        if name in _ALONE:
            return self._check(value, path)
        return value

    def _has_meaning(self, name: str, value: object, path: tuple[str, ...]) -> bool:
        """Whether the compiler has to see a keyword."""
        if name in ("x-guidance", "uniqueItems", "discriminator"):
            return False
        if name != "format" or not isinstance(value, str):
            return True
        if value in _STANDARD_FORMATS:
            raise self._error(f"the format {value!r} is not supported", (*path, name))
        return value in _FORMATS

    def _check_ref(self, schema: Mapping[str, Any], path: tuple[str, ...]) -> None:
        ref = schema.get("$ref")
        if ref is not None and not (isinstance(ref, str) and ref.startswith("#")):
            raise self._error(
                "'$ref' must name a part of the same schema, such as '#/$defs/name'",
                (*path, "$ref"),
            )

    # oneOf means "exactly one", which is "any" if no two of them can hold together.

    def _excludes(self, options: object) -> bool:
        """Whether each of the schemas excludes all others: by their types, or by a property that
        each requires to have another value."""
        if not isinstance(options, list):
            return False
        resolved = [self._resolved(option) for option in options]
        if any(option is None for option in resolved):
            return False
        schemas = [option for option in resolved if option is not None]
        kinds = [_types(schema) for schema in schemas]
        if all(kinds) and sum(map(len, kinds)) == len(frozenset[str]().union(*kinds)):
            return True
        others = [schema for schema in schemas if _types(schema) != {"null"}]
        if len(others) < len(schemas) - 1:
            return False
        tags = [_tags(schema) for schema in others]
        names = set(tags[0]).intersection(*tags[1:]) if tags else set()
        return any(len({tag[name] for tag in tags}) == len(tags) for name in names)

    def _resolved(self, schema: object) -> Mapping[str, Any] | None:
        """The schema, or the one that it refers to; None if that is not known."""
        for _ in range(8):
            if not isinstance(schema, Mapping):
                return None
            ref = schema.get("$ref")
            if not isinstance(ref, str):
                return schema
            schema = self._root
            for step in filter(None, ref.removeprefix("#").split("/")):
                step = step.replace("~1", "/").replace("~0", "~")
                schema = schema.get(step) if isinstance(schema, Mapping) else None
        return None

    def _error(self, reason: str, path: tuple[str, ...]) -> InvalidRequestError:
        place = f" at {shown_path(path)}" if path else ""
        return InvalidRequestError(
            f"Invalid schema in '{self._param}'{place}: {reason}.",
            self._param,
            "invalid_json_schema",
        )


_CLOSED_BELOW = 1e15
_ULPS, _LEAST_STEP = 4, 1e-20


def _close_bounds(schema: dict[str, Any]) -> None:
    """Replace exclusive bounds of numbers by inclusive ones of numbers next to them.

    As text 2.00000000000000001 is above 2, but it is read as 2.0. Also, the compiler lets 1 pass as
    above 1 if the other bound is 1.5. The new bound is a few floats away, not one: the compiler
    takes a bound that is one float from an integer for that integer. Inclusive bounds that close to
    an integer are moved as well.
    """
    for name, inclusive, sign, nearest in (
        ("exclusiveMinimum", "minimum", 1, max),
        ("exclusiveMaximum", "maximum", -1, min),
    ):
        bound, other = schema.get(name), schema.get(inclusive)
        bounds = []
        if _is_number(bound) and abs(bound) < _CLOSED_BELOW:
            bounds.append(_moved(bound, sign))
            del schema[name]
        if _is_number(other):
            bounds.append(_moved(other, sign) if _is_next_to_integer(other) else other)
        if bounds:
            schema[inclusive] = nearest(bounds)


def _is_next_to_integer(bound: float) -> bool:
    if not abs(bound) < _CLOSED_BELOW:  # what JSON calls Infinity or NaN, too
        return False
    return 0 < abs(bound - round(bound)) <= 2 * math.ulp(bound)


def _moved(bound: float, sign: int) -> float:
    return bound + sign * max(_ULPS * math.ulp(bound), _LEAST_STEP)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of the valid values, with integers as numbers; empty if any may be valid."""
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return frozenset()
    return frozenset("number" if name == "integer" else name for name in names)


def _tags(schema: Mapping[str, Any]) -> dict[str, str]:
    """Required properties of an object that have only one valid value, as JSON."""
    properties, required = schema.get("properties"), schema.get("required")
    if _types(schema) != {"object"} or not isinstance(properties, Mapping):
        return {}
    found = {}
    for name in required if isinstance(required, list) else ():
        inner = properties.get(name) if isinstance(name, str) else None
        if isinstance(inner, Mapping):
            values = [inner["const"]] if "const" in inner else inner.get("enum")
            if isinstance(values, list) and len(values) == 1:
                found[name] = json.dumps(values[0], sort_keys=True)
    return found


def shown_path(path: Sequence[str]) -> str:
    """("properties", "a", "items") -> properties.a.items, shortened."""
    return ".".join(path)[:200]


# ---- Regular expressions, for a place between slashes.


def _literal(text: str) -> str:
    """A regular expression for exactly this text. re.escape also escapes what Rust refuses."""
    return re.sub(r"[\\.^$*+?()\[\]{}|\-&~#/]", lambda found: "\\" + found[0], text)


def _escaped_regex(pattern: str) -> str:
    """The pattern with slashes and line breaks escaped. The compiler ignores anchors at its ends,
    as the whole text has to match."""
    return _REGEX_PART.sub(_escape_part, pattern)


_REGEX_PART = re.compile(r"\\.|/|\n|\r", re.DOTALL)


def _escape_part(found: re.Match[str]) -> str:
    escapes = {"/": "\\/", "\n": "\\n", "\r": "\\r", "\\\n": "\\n", "\\\r": "\\r"}
    return escapes.get(found[0], found[0])
