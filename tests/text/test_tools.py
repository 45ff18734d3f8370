"""Grammars of answers with tool calls: whatever they allow is parsed as valid calls."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jsonschema
import pytest

from bros.core import grammars
from bros.core.errors import InvalidRequestError
from bros.core.request import Grammar
from bros.text.answers import ParsedAnswer
from bros.text.chat_format import ChatFormat, ReasoningStart
from bros.text.tokenizer import Tokenizer
from bros.text.tools import NO_TOOLS, Tool, ToolUse
from support import chat_templates
from support.scripted_server import CHATML, make_tokenizer
from support.tier import by_tier, seed
from support.tool_cases import CALLS_BY_FORMAT

llguidance = pytest.importorskip("llguidance")

SCHEMAS: Mapping[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "enum": ["Paris", 'the "old" town', "São Paulo"]},
            "days": {"$ref": "#/$defs/Days"},
        },
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"Days": {"type": "integer", "minimum": 1, "maximum": 14}},
    },
    "get_time": {},
    "set": {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"},
            "names": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
            "at": {
                "type": "object",
                "properties": {"x": {"type": ["null", "integer"]}},
                "additionalProperties": False,
            },
        },
    },
}
TOOLS = tuple(Tool(name, "", schema, strict=True) for name, schema in SCHEMAS.items())
AUTO = ToolUse(tools=TOOLS, allowed=frozenset(SCHEMAS))
REQUIRED = replace(AUTO, required=True)
ANSWER = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}},
    "required": ["done"],
    "additionalProperties": False,
}
WALKS = by_tier(fast=6, long=300)
NEWER = (
    chat_templates.MISTRAL + "{# [ARGS] #}",
    {"[TOOL_CALLS]": True, "[ARGS]": True},
    "",
)
FORMATS = {**CALLS_BY_FORMAT, "mistral, newer": NEWER}


@dataclass
class Model:
    """A model that knows nothing: it writes tokens that a grammar allows, at random."""

    tokenizer: Tokenizer
    format: ChatFormat
    vocabulary: Any

    @classmethod
    def of(cls, template: str, tokens: Mapping[str, bool], reasoning: str = "auto") -> Model:
        tokenizer = make_tokenizer(template, tokens)
        backend = make_tokenizer(template, tokens)._tokenizer.to_str()
        vocabulary = llguidance.LLTokenizer(
            backend, n_vocab=tokenizer.vocab_size + 1, eos_token=[tokenizer.eos_token_id]
        )
        return cls(tokenizer, ChatFormat(tokenizer, reasoning=reasoning), vocabulary)

    def write(self, grammar: Grammar, rng: random.Random) -> list[int]:
        """An output. Markers and quotes are likely, so that it comes to an end."""
        matcher = llguidance.LLMatcher(self.vocabulary, grammar.text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        written: list[int] = []
        likely = {token for text in '"}]),' for token in self.tokenizer.encode(text)}
        likely |= set(range(258, self.tokenizer.vocab_size))
        while not matcher.is_stopped():
            mask = matcher.compute_bitmask()
            allowed = [t for t in range(self.tokenizer.vocab_size) if mask[t // 8] >> (t % 8) & 1]
            if matcher.is_accepting() and (not allowed or rng.random() < 0.2):
                break
            best = [token for token in allowed if token in likely]
            token = rng.choice(best if best and rng.random() < 0.6 else allowed)
            if token == self.tokenizer.eos_token_id:
                break
            assert matcher.consume_token(token)
            written.append(token)
        assert matcher.is_accepting()
        return written

    def read(self, token_ids: Sequence[int], use: ToolUse, start: ReasoningStart) -> ParsedAnswer:
        parsing = self.format.parsing(use, start)
        assert parsing is not None and parsing.parser is not None
        parser, detokenizer, answer = parsing.parser(), parsing.detokenizer(), ParsedAnswer()
        for token_id in token_ids:
            answer.add(parser.push(detokenizer.push_token(token_id)))
        answer.add(parser.finish())
        return answer

    def grammar(
        self, use: ToolUse, answer: Grammar | None, start: ReasoningStart
    ) -> Grammar | None:
        return self.format.grammar(self.format.answer_rules(use, answer), answer, start)

    def answers(
        self,
        use: ToolUse,
        answer: Grammar | None = None,
        start: ReasoningStart = ReasoningStart.NONE,
    ) -> list[ParsedAnswer]:
        grammar = self.grammar(use, answer, start)
        assert grammar is not None
        rng = random.Random(seed(5))
        return [self.read(self.write(grammar, rng), use, start) for _ in range(WALKS)]


def check_calls(answer: ParsedAnswer) -> None:
    for call in answer.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("name", FORMATS)
def test_required_calls_are_valid(name: str) -> None:
    template, tokens, _ = FORMATS[name]
    answers = Model.of(template, tokens).answers(REQUIRED)
    for answer in answers:
        assert answer.calls and not answer.text.strip("\ufdd0")
        check_calls(answer)
    assert len({call.name for answer in answers for call in answer.calls}) > 1


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_is_one_call(name: str) -> None:
    template, tokens, _ = FORMATS[name]
    use = replace(REQUIRED, parallel=False, allowed=frozenset({"get_weather"}))
    for answer in Model.of(template, tokens).answers(use):
        assert [call.name for call in answer.calls] == ["get_weather"]
        check_calls(answer)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_free_answers_are_text_or_valid_calls(name: str, parallel: bool) -> None:
    template, tokens, text = FORMATS[name]
    model = Model.of(template, tokens)
    use = replace(AUTO, parallel=parallel)
    for answer in model.answers(use):
        check_calls(answer)
        assert parallel or len(answer.calls) < 2
    grammar = model.grammar(use, None, ReasoningStart.NONE)
    assert grammar is not None
    matcher = llguidance.LLMatcher(model.vocabulary, grammar.text, log_level=0)
    plain = model.tokenizer.encode("Look: a < b, [1] and {x}.")
    assert matcher.validate_tokens(plain) == len(plain)
    if text:
        wrong = model.tokenizer.encode(text.replace("Paris", "Rome"))
        assert matcher.validate_tokens(wrong) < len(wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_or_an_answer_with_a_grammar_of_its_own(name: str) -> None:
    template, tokens, _ = FORMATS[name]
    model = Model.of(template, tokens)
    answer = grammars.json_schema(ANSWER)
    for found in model.answers(AUTO, answer):
        check_calls(found)
        assert found.calls or json.loads(found.text)["done"] in (True, False)
    grammar = model.grammar(AUTO, answer, ReasoningStart.NONE)
    assert grammar is not None
    matcher = llguidance.LLMatcher(model.vocabulary, grammar.text, log_level=0)
    plain = model.tokenizer.encode('{"done": true}')
    assert matcher.validate_tokens(plain) == len(plain)


@pytest.mark.parametrize("tokens", [{"<think>": False, "</think>": True}, {}])
def test_reasoning_comes_before_the_grammar(tokens: Mapping[str, bool]) -> None:
    model = Model.of(chat_templates.THINKING, tokens)
    answer = grammars.json_schema(ANSWER)
    for use, asked in ((REQUIRED, None), (NO_TOOLS, answer), (AUTO, answer)):
        grammar = model.grammar(use, asked, ReasoningStart.POSSIBLE)
        assert grammar is not None and not grammar.after
        matcher = llguidance.LLMatcher(model.vocabulary, grammar.text, log_level=0)
        call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
        text = '{"done": true}' if use is NO_TOOLS else call
        for begin in ("", "<think>\nHm {.\n</think>\n\n"):
            written = model.tokenizer.encode(begin + text)
            again = llguidance.LLMatcher(model.vocabulary, grammar.text, log_level=0)
            assert again.consume_tokens(written) and again.is_accepting()
        opened = model.grammar(use, asked, ReasoningStart.OPENED)
        assert opened is not None and opened.after == "</think>"
        assert matcher.validate_tokens(model.tokenizer.encode("Hm")) == 0


def test_a_free_answer_needs_no_grammar() -> None:
    model = Model.of(chat_templates.THINKING, {})
    loose = replace(AUTO, tools=tuple(replace(tool, strict=False) for tool in TOOLS))
    for start in ReasoningStart:
        assert model.grammar(NO_TOOLS, None, start) is None
        assert model.grammar(loose, None, start) is None
    answer = grammars.json_object()
    assert model.grammar(NO_TOOLS, answer, ReasoningStart.NONE) is answer


def test_schemas_that_cannot_be_enforced_are_named_if_they_are_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    tool = Tool("f", "", schema, param="tools[0].function.parameters")
    model = Model.of(CHATML, {})
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    for answer in model.answers(use):
        assert all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
    strict = replace(use, tools=(replace(tool, strict=True),))
    with pytest.raises(InvalidRequestError, match="not") as raised:
        model.grammar(strict, None, ReasoningStart.NONE)
    assert raised.value.param == tool.param


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}])
@pytest.mark.parametrize("template", [CHATML, chat_templates.PYTHONIC])
def test_properties_that_cannot_be_enforced_have_any_value(
    template: str, more: Mapping[str, Any]
) -> None:
    """Else a tool of the other ones would lose what it requires."""
    properties = {
        "max-results": {"type": "integer", "maximum": 9},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    }
    tool = Tool("f", "", {"properties": properties, "required": [*properties], **more}, param="p")
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    calls = [call for answer in Model.of(template, {}).answers(use) for call in answer.calls]
    whole = [json.loads(call.arguments) for call in calls]
    assert whole and all(set(arguments) == set(properties) for arguments in whole)
    assert all(arguments["max-results"] <= 9 for arguments in whole)


@pytest.mark.parametrize("template", [CHATML, chat_templates.PYTHONIC])
def test_of_a_property_only_what_cannot_be_enforced_is_left_out(template: str) -> None:
    properties = {
        "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "uniqueItems": True},
        "price": {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*$", "maxLength": 3},
        "pet": {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 1}]},
        "none": {"$ref": "#/$defs/none"},
    }
    tool = Tool("f", "", {"properties": properties, "required": [*properties]}, param="p")
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    calls = [call for answer in Model.of(template, {}).answers(use) for call in answer.calls]
    assert calls
    for call in calls:
        arguments = json.loads(call.arguments)
        assert list(arguments) == list(properties)
        assert set(arguments["tags"]) <= {"x", "y"} and len(arguments["price"]) <= 3
        assert isinstance(arguments["pet"], str)


def test_definitions_are_checked_once_for_all_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a list of tools of some kilobytes would hold up all streams."""
    checked = 0
    check = grammars._Schema._check

    def counting(self: grammars._Schema, schema: object, path: tuple[str, ...]) -> Any:
        nonlocal checked
        checked += 1
        return check(self, schema, path)

    monkeypatch.setattr(grammars._Schema, "_check", counting)
    definitions: dict[str, Any] = {f"d{n}": {} for n in range(500)} | {"bad": {"if": {}}}
    properties = {f"p{n}": {} for n in range(500)}
    tool = Tool("f", "", {"properties": properties, "$defs": definitions})
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    assert Model.of(CHATML, {}).grammar(use, None, ReasoningStart.NONE) is not None
    assert checked <= 3 * (len(properties) + len(definitions)), "not once for each property"


