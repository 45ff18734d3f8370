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
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard
from urllib.parse import unquote

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

_STANDARD_FORMATS = frozenset({
    "idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template",
    "json-pointer", "relative-json-pointer", "regex",
})  # fmt: skip
"""Formats of the standard that cannot be enforced. All others, such as OpenAPI's int32, are remarks
to the reader of a schema."""

_UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "uniqueItems", "$dynamicRef", "$recursiveRef",
})  # fmt: skip

_IN_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_IN_LISTS = frozenset({"anyOf", "allOf", "oneOf", "prefixItems"})
_ALONE = frozenset({"items", "additionalProperties", "additionalItems"})
"""Keywords whose value has schemas: a map of them, a list of them, one (`items` also a list)."""

Schema = Mapping[str, Any] | bool


def json_object(*, param: str = "grammar") -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, param=param)


def json_schema(
    schema: Schema, *, param: str = "grammar", whitespace: str | None = None
) -> Grammar:
    """JSON that is valid by a schema.

    whitespace: a regular expression of what may be between the tokens of JSON; None: see above.
    Raises InvalidRequestError naming `param`, and the keyword that cannot be honoured and its path.
    """
    rule = json_rule(schema, param=param, whitespace=whitespace)
    return Grammar(f"start: {rule}", param=param)


def regex(pattern: str, *, param: str = "grammar") -> Grammar:
    """A text that matches a regular expression of Rust's syntax as a whole."""
    _check_text(pattern, param)
    return Grammar(f"start: /{_escaped_regex(pattern)}/", param=param)


def choice(options: Sequence[str], *, param: str = "grammar") -> Grammar:
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
    return Grammar(f"start: /{either}/", param=param)


def lark(text: str, *, param: str = "grammar") -> Grammar:
    """A grammar in llguidance's dialect of Lark, or in GBNF (with `::=`), which is converted when
    it is checked."""
    _check_text(text, param)
    return Grammar(text, param=param)


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


FIELDS = frozenset({
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
    "guided_grammar", "guided_whitespace_pattern",
})  # fmt: skip
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


_OF_SCHEMAS = frozenset({
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "$ref",
    "anyOf", "oneOf", "allOf", "$defs", "definitions", "$schema",
})  # fmt: skip
"""Keywords of a schema that show that it stands where a format should."""


def _response_format(form: Mapping[str, Any]) -> Grammar:
    param = "response_format"
    if form["type"] == "json_object":
        schema = form.get("schema")  # as in the APIs of Together, Fireworks and llama.cpp
        if schema is None or schema == {}:
            return json_object(param=param)
        return json_schema(_mapping(schema, "response_format.schema"), param=param)
    inner = form.get("json_schema")
    if inner is None:
        raise InvalidRequestError(
            "Missing required parameter: 'response_format.json_schema'.",
            "response_format.json_schema",
            "missing_required_parameter",
        )
    schema = _mapping(inner, "response_format.json_schema").get("schema")
    if schema is None and not _OF_SCHEMAS.isdisjoint(inner):
        keyword = min(_OF_SCHEMAS.intersection(inner))
        raise InvalidRequestError(
            f"The keyword {keyword!r} in 'response_format.json_schema' belongs to a schema; put it "
            "into 'response_format.json_schema.schema'.",
            "response_format.json_schema.schema",
            "missing_required_parameter",
        )
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


def json_rule(
    schema: Schema,
    *,
    param: str = "grammar",
    whitespace: str | None = None,
    lenient: bool = False,
) -> str:
    """The right side of a Lark rule for JSON that is valid by a schema: `%json {...}`.

    lenient: what cannot be enforced is left out, see `loosened`.
    Raises what json_schema raises.
    """
    if not isinstance(schema, Mapping | bool):
        message = f"'{param}' must be a JSON schema: an object, or true."
        if hasattr(schema, "model_json_schema"):
            message += " That of a pydantic model is its model_json_schema()."
        raise InvalidRequestError(message, param, "invalid_type")
    _check_size(schema, param)
    checked: Any = {} if schema is True else _Schema(schema, param, lenient=lenient).checked()
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


