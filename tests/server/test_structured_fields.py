"""The fields that say what an output must look like: what reaches the engine, what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bros.core import grammars
from bros.core.clock import ManualClock
from bros.core.request import Grammar
from support.scripted_server import Server, assert_envelope

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def schema_format(schema: object, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, **more}}


@pytest.mark.parametrize(
    ("fields", "text", "param"),
    [
        (
            {"response_format": {"type": "json_object"}},
            grammars.json_object().text,
            "response_format",
        ),
        (
            {"response_format": schema_format(SCHEMA, strict=True)},
            grammars.json_schema(SCHEMA).text,
            "response_format",
        ),
        (
            {"response_format": schema_format(SCHEMA, strict=None, description="d")},
            grammars.json_schema(SCHEMA).text,
            "response_format",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
            grammars.json_object().text,
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            grammars.json_schema(SCHEMA).text,
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {}}},
            grammars.json_object().text,
            "response_format",
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            grammars.json_schema(SCHEMA).text,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            grammars.json_schema(SCHEMA, whitespace=" ?").text,
            "structured_outputs.json",
        ),
        (
            {"structured_outputs": {"json_object": True}},
            grammars.json_object().text,
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"regex": "a+/"}, "response_format": {"type": "text"}},
            grammars.regex("a+/").text,
            "structured_outputs.regex",
        ),
        (
            {"structured_outputs": {"choice": ["a", "b.c"]}},
            grammars.choice(["a", "b.c"]).text,
            "structured_outputs.choice",
        ),
        (
            {"structured_outputs": {"grammar": 'start: "x"'}},
            'start: "x"',
            "structured_outputs.grammar",
        ),
        ({"guided_json": SCHEMA}, grammars.json_schema(SCHEMA).text, "guided_json"),
        (
            {"guided_json": True, "guided_whitespace_pattern": ""},
            grammars.json_schema(True, whitespace="").text,
            "guided_json",
        ),
        ({"guided_regex": "a|b"}, grammars.regex("a|b").text, "guided_regex"),
        ({"guided_choice": ["x"]}, grammars.choice(["x"]).text, "guided_choice"),
        ({"guided_grammar": 'root ::= "x"'}, 'root ::= "x"', "guided_grammar"),
    ],
)
async def test_all_spellings_reach_the_engine_as_one_grammar(
    server: Server, fields: dict[str, Any], text: str, param: str
) -> None:
    for ask in (server.chat, server.complete):
        assert (await ask(**fields)).status_code == 200
        grammar = server.last().sampling.grammar
        assert grammar is not None
        assert (grammar.text, grammar.after, grammar.param) == (text, "", param)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"response_format": None, "guided_json": None, "structured_outputs": None},
        {"structured_outputs": {"json": None, "json_object": False}},
        {"guided_whitespace_pattern": " "},
        {"grammar": "", "regex": None, "ebnf": None, "json_schema": None, "structural_tag": None},
    ],
)
async def test_without_them_the_output_is_free(server: Server, fields: dict[str, Any]) -> None:
    assert (await server.chat(**fields)).status_code == 200
    assert server.last().sampling.grammar is None


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "text"),
        (
            {"response_format": {"type": "json_schema"}},
            "response_format.json_schema",
            "Missing required",
        ),
        (
            {"response_format": schema_format({"properties": {"a": {"not": {}}}}, strict=True)},
            "response_format",
            r"at properties.a.not: the keyword 'not'",
        ),
        (
            {"response_format": schema_format([])},
            "response_format.json_schema.schema",
            "Invalid value",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            "response_format.json_schema.schema",
            "put it into 'response_format.json_schema.schema'",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "anyOf": [SCHEMA]},
                }
            },
            "response_format.json_schema.schema",
            "'anyOf'",
        ),
        (
            {"response_format": {"type": "json_object", "schema": {"not": {}}}},
            "response_format",
            "at not: the keyword 'not'",
        ),
        (
            {"response_format": {"type": "json_object", "schema": []}},
            "response_format.schema",
            "Invalid value",
        ),
        ({"grammar": 'root ::= "a"'}, "grammar", "use 'structured_outputs.grammar'"),
        ({"ebnf": 'root ::= "a"'}, "ebnf", "use 'structured_outputs.grammar'"),
        ({"regex": "a+"}, "regex", "use 'structured_outputs.regex'"),
        ({"json_schema": SCHEMA}, "json_schema", "use 'response_format'"),
        ({"json_schema": {}}, "json_schema", "use 'response_format'"),
        ({"structural_tag": "{}"}, "structural_tag", "'structured_outputs.grammar'"),
        ({"guided_json": "{"}, "guided_json", "is not valid JSON"),
        ({"guided_json": "[]"}, "guided_json", "must be a JSON schema"),
        ({"guided_json": '"' + "x" * 2**18}, "guided_json", "more than 262144 bytes"),
        ({"guided_choice": []}, "guided_choice", "list of strings"),
        ({"guided_choice": ["a", 3]}, "guided_choice[1]", "string"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "guided_json",
            "one grammar only; this request has 'response_format', 'guided_json'",
        ),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs.choice",
            "one grammar only",
        ),
        ({"guided_grammar": "x" * (2**18 + 1)}, "guided_grammar", "more than 262144 bytes"),
    ],
)
async def test_what_is_wrong_is_named(
    server: Server, fields: dict[str, Any], param: str, says: str
) -> None:
    error = assert_envelope(await server.chat(**fields), 400)
    assert error["param"].startswith(param) and says in error["message"], error


class SlowChecker:
    """A GrammarChecker that takes a second and finds nothing wrong."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.urgent: list[bool] = []

    def knows(self, tenant: str, grammar: Grammar) -> bool:
        return False

    async def check(self, tenant: str, grammar: Grammar, *, urgent: bool) -> None:
        self._clock.advance(1.0)
        self.urgent.append(urgent)


async def test_real_time_grammars_are_urgent_and_the_wait_for_their_check_is_known() -> None:
    clock = ManualClock()
    checker: Any = SlowChecker(clock)
    server = Server(clock=clock, grammars=checker)
    async with server.http:
        for tier in ("default", "flex"):
            await server.chat(response_format={"type": "json_object"}, service_tier=tier)
            assert server.last().checked_s == 1.0
        await server.chat()
        assert server.last().checked_s == 0.0
    assert checker.urgent == [True, False]