def test_keywords_of_a_schema_that_cannot_be_enforced_are_free() -> None:
    tool = Tool("f", "", {"anyOf": [{"type": "object", "properties": {"a": {}}}]}, param="p")
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    model = Model.of(chat_templates.PYTHONIC, {})
    grammar = model.grammar(use, None, ReasoningStart.NONE)
    assert grammar is not None
    for text in ("[f()]", "[f(a=1)]", '[f(query="x", max-results=[1, {"b": null}])]'):
        matcher = llguidance.LLMatcher(model.vocabulary, grammar.text, log_level=0)
        tokens = model.tokenizer.encode(text)
        assert matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting(), text
        (call,) = model.read(tokens, use, ReasoningStart.NONE).calls
        assert call.name == "f" and isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize("template", [CHATML, chat_templates.PYTHONIC])
def test_arguments_are_an_object(template: str) -> None:
    model = Model.of(template, {})
    for kind in ("string", ["null", "array"], 5):
        tool = Tool("f", "", {"type": kind}, param="p")
        use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
        assert all(call.arguments.startswith("{") for a in model.answers(use) for call in a.calls)
        with pytest.raises(InvalidRequestError, match="object") as raised:
            strict = replace(use, tools=(replace(tool, strict=True),))
            model.grammar(strict, None, ReasoningStart.NONE)
        assert raised.value.param == "p"