# ---- Schemas: what cannot be honoured is refused, what has no meaning is removed. The work is
# ---- linear in the size of a schema: short ones are checked while streams wait.


def loosened(schema: Mapping[str, Any], *, param: str = "grammar") -> dict[str, Any]:
    """A schema by which at least the same values are valid, without what cannot be enforced. (Only
    the property that a `discriminator` names becomes required.)

    Raises InvalidRequestError for a schema that is too deep or too large.
    """
    _check_size(schema, param)
    return _Schema(schema, param, lenient=True).checked()


class _Schema:
    """A schema that is being checked.

    param: the request's field.
    lenient: what cannot be honoured is left out instead of refused.
    """

    def __init__(self, root: Schema, param: str, *, lenient: bool = False) -> None:
        self._root = root
        self._param = param
        self._lenient = lenient
        # Of parts of the root, by id or reference: many may refer to the same one.
        self._targets: dict[str, object] = {}
        self._kinds: dict[int, frozenset[str]] = {}
        self._tags: dict[int, dict[str, frozenset[str]]] = {}
        self._of_tag: dict[tuple[int, str, int], frozenset[str]] = {}
        self._num_looks = 0

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
            self._refuse("must be an object, or true or false", path)
            return {}
        checked: dict[str, Any] = {}
        for name, value in schema.items():
            inner = (*path, name)
            if self._has_meaning(name, value) and self._can_be_honoured(name, value, inner):
                checked[name] = self._check_keyword(name, value, inner)
        if schema.get("type") != "integer":
            _close_bounds(checked)
        if self._lenient:
            _loosen_names(schema, checked)
        self._check_count(checked, path)
        _add_pattern(checked)
        if "oneOf" in checked:
            self._check_one_of(schema, checked)
        return checked

    def _check_keyword(self, name: str, value: Any, path: tuple[str, ...]) -> Any:
        if name == "pattern" and isinstance(value, str):
            return _flat_classes(value)
        if name in _IN_MAPS:
            named = _flat_classes if name == "patternProperties" else str
            return {named(key): self._check(inner, (*path, key)) for key, inner in value.items()}
        if name in _IN_LISTS or (name == "items" and isinstance(value, list)):
            return [self._check(inner, (*path, str(i))) for i, inner in enumerate(value)]
        if name in _ALONE:
            return self._check(value, path)
        if name in _BOUNDS and _is_number(value):
            return _exact(value, up=_BOUNDS[name])
        return value

    def _has_meaning(self, name: str, value: object) -> bool:
        """Whether a keyword says anything about the valid values. An unknown "$schema" would be
        looked up."""
        if name in ("x-guidance", "discriminator", "$schema"):
            return False
        if name == "uniqueItems":
            return bool(value)
        if name == "propertyNames":
            return not _allows_all_names(value)
        if name == "format" and isinstance(value, str):
            return value in _FORMATS or value in _STANDARD_FORMATS
        return True

    def _can_be_honoured(self, name: str, value: object, path: tuple[str, ...]) -> bool:
        """Else it is refused, or left out."""
        reason = self._why_not(name, value)
        if reason:
            self._refuse(reason, path)
        return not reason

    def _why_not(self, name: str, value: object) -> str:
        """Why a keyword cannot be honoured; empty if it can, as far as is checked here."""
        if name in _UNSUPPORTED:
            return f"the keyword {name!r} is not supported"
        if name == "format" and isinstance(value, str) and value in _STANDARD_FORMATS:
            return f"the format {value!r} is not supported"
        if name == "$ref":
            if not (isinstance(value, str) and value.startswith("#")):
                return "'$ref' must name a part of the same schema, such as '#/$defs/name'"
            if self._lenient and value.startswith("#/") and self._target(value) is None:
                return f"there is no {value[:100]!r} in the schema"
        if name in _IN_MAPS and not isinstance(value, Mapping):
            return "must be an object of schemas"
        if name in _IN_LISTS and not isinstance(value, list):
            return "must be a list of schemas"
        if name == "required" and not _is_list_of_names(value):
            return "must be a list of names"
        if name == "type" and not _are_types(value):
            return f"must be one of {', '.join(_TYPES)}, or a list of these"
        if name in ("const", "enum", "multipleOf") and (number := _inexact_number(value)):
            return f"the number {number} is not one that a double can be; use a string"
        patterns = list(value) if name == "patternProperties" and isinstance(value, Mapping) else []
        patterns += [value] if name == "pattern" and isinstance(value, str) else []
        return _LOOKS_AROUND if any(map(_looks_around, patterns)) else ""

    def _check_count(self, checked: dict[str, Any], path: tuple[str, ...]) -> None:
        """minProperties counts members, and the compiler does not see that two have one name."""
        least = checked.get("minProperties")
        if not isinstance(least, int):
            return
        required, others = checked.get("required", ()), checked.get("additionalProperties", True)
        if least <= len(set(required)):
            del checked["minProperties"]
        elif least > 1 and (others is not False or "patternProperties" in checked):
            reason = "may be more than 1 only if it is no more than the required properties"
            self._refuse(reason, (*path, "minProperties"))
            del checked["minProperties"]

    # oneOf means "exactly one", which is "any" if no two of them can hold together.

    def _check_one_of(self, schema: Mapping[str, Any], checked: dict[str, Any]) -> None:
        options, found = schema["oneOf"], checked["oneOf"]
        tag = _discriminator(schema)
        if tag and self._tells_apart(options, tag):
            # By OpenAPI each of them has the tag, although pydantic does not call one with a
            # default required.
            found = [{**each, "required": [*each.get("required", ()), tag]} for each in found]
        elif not (self._lenient or self._excludes(options)):
            return
        del checked["oneOf"]
        if "anyOf" not in checked:
            checked["anyOf"] = found
        elif not self._lenient:
            checked["allOf"] = [*checked.get("allOf", ()), {"anyOf": found}]

    def _excludes(self, options: Sequence[object]) -> bool:
        """Whether each of the schemas excludes all others: by their types, or by a property that
        each requires to have other values."""
        resolved = [self._resolved(option) for option in options]
        schemas = [option for option in resolved if option is not None]
        if len(schemas) < len(resolved):
            return False
        kinds = [self._types(schema) for schema in schemas]
        if all(kinds) and self._are_disjoint(kinds):
            return True
        others = [schema for schema in schemas if self._types(schema) != {"null"}]
        if len(others) < len(schemas) - 1:
            return False
        tags = [self._required_tags(schema) for schema in others]
        names = set(tags[0]).intersection(*tags[1:]) if tags else set()
        return any(self._are_disjoint([tag[name] for tag in tags]) for name in names)

    def _tells_apart(self, options: Sequence[object], tag: str) -> bool:
        """Whether the values of a property tell the schemas apart, all of which have it."""
        values = [self._values(option, tag, 4) for option in options]
        return all(values) and self._are_disjoint(values)

    def _values(self, option: object, tag: str, depth: int) -> frozenset[str]:
        """The values of a property by a schema, which may be a choice itself; empty if any may be
        valid."""
        schema = self._resolved(option)
        self._num_looks += 1
        if schema is None or depth == 0 or self._num_looks > _MAX_LOOKS:
            return frozenset()
        known = id(schema), tag, depth
        if known not in self._of_tag:
            self._of_tag[known] = self._found_values(schema, tag, depth)
            self._num_looks += len(self._of_tag[known])
        return self._of_tag[known]

    def _found_values(self, schema: Mapping[str, Any], tag: str, depth: int) -> frozenset[str]:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and self._types(schema) == {"object"}:
            return _named_values(properties.get(tag))
        inner = schema.get("oneOf") or schema.get("anyOf")
        if not isinstance(inner, list):
            return frozenset()
        values = [self._values(each, tag, depth - 1) for each in inner]
        return frozenset[str]().union(*values) if all(values) else frozenset()

    def _are_disjoint(self, sets: Sequence[frozenset[str]]) -> bool:
        """Whether no two of these have a common member; False if too many were looked at."""
        size = sum(map(len, sets))
        self._num_looks += size
        return self._num_looks <= _MAX_LOOKS and size == len(frozenset[str]().union(*sets))

    def _types(self, schema: Mapping[str, Any]) -> frozenset[str]:
        """The types of the valid values, with integers as numbers; empty if any may be valid."""
        found = self._kinds.get(id(schema))
        if found is None:
            named = schema.get("type")
            names = [named] if isinstance(named, str) else named
            if not _is_list_of_names(names):
                names = []
            found = frozenset("number" if name == "integer" else name for name in names)
            self._kinds[id(schema)] = found
        return found

    def _required_tags(self, schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
        """Required properties of an object that have only some valid values, and these as JSON."""
        found = self._tags.get(id(schema))
        if found is None:
            found = self._tags[id(schema)] = {}
            properties, required = schema.get("properties"), schema.get("required")
            if self._types(schema) != {"object"} or not isinstance(properties, Mapping):
                return found
            names = dict.fromkeys(required) if _is_list_of_names(required) else ()
            for name in itertools.islice(names, _MAX_VALUES):
                if values := _named_values(properties.get(name)):
                    found[name] = values
        return found

    def _resolved(self, schema: object) -> Mapping[str, Any] | None:
        """The schema, or the one that it refers to; None if that is not known."""
        for _ in range(8):
            if not isinstance(schema, Mapping):
                return None
            ref = schema.get("$ref")
            if not isinstance(ref, str):
                return schema
            schema = self._target(ref)
        return None

    def _target(self, ref: str) -> object:
        """What a reference names; None if there is no such part."""
        if ref not in self._targets:
            found: object = self._root
            for step in filter(None, unquote(ref.removeprefix("#")).split("/")):
                step = step.replace("~1", "/").replace("~0", "~")
                if isinstance(found, list):
                    is_index = step.isdecimal() and len(step) <= _MAX_DIGITS
                    found = found[int(step)] if is_index and int(step) < len(found) else None
                else:
                    found = found.get(step) if isinstance(found, Mapping) else None
            self._targets[ref] = found
        return self._targets[ref]

    def _refuse(self, reason: str, path: tuple[str, ...]) -> None:
        if not self._lenient:
            raise self._error(reason, path)

    def _error(self, reason: str, path: tuple[str, ...]) -> InvalidRequestError:
        place = f" at {shown_path(path)}" if path else ""
        return InvalidRequestError(
            f"Invalid schema in '{self._param}'{place}: {reason}.",
            self._param,
            "invalid_json_schema",
        )


_TYPES = ("null", "boolean", "object", "array", "number", "string", "integer")


def _are_types(value: object) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


def _allows_all_names(schema: object) -> bool:
    """Whether a schema of names says only that they are strings, as zod's does for any record."""
    if not isinstance(schema, Mapping):
        return schema is True
    rest = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return rest in ({}, {"type": "string"})


_CLOSED_BELOW = 1e15
_ULPS, _MIN_STEP = 4, 1e-20


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
    return bound + sign * max(_ULPS * math.ulp(bound), _MIN_STEP)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


_MAX_VALUES, _MAX_CHARS = 100, 200
"""Most required properties of an option that are looked at to tell options apart, most values of
each, and the longest of these."""

_MAX_DIGITS = 6
"""Of a place in a list of a schema, which has at most MAX_SCHEMA_PARTS."""

_MAX_LOOKS = 4 * MAX_SCHEMA_PARTS
"""Most values that are compared in all: the same options may occur many times."""


def _named_values(schema: object) -> frozenset[str]:
    """The values that a schema lists, as JSON; empty if it does not, or has many or long ones."""
    if not isinstance(schema, Mapping):
        return frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or len(values) > _MAX_VALUES:
        return frozenset()
    found = [_shown_value(value) for value in values]
    return frozenset(found) if all(found) else frozenset()


def _shown_value(value: object) -> str:
    """The value as JSON, where equal numbers are equal; empty if it is long or has parts."""
    if isinstance(value, str):
        return json.dumps(value) if len(value) <= _MAX_CHARS else ""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(_double(value) + 0.0) if isinstance(value, int | float) else ""  # -0.0 is 0.0


def _discriminator(schema: Mapping[str, Any]) -> str:
    """The property that tells the options of a choice apart, as OpenAPI names it; empty if none is
    named."""
    found = schema.get("discriminator")
    name = found.get("propertyName") if isinstance(found, Mapping) else None
    return name if isinstance(name, str) else ""


def _is_list_of_names(value: object) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _loosen_names(schema: Mapping[str, Any], checked: dict[str, Any]) -> None:
    """Of a lenient check: names that are allowed by a pattern that was left out, and required ones
    that are not allowed."""
    if "patternProperties" in schema and "patternProperties" not in checked:
        checked.pop("additionalProperties", None)
    is_closed = checked.get("additionalProperties") is False and "patternProperties" not in checked
    if is_closed and "required" in checked:
        known = checked.get("properties", {})
        checked["required"] = [name for name in checked["required"] if name in known]


# ---- Numbers: the compiler reads doubles, as most readers of JSON do.


_BOUNDS = {
    "minimum": True,
    "exclusiveMinimum": True,
    "maximum": False,
    "exclusiveMaximum": False,
}
"""Bounds of numbers, and whether they are lower ones."""


def _inexact_number(value: object) -> int | None:
    """An integer in a value that a double cannot be; None if there is none. Such as an id of 64
    bits, in the place of which the output would have another one."""
    if isinstance(value, int):
        return value if _double(value) != value else None
    if isinstance(value, Mapping):
        return _inexact_number(list(value.values()))
    for each in value if isinstance(value, list) else ():
        if (found := _inexact_number(each)) is not None:
            return found
    return None


def _double(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf


def _exact(bound: int | float, *, up: bool) -> int | float:
    """The bound, or the nearest double within it: the highest of 64 bits, 2**63 - 1, would be read
    as one that is too high. up: it is a lower bound."""
    if isinstance(bound, float) or _double(bound) == bound or math.isinf(_double(bound)):
        return bound
    near = float(bound)
    if (near < bound) if up else (near > bound):
        near = math.nextafter(near, math.inf if up else -math.inf)
    return int(near)


# ---- Formats of which the compiler allows more than readers do: years from 0000, the 29th of
# ---- February in any year, leap seconds in any minute.


_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_BY_4 = "(0[48]|[2468][048]|[13579][26])"
_DATE = (
    f"({_YEAR}-(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|{_YEAR}-(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    f"|{_YEAR}-02-(0[1-9]|1[0-9]|2[0-8])|([0-9]{{2}}{_BY_4}|{_BY_4}00)-02-29)"
)
_HOUR = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR}:[0-5][0-9](\.[0-9]+)?(Z|[+-]{_HOUR})"
_PATTERNS = {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}


