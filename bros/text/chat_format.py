"""How a model writes tool calls and reasoning, and how conversations with them become its prompts.

    tools, messages ── conversation ──▶ what its chat template takes
    its answer      ── parsing ───────▶ parts (`answers.py`)

Both follow from the chat template, so that no flags are needed: a template that knows tools also
writes the calls of earlier turns, and with them the markers of its format. If it does not know any,
the tools are described in a system message, and calls are written as Hermes does.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from bros.core.errors import InvalidRequestError
from bros.core.grammars import is_gbnf, short_int
from bros.core.request import Grammar, SamplingParams
from bros.text.answers import (
    AnswerParser,
    AnswerParsing,
    CallReader,
    HermesCalls,
    LlamaCalls,
    MistralCalls,
    PythonicCalls,
    ReasoningReader,
)
from bros.text.json_text import MAX_TOOL_PARTS, JsonParts, excess_of, is_text, write_json
from bros.text.tokenizer import CONTROL, IncrementalDetokenizer, Tokenizer
from bros.text.tools import (
    HERMES_SYNTAX,
    LLAMA3_SYNTAX,
    MISTRAL_SYNTAX,
    NAMED_SYNTAX,
    PYTHONIC_SYNTAX,
    CallGrammar,
    CallSyntax,
    Tool,
    ToolUse,
    literal,
)


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written.

    begin, end: markers around a call or a list of calls; end may be empty.
    syntax: of calls in grammars.
    others: further texts with which a template marks tools and their results.
    """

    name: str
    reader: type[CallReader]
    syntax: CallSyntax
    begin: str
    end: str = ""
    others: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(text for text in (self.begin, self.end, *self.others) if text)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The markers around the reasoning at the beginning of an answer."""

    name: str
    begin: str
    end: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.begin, self.end


HERMES = ToolFormat(
    "hermes",
    HermesCalls,
    HERMES_SYNTAX,
    "<tool_call>",
    "</tool_call>",
    ("<tools>", "</tools>", "<tool_response>", "</tool_response>"),
)
MISTRAL = ToolFormat(
    "mistral",
    MistralCalls,
    MISTRAL_SYNTAX,
    "[TOOL_CALLS]",
    others=(
        "[CALL_ID]",
        "[ARGS]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
        "[TOOL_CONTENT]",
    ),
)
NEWER_MISTRAL = replace(MISTRAL, syntax=NAMED_SYNTAX)
LLAMA3 = ToolFormat("llama3", LlamaCalls, LLAMA3_SYNTAX, "<|python_tag|>")
PYTHONIC = ToolFormat(
    "pythonic", PythonicCalls, PYTHONIC_SYNTAX, "<|python_start|>", "<|python_end|>"
)

_TOOL_FORMATS = MappingProxyType({f.name: f for f in (HERMES, MISTRAL, LLAMA3, PYTHONIC)})

THINK = ReasoningFormat("think", "<think>", "</think>")
MISTRAL_THINK = ReasoningFormat("mistral", "[THINK]", "[/THINK]")

_REASONING_FORMATS = MappingProxyType({f.name: f for f in (THINK, MISTRAL_THINK)})

_PYTHONIC_EXAMPLE = re.compile(r"\[\s*func\w*\(")


def _tool_format_of(source: str) -> ToolFormat | None:
    """The format that a template which knows tools writes; None if it is none of ours."""
    if "<tool_call>" in source and "<function=" not in source and "<arg_key>" not in source:
        return HERMES
    if "[TOOL_CALLS]" in source:
        return NEWER_MISTRAL if "[ARGS]" in source else MISTRAL
    if _PYTHONIC_EXAMPLE.search(source):
        return PYTHONIC
    if "<|python_tag|>" in source or ("ipython" in source and '"parameters"' in source):
        return LLAMA3
    return None


def _reasoning_format_of(source: str) -> ReasoningFormat | None:
    if any(marker in source for marker in THINK.markers):
        return THINK
    return MISTRAL_THINK if any(marker in source for marker in MISTRAL_THINK.markers) else None


SAY_NO_MARKERS = frozenset({"user", "tool"})
"""Roles whose texts have no markers: they are escaped. The model's own have them."""