@pytest.mark.parametrize("required", [[], ["b"], ["a", "c"], ["a", "b", "c"]])
def test_keywords_are_the_required_ones_and_some_of_the_others(required: list[str]) -> None:
    """In the order of the schema, the required ones first."""
    names = ("a", "b", "c")
    schema = {"properties": {name: {"const": 1} for name in names}, "required": required}
    tool = Tool("f", "", schema, strict=True)
    model = Model.of(chat_templates.PYTHONIC, {})
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    grammar = model.grammar(use, None, ReasoningStart.NONE)
    assert grammar is not None
    for count in range(len(names) + 1):
        for some in itertools.permutations(names, count):
            matcher = llguidance.LLMatcher(model.vocabulary, grammar.text, log_level=0)
            text = f"[f({', '.join(f'{name}=1' for name in some)})]"
            taken = matcher.try_consume_tokens(model.tokenizer.encode(text))
            accepted = taken == len(model.tokenizer.encode(text)) and matcher.is_accepting()
            in_order = sorted(some, key=lambda name: (name not in required, name))
            assert accepted == (set(required) <= set(some) and list(some) == in_order), text


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("defs", [0, 100])
def test_a_grammar_of_very_many_keywords_is_refused_before_it_is_made(
    strict: bool, defs: int
) -> None:
    """10,000 made 900 million characters; so did definitions, which each of them repeats."""
    schema = {
        "properties": {f"p{number}": {"type": "string"} for number in range(20_000)},
        "$defs": {f"d{number}": {"type": "string"} for number in range(defs)},
    }
    tool = Tool("f", "", schema, strict=strict, param="p")
    use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
    model = Model.of(chat_templates.PYTHONIC, {})
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match="more than 262144 bytes"):
        model.grammar(use, None, ReasoningStart.NONE)
    assert tracemalloc.get_traced_memory()[1] < 20e6
    tracemalloc.stop()