def _add_pattern(checked: dict[str, Any]) -> None:
    """Let a date or time match its own pattern, too."""
    form = checked.get("format")
    pattern = _PATTERNS.get(form) if isinstance(form, str) else None
    if pattern is None or pattern == checked.setdefault("pattern", pattern):
        return
    more, before = {"pattern": pattern}, checked.get("allOf", ())
    if more not in before:  # else the schema was checked already
        checked["allOf"] = [*before, more]


_REGEX_TOKEN = re.compile(r"\\.|\(\?<?[=!]|\(\?P=|[^\\(\[\]]+|.", re.DOTALL)
_LOOKS_AROUND = "regular expressions cannot look around or refer back"


def _looks_around(pattern: str) -> bool:
    """Whether a regular expression has what the compiler's do not have."""
    in_class = False
    for token in _REGEX_TOKEN.findall(pattern):
        if token in "[]":
            in_class = token == "["
        elif not in_class and (token.startswith("(?") or re.fullmatch(r"\\[1-9k]", token)):
            return True
    return False


def _flat_classes(pattern: str) -> str:
    """The pattern with each bracket that begins no class escaped: in `[^[]` the second one is a
    character to JSON Schema, and begins a class within the class to the compiler. One whose
    brackets are all closed may be meant so, as patterns of pydantic are."""
    tokens = _REGEX_TOKEN.findall(pattern)
    depth = 0
    for token in tokens:
        depth = depth + 1 if token == "[" else depth - (token == "]" and depth > 0)
    if depth == 0:
        return pattern
    in_class = False
    for place, token in enumerate(tokens):
        if token == "[" and in_class:
            tokens[place] = r"\["
        elif token in ("[", "]"):
            in_class = token == "["
    return "".join(tokens)


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