class ReasoningStart(enum.Enum):
    """Where the reasoning of an answer begins.

    NONE: there is none: the model does not reason, or the prompt has ended it already.
    POSSIBLE: the answer may begin with it.
    OPENED: the prompt ends with its first marker.
    """

    NONE = enum.auto()
    POSSIBLE = enum.auto()
    OPENED = enum.auto()


_END_CHARS = 200
"""More than a marker of reasoning and the whitespace after it."""

_GAP = r"GAP: /[ \n]{0,4}/"


def _nested(answer: Grammar) -> str:
    """A grammar as the right side of a rule. Raises InvalidRequestError."""
    if is_gbnf(answer.text):
        raise InvalidRequestError(
            "A grammar in GBNF cannot be combined with tools or reasoning; write it in Lark.",
            param=answer.param,
        )
    return f"%lark {{\n{answer.text}\n}}"


class ChatFormat:
    """The formats of one model.

    tools: of calls; None: the template knows tools, in a format that bros does not.
    describes_tools: tools are described in a system message, not by the template.
    reasoning: None: answers have no reasoning.
    """

    def __init__(self, tokenizer: Tokenizer, tools: str = "auto", reasoning: str = "auto") -> None:
        """tools, reasoning: names of formats; auto: from the template; reasoning may be none."""
        source = tokenizer.template_source
        knows_tools = tokenizer.template_knows_tools
        found = _tool_format_of(source) if knows_tools else HERMES
        self.tools = found if tools == "auto" else _TOOL_FORMATS[tools]
        writes_hermes = found is HERMES and knows_tools
        self.describes_tools = not knows_tools or (self.tools is HERMES and not writes_hermes)
        if reasoning == "auto":
            self.reasoning = _reasoning_format_of(source)
        else:
            self.reasoning = None if reasoning == "none" else _REASONING_FORMATS[reasoning]
        self._tokenizer = tokenizer
        markers = [
            *(self.tools.markers if self.tools is not None else ()),
            *(self.reasoning.markers if self.reasoning is not None else ()),
        ]
        self._controls = frozenset(
            text for text in markers if tokenizer.added_token(text) is not None
        )
        self._table = tokenizer.table_with(self._controls)
        self._escaper = tokenizer.escaper(self._controls)

    # ---- Prompts.

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Tool],
        *,
        escape: bool = True,
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """(messages, variables) for the chat template.

        messages: as OpenAI has them, with texts as contents.
        escape: texts that read like special tokens stay text (`Tokenizer.escape`), and so do
            markers in what users and tools say. The model's own messages may have markers:
            templates look for them there.

        Raises InvalidRequestError if the model's template does not allow tools.
        """
        names = _names_of_results(messages)
        adapted = [self._adapted(message, names) for message in messages]
        definitions = [tool.definition for tool in tools]
        if escape:
            adapted = [self._escaped(message) for message in adapted]
            definitions = self._tokenizer.escape(definitions, self._escaper)
        if tools and self.tools is None:
            raise InvalidRequestError(
                "The model's chat template writes tool calls in a format that this server does not "
                "know. With --tool-format hermes it describes tools in a system message.",
                param="tools",
                code="unsupported_parameter",
            )
        if not self.describes_tools:
            return adapted, {"tools": definitions} if definitions else {}
        return _described(adapted, definitions), {}

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """As `Tokenizer.render_chat`."""
        return self._tokenizer.render_chat(messages)

    def escape(self, text: str, *, markers: bool = True) -> str:
        """As `Tokenizer.escape`; with `markers` those of calls and reasoning become text, too."""
        return self._tokenizer.escape(text, self._escaper if markers else None)

    def reasoning_start(self, prompt: str) -> ReasoningStart:
        """Where reasoning begins after a rendered prompt."""
        end = prompt[-_END_CHARS:].rstrip()
        if self.reasoning is None or end.endswith(self.reasoning.end):
            return ReasoningStart.NONE
        opened = end.endswith(self.reasoning.begin)
        return ReasoningStart.OPENED if opened else ReasoningStart.POSSIBLE

    def _escaped(self, message: dict[str, Any]) -> dict[str, Any]:
        escape = self._tokenizer.escape
        if message.get("role") in SAY_NO_MARKERS:
            return escape(message, self._escaper)
        escaped = {name: escape(value) for name, value in message.items() if name != "tool_calls"}
        if "tool_calls" in message:
            escaped["tool_calls"] = escape(message["tool_calls"], self._escaper)
        return escaped

    def _adapted(self, message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        adapted = {
            name: value for name, value in message.items() if value is not None or name == "content"
        }
        reasoning = adapted.pop("reasoning", None)
        if reasoning is not None:
            adapted.setdefault("reasoning_content", reasoning)
        calls = adapted.pop("tool_calls", None)
        if calls:
            adapted["content"] = adapted.get("content") or ""
            adapted["tool_calls"] = [self._adapted_call(call) for call in calls]
        call_id = adapted.get("tool_call_id")
        if call_id is not None:
            if adapted.get("role") == "tool" and call_id in names:
                adapted.setdefault("name", names[call_id])
            adapted["tool_call_id"] = self._call_id(call_id)
        return adapted

    def _adapted_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if isinstance(function["arguments"], str):  # in Python they may be an object already
            function["arguments"] = _decoded_arguments(function["arguments"])
        return {**call, "id": self._call_id(call["id"]), "function": function}

    def _call_id(self, call_id: str) -> str:
        """Mistral's templates refuse ids that are not nine letters and digits."""
        if self.call_id_chars is None or (len(call_id) == 9 and call_id.isalnum()):
            return call_id
        return "".join(filter(str.isalnum, call_id))[-9:].rjust(9, "0")

    @property
    def call_id_chars(self) -> int | None:
        """Length of the ids of calls, which have letters and digits only; None: any ids."""
        return 9 if self.tools is not None and self.tools.reader is MistralCalls else None

    # ---- Answers.

    def parsing(self, use: ToolUse, start: ReasoningStart) -> AnswerParsing:
        """How to read answers. Without tools that may be called, calls stay text."""
        if not use.allowed and self.reasoning is None:
            return AnswerParsing(None, self._tokenizer.detokenizer)
        tools = self.tools if use.allowed else None
        max_calls = None if use.parallel else 1

        def parser() -> AnswerParser:
            reasoning = calls = None
            if self.reasoning is not None:
                begin, end = map(self._as_shown, self.reasoning.markers)
                opened = start is ReasoningStart.OPENED
                reasoning = ReasoningReader(begin, end, opened=opened)
            if tools is not None:
                begin, end = self._as_shown(tools.begin), self._as_shown(tools.end)
                calls = tools.reader(begin, end, use.allowed, max_calls, use.required)
            return AnswerParser(reasoning, calls)

        return AnswerParsing(parser, functools.partial(IncrementalDetokenizer, self._table))

    def grammar(
        self, rules: str | None, answer: Grammar | None, start: ReasoningStart
    ) -> Grammar | None:
        """What answers must match, from the first token on; None if they are free.

        rules: of `answer_rules`.
        answer: what the client asks for, the same as there.

        Raises InvalidRequestError if they cannot be combined.
        """
        if rules is None and (answer is None or start is ReasoningStart.NONE):
            return answer
        after = ""
        if start is ReasoningStart.OPENED and self.reasoning is not None:
            after = self.reasoning.end
        if rules is None:
            assert answer is not None
            if after:
                return replace(answer, after=after)
            rules = f"main: {_nested(answer)}"
        if start is ReasoningStart.NONE:
            head = "start: main"
        elif after:
            head = f"start: GAP main\n{_GAP}"
        else:
            head = f"start: (reasoning GAP)? main\n{_GAP}\n{self._reasoning_rules()}"
        param = "tools" if answer is None else answer.param
        return Grammar(f"{head}\n{rules}", after, param)

    def with_reasoning(self, sampling: SamplingParams, start: ReasoningStart) -> SamplingParams:
        """Sampling parameters whose grammar, if there is one, applies after the reasoning; the same
        ones if nothing changes. Raises what `grammar` raises."""
        grammar = self.grammar(None, sampling.grammar, start)
        if grammar is sampling.grammar:
            return sampling
        return sampling.with_changes(grammar=grammar)

    def answer_rules(self, use: ToolUse, answer: Grammar | None) -> str | None:
        """The rules of answers with tool calls, without reasoning; None if they need none.

        answer: what the client asks for; calls are then an alternative to it.

        The work grows with the schemas of the tools. Raises InvalidRequestError naming the field
        that cannot be enforced.
        """
        if self.tools is None or not (use.required or use.allowed):
            return None
        if answer is None and not use.enforced:
            return None
        markers = {"BEGIN": self.tools.begin, "END": self.tools.end, "ARGS": "[ARGS]"}
        grammar = CallGrammar(
            self.tools.syntax, use, {name: self._in_rule(text) for name, text in markers.items()}
        )
        if use.required:
            return grammar.required("main")
        if answer is not None:
            return f"main: calls | {_nested(answer)}\n{grammar.required('calls', marked=True)}"
        return grammar.free("main")

    def _reasoning_rules(self) -> str:
        assert self.reasoning is not None
        begin, end = map(self._in_rule, self.reasoning.markers)
        if begin.startswith("<") and end.startswith("<"):
            return f"reasoning: {begin} THOUGHTS {end}\nTHOUGHTS: /(.|\\n)*/"
        return f"reasoning[lazy]: {begin} /(.|\\n)*/ {end}"

    def _in_rule(self, marker: str) -> str:
        """How a marker is written in a grammar; nothing if it is empty."""
        if marker in self._controls:
            return f"<[{self._tokenizer.added_token(marker)}]>"
        return literal(marker) if marker else ""

    def _as_shown(self, marker: str) -> str:
        return CONTROL + marker if marker in self._controls else marker


def _names_of_results(messages: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Id of a call -> name of its function: some templates want it with the result."""
    return {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }


_MAX_PARTS = JsonParts(MAX_TOOL_PARTS, MAX_TOOL_PARTS, MAX_TOOL_PARTS)


def _decoded_arguments(arguments: str) -> Any:
    """The arguments as an object, as templates expect them. The text itself if it is none, or one
    with very long numbers or lone surrogates, which could not be written. Raises
    InvalidRequestError if they have more than MAX_TOOL_PARTS."""
    if not arguments.strip():
        return {}
    found = excess_of(arguments.encode("utf-8", "surrogatepass"), _MAX_PARTS)
    if found is not None:
        message = (
            f"The arguments of a tool call have {found}; {MAX_TOOL_PARTS} of each are allowed."
        )
        raise InvalidRequestError(message, param="messages")
    try:
        decoded = json.loads(arguments, parse_int=short_int)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(decoded, dict) or ("\\u" in arguments and not is_text(decoded)):
        return arguments
    return decoded


# ---- Tools in messages, for templates that do not know any.


_INTRODUCTION = """\
You can call functions. Between <tools> and </tools> is their list, one JSON object per line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the function", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Several calls follow each other. The result of a call comes between <tool_response> and \
</tool_response>."""


def _described(
    messages: Sequence[dict[str, Any]], definitions: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages without tool calls and results as such, preceded by the definitions."""
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            text = f"<tool_response>\n{message['content'] or ''}\n</tool_response>"
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += "\n" + text
            else:
                plain.append({"role": "user", "content": text, "is_result": True})
        elif message.get("tool_calls"):
            calls = "\n".join(map(_described_call, message["tool_calls"]))
            content = message["content"]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**rest, "content": f"{content}\n{calls}" if content else calls})
        else:
            plain.append(message)
    for message in plain:
        message.pop("is_result", None)
    if not definitions:
        return plain
    lines = "\n".join(write_json(each, ensure_ascii=False) for each in definitions)
    introduction = _INTRODUCTION.format(tools=lines)
    if plain and plain[0]["role"] == "system":
        first = plain[0]["content"] or ""
        return [{**plain[0], "content": f"{first}\n\n{introduction}".lstrip()}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _described_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    shown = write_json(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    return f"<tool_call>\n{shown}\n</tool_call>"