def test_the_grammar_of_keywords_grows_with_their_number() -> None:
    sizes = []
    for count in (100, 200):
        schema = {"properties": {f"p{number}": {} for number in range(100, 100 + count)}}
        tool = Tool("f", "", schema, strict=True)
        use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
        grammar = Model.of(chat_templates.PYTHONIC, {}).grammar(use, None, ReasoningStart.NONE)
        assert grammar is not None
        sizes.append(len(grammar.text))
    assert sizes[1] < 2.1 * sizes[0]


def test_keywords_need_named_properties() -> None:
    model = Model.of(chat_templates.PYTHONIC, {})
    for schema in (
        {"anyOf": [{"type": "object"}]},
        {"properties": {"a b": {}}},
        {"properties": {"a": {}}, "required": 5},
    ):
        tool = Tool("f", "", schema, strict=True, param="p")
        use = ToolUse(tools=(tool,), allowed=frozenset({"f"}), required=True)
        with pytest.raises(InvalidRequestError) as raised:
            model.grammar(use, None, ReasoningStart.NONE)
        assert raised.value.param == "p"


def test_a_grammar_in_gbnf_cannot_be_combined() -> None:
    answer = grammars.lark('root ::= "a"', param="guided_grammar")
    with pytest.raises(InvalidRequestError, match="GBNF") as raised:
        Model.of(CHATML, {}).grammar(AUTO, answer, ReasoningStart.NONE)
    assert raised.value.param == "guided_grammar"
