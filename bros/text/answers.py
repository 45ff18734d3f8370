"""From the text of an answer, as it arrives, to its parts: reasoning, text and tool calls.

    text ─▶ reasoning ── <think> ... </think> ──▶ ReasoningPart
               │
               └─▶ calls ── <tool_call>{"name": "f", "arguments": {...}}</tool_call>
                     │        ──▶ CallBegin(f), CallArguments({...}), CallEnd
                     └─ all else ──▶ TextPart

The parts do not depend on how the text is cut into deltas: both stages are automata over its
characters, which hold text only while it may be the beginning of a marker or of a call. What they
hold is at most the head of a call (its name, and arguments that come before it), or whitespace.

A call begins when its name and the beginning of its arguments are known. Whatever has not become a
call by then is text, and stays text; only the head of a call that the length of the output has cut,
behind a marker or another call, is left out. Once it has begun, the arguments are passed on as the
model writes them, character by character, whether they are valid JSON or not: that is for the
client to check, as with OpenAI.

**Control tokens.** Where a marker such as <tool_call> is a token of the model, the detokenizer
writes CONTROL before its text (`TokenTable`), and only that counts as a marker. A model that spells
out "<tool_call>" from a document, letter by letter, writes text.
"""

from __future__ import annotations

import json
import re
import string
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bros.text.tokenizer import CONTROL, IncrementalDetokenizer

# ---- The parts of an answer.


class TextPart(NamedTuple):
    """Text that is shown to the user."""

    text: str


class ReasoningPart(NamedTuple):
    """What the model thinks before it answers, without the markers around it."""

    text: str


class CallBegin(NamedTuple):
    """A tool call.

    number: 0, 1, ... in one answer.
    """

    number: int
    name: str


class CallArguments(NamedTuple):
    """More of the arguments of a call, as JSON text."""

    number: int
    text: str


class CallEnd(NamedTuple):
    """The end of a call. If the output ended within the call, its arguments are incomplete."""

    number: int


AnswerPart = TextPart | ReasoningPart | CallBegin | CallArguments | CallEnd


@dataclass(slots=True)
class ToolCall:
    """A complete call.

    arguments: JSON text, as the model has written it.
    """

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedAnswer:
    """All parts of an answer, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, parts: Sequence[AnswerPart]) -> None:
        for part in parts:
            match part:
                case TextPart(text):
                    self.text += text
                case ReasoningPart(text):
                    self.reasoning += text
                case CallBegin(_, name):
                    self.calls.append(ToolCall(name))
                case CallArguments(number, text):
                    self.calls[number].arguments += text

    def parts(self) -> tuple[AnswerPart, ...]:
        """The parts again, in the order in which answers have them; none if all of it is text."""
        parts: list[AnswerPart] = []
        if not self.reasoning and not self.calls:
            return ()
        if self.reasoning:
            parts.append(ReasoningPart(self.reasoning))
        if self.text:
            parts.append(TextPart(self.text))
        for index, call in enumerate(self.calls):
            parts += CallBegin(index, call.name), CallArguments(index, call.arguments)
            parts.append(CallEnd(index))
        return tuple(parts)


class AnswerParser:
    """Parses one answer. Call `push` for each delta, then `finish`."""

    def __init__(self, reasoning: ReasoningReader | None, calls: CallReader | None) -> None:
        """None: there is nothing of this kind in the answer."""
        self._reasoning = reasoning
        self._calls = calls

    @property
    def in_reasoning(self) -> bool:
        return self._reasoning is not None and self._reasoning.inside

    @property
    def held_space(self) -> str:
        """The white space that is text, unless a call follows it."""
        return "" if self._calls is None else self._calls.held_space

    def push(self, text: str) -> list[AnswerPart]:
        """The parts that this text completes or continues."""
        parts: list[AnswerPart] = []
        if self._reasoning is not None:
            text = self._reasoning.push(text, parts)
        self._forward(text, parts)
        return parts

    def finish(self, *, cut: bool = False) -> list[AnswerPart]:
        """What is held at the end of the output. Call it once. cut: the output is not complete."""
        parts: list[AnswerPart] = []
        if self._reasoning is not None:
            self._forward(self._reasoning.finish(parts), parts)
        if self._calls is not None:
            self._calls.finish(parts, cut=cut)
        return parts

    def _forward(self, text: str, parts: list[AnswerPart]) -> None:
        if not text:
            return
        if self._calls is None:
            _add_text(parts, text)
        else:
            self._calls.push(text, parts)


@dataclass(frozen=True, slots=True)
class AnswerParsing:
    """How the answers of one request are read, see TextGenerator.start. Both fields make a new one
    for each answer.

    parser: None: answers are nothing but text.
    """

    parser: Callable[[], AnswerParser] | None
    detokenizer: Callable[[], IncrementalDetokenizer]


def _add_text(parts: list[AnswerPart], text: str) -> None:
    text = text.replace(CONTROL, "")
    if text:
        parts.append(TextPart(text))


def _add_reasoning(parts: list[AnswerPart], text: str) -> None:
    text = text.replace(CONTROL, "")
    if text:
        parts.append(ReasoningPart(text))


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is a beginning of `marker`, but not all of it."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


# ---- Reasoning.


class ReasoningReader:
    """Separates the reasoning at the beginning of an answer from what follows.

    Whitespace around the markers belongs to neither. Markers elsewhere are text.

    inside: whether what comes next is reasoning.
    """

    def __init__(self, begin: str, end: str, *, opened: bool) -> None:
        """begin, end: the markers. opened: the prompt ends with the first one."""
        self.inside = opened
        self._begin = begin
        self._end = end
        self._opened = opened
        self._state = self._start
        self._held = ""

    def push(self, text: str, parts: list[AnswerPart]) -> str:
        """Adds the reasoning to `parts`; returns the text after it."""
        return self._state(text, parts)

    def finish(self, parts: list[AnswerPart]) -> str:
        """Adds the reasoning that was held; returns the text that was held and is none."""
        held, self._held = self._held, ""
        if not self.inside:
            return held
        _add_reasoning(parts, held.rstrip())
        return ""

    def _start(self, text: str, parts: list[AnswerPart]) -> str:
        held = self._held + text
        rest = held.lstrip()
        if self._begin.startswith(rest) and rest != self._begin:
            self._held = held
            return ""
        self._held = ""
        if rest.startswith(self._begin):
            rest = rest[len(self._begin) :]
        elif not self._opened:
            self._state = self._done
            return held
        self.inside, self._state = True, self._skip
        return self._skip(rest, parts)

    def _skip(self, text: str, parts: list[AnswerPart]) -> str:
        """The whitespace after the first marker."""
        text = text.lstrip()
        if not text:
            return ""
        self._state = self._think
        return self._think(text, parts)

    def _think(self, text: str, parts: list[AnswerPart]) -> str:
        text = self._held + text
        end = text.find(self._end)
        shown = text[:end] if end >= 0 else text[: len(text) - _overlap(text, self._end)]
        shown = shown.rstrip()
        _add_reasoning(parts, shown)
        if end < 0:
            self._held = text[len(shown) :]
            return ""
        self._held, self.inside, self._state = "", False, self._after
        return self._after(text[end + len(self._end) :], parts)

    def _after(self, text: str, parts: list[AnswerPart]) -> str:
        text = text.lstrip()
        if text:
            self._state = self._done
        return text

    def _done(self, text: str, parts: list[AnswerPart]) -> str:
        return text


# ---- JSON, one character at a time.


_SPACE = frozenset(" \t\n\r")
_WORD = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
_MAX_WORD_CHARS = 400
_STRING_CHARS = re.compile(f'[^"\\\\\x00-\x1f{CONTROL}]+')


class JsonScanner:
    """Checks a JSON object or array as its characters arrive.

    state: what is read next: value, key, colon, comma (or the end of an object or array), string,
        escape, hex, word (a number, true, false or null), or complete.
    """

    __slots__ = ("_hex", "_key", "_may_close", "_open", "_word", "state")

    def __init__(self) -> None:
        self.state = "value"
        self._open: list[str] = []
        self._word = ""
        self._key = False
        self._may_close = False
        self._hex = 0

    @property
    def depth(self) -> int:
        """Number of open objects and arrays."""
        return len(self._open)

    def plain(self, text: str, start: int) -> int:
        """Where the characters from `start` on that change nothing end: those of a string."""
        if self.state != "string":
            return start
        found = _STRING_CHARS.match(text, start)
        return start if found is None else found.end()

    def feed(self, char: str) -> bool:
        """Reads the next character; False if no JSON begins with what was read."""
        match self.state:
            case "string":
                return self._in_string(char)
            case "escape":
                self.state = "hex" if char == "u" else "string"
                self._hex = 4
                return char in '"\\/bfnrtu'
            case "hex":
                self._hex -= 1
                self.state = "hex" if self._hex else "string"
                return char in string.hexdigits
            case "word":
                return self._in_word(char)
        if char in _SPACE:
            return self.state != "complete"
        return self._structure(char)

    def _in_string(self, char: str) -> bool:
        if char == '"':
            self.state = "colon" if self._key else "comma"
        elif char == "\\":
            self.state = "escape"
        return char >= " " and char != CONTROL

    def _in_word(self, char: str) -> bool:
        if char not in _SPACE and char not in ",]}":
            self._word += char
            return len(self._word) <= _MAX_WORD_CHARS
        if not _WORD.fullmatch(self._word):
            return False
        self.state = "comma"
        return char in _SPACE or self._structure(char)

    def _structure(self, char: str) -> bool:
        """A character that is neither whitespace nor within a string or word."""
        may_close, self._may_close = self._may_close, False
        match self.state:
            case "value" if char in "{[":
                self._open.append(char)
                self.state = "key" if char == "{" else "value"
                self._may_close = True
                return True
            case "value" if self._open and char == '"':
                self.state, self._key = "string", False
                return True
            case "value" if self._open and (char in "-tfn" or char in string.digits):
                self.state, self._word = "word", char
                return True
            case "value" | "key" if may_close and char in "]}":
                return self._close(char)
            case "key" if char == '"':
                self.state, self._key = "string", True
                return True
            case "colon" if char == ":":
                self.state = "value"
                return True
            case "comma" if char == ",":
                self.state = "key" if self._open[-1] == "{" else "value"
                return True
            case "comma" if char in "]}":
                return self._close(char)
        return False

    def _close(self, char: str) -> bool:
        matches = self._open.pop() == ("{" if char == "}" else "[")
        self.state = "comma" if self._open else "complete"
        return matches


# ---- The three ways in which calls are written.


class _Call(ABC):
    """Reads one call.

    name: once the arguments begin; then the call has begun.
    complete: the call has ended.
    text: what was read before the call has begun.
    in_arguments: what comes next belongs to the arguments.
    """

    def __init__(self, is_name: Callable[[str], bool]) -> None:
        self.name: str | None = None
        self.complete = False
        self.text: list[str] = []
        self.in_arguments = True
        self._arguments: list[str] = []
        self._is_name = is_name

    def take(self) -> str:
        """The arguments that were read since the last time, as JSON text."""
        arguments = "".join(self._arguments)
        self._arguments.clear()
        return arguments

    @abstractmethod
    def feed(self, text: str, start: int) -> int | None:
        """Read one or more characters from `start` on. Returns where the next ones begin, or None
        if the first of them does not belong to a call."""


class _JsonCall(_Call):
    """{"name": "f", "arguments": {...}}, in any order; other members are ignored.

    "parameters" is another name of "arguments". They may also be a string with the JSON in it.
    """

    def __init__(self, is_name: Callable[[str], bool], *, may_lack_arguments: bool) -> None:
        super().__init__(is_name)
        self._may_lack = may_lack_arguments
        self._scanner = JsonScanner()
        self._key = ""
        self._item: list[str] = []  # the key or value of the object that is being read
        self._item_is = ""
        self._found: dict[str, str] = {}
        self.in_arguments = False

    def feed(self, text: str, start: int) -> int | None:
        scanner = self._scanner
        end = scanner.plain(text, start)
        if end > start:
            self._keep(text[start:end])
            return end
        char, state, depth = text[start], scanner.state, scanner.depth
        if (not depth and char == "[") or not scanner.feed(char):
            return None
        if self.in_arguments:
            self._keep(char)
            self.in_arguments = scanner.depth > 1
        elif self.name is None:
            if not self._read(char, state, depth):
                return None
            self.text.append(char)
        self.complete = scanner.state == "complete"
        return start + 1

    def _keep(self, text: str) -> None:
        if self.in_arguments:
            self._arguments.append(text)
        elif self.name is None:
            self.text.append(text)
            self._item.append(text)

    def _read(self, char: str, state: str, depth: int) -> bool:
        """Read a character of the head. state, depth: the scanner's before it.

        False if the object is no call.
        """
        scanner = self._scanner
        if depth == 1 and state in ("key", "value") and not char.isspace() and char != "}":
            if self._begins_arguments(char, state):
                return True
            self._item, self._item_is = [char], state
        elif not (depth == 1 and state == "word" and scanner.state != "word"):
            self._item.append(char)
        ended = scanner.depth <= 1 and scanner.state not in ("string", "escape", "hex", "word")
        if not (self._item_is and ended):
            return scanner.state != "complete" or self._end()
        item, kind = "".join(self._item), self._item_is
        self._item_is = ""
        if kind == "key":
            self._key = json.loads(item)
        elif not self._add(self._key, item):
            return False
        return scanner.state != "complete" or self._end()

    def _begins_arguments(self, char: str, state: str) -> bool:
        if state != "value" or char != "{" or self._key not in ("arguments", "parameters"):
            return False
        if "name" not in self._found:
            return False
        self._begin("{")
        self.in_arguments = True
        return True

    def _add(self, key: str, value: str) -> bool:
        if key == "name":
            name = json.loads(value)
            if not isinstance(name, str) or not self._is_name(name):
                return False
            self._found["name"] = name
        elif key in ("arguments", "parameters"):
            decoded = value
            if value.startswith('"'):  # lone surrogates have no UTF-8
                decoded = json.loads(value).encode("utf-8", "replace").decode()
            self._found["arguments"] = "{}" if decoded in ("", "null") else decoded
        if self._found.keys() >= {"name", "arguments"} and self.name is None:
            self._begin(self._found["arguments"])
        return True

    def _end(self) -> bool:
        """The object ends, perhaps before the call has begun."""
        if self.name is None and "name" in self._found and self._may_lack:
            self._begin("{}")
        return self.name is not None

    def _begin(self, arguments: str) -> None:
        self.name = self._found["name"]
        self._arguments.append(arguments)


_NAMED_HEAD = re.compile(
    rf"\s*([\w.:/-]{{1,128}})\s*(?:{CONTROL}?\[CALL_ID\]\w*\s*)?(?:{CONTROL}?\[ARGS\]\s*)?"
)
_MAX_HEAD_CHARS = 300


class _NamedCall(_Call):
    """f{...}, as Mistral's newer models write; [CALL_ID]id and [ARGS] may follow the name."""

    def __init__(self, is_name: Callable[[str], bool]) -> None:
        super().__init__(is_name)
        self._scanner: JsonScanner | None = None

    def feed(self, text: str, start: int) -> int | None:
        char = text[start]
        if self._scanner is None:
            if char != "{":
                self.text.append(char)
                return start + 1 if len(self.text) < _MAX_HEAD_CHARS else None
            found = _NAMED_HEAD.fullmatch("".join(self.text))
            if found is None or not self._is_name(found[1]):
                return None
            self.name, self._scanner = found[1], JsonScanner()
        end = self._scanner.plain(text, start)
        if end == start:
            if not self._scanner.feed(char):
                return None
            end += 1
        self._arguments.append(text[start:end])
        self.complete = self._scanner.state == "complete"
        return end


_PYTHON_HEAD = re.compile(r"\s*([\w.-]{1,128})\s*\(\s*(?:([^\W\d][\w.-]*)\s*=|\))")
_PYTHON_KEY = re.compile(r"\s*([^\W\d][\w.-]*)\s*=")  # properties need not be names of Python
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_PYTHON_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0",
    "\n": "", "\\": "\\", "'": "'", '"': '"',
}  # fmt: skip
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_JSON_BRACKETS = {"[": "[]", "(": "[]", "{": "{}"}


class _PythonCall(_Call):
    """f(a=1, b=[True, 'x']): a call with literals, whose arguments become JSON as they arrive.

    JSON's own true, false and null are read as well. Other words become strings.
    """

    def __init__(self, is_name: Callable[[str], bool]) -> None:
        super().__init__(is_name)
        self._state = self._head
        self._key: list[str] = []
        self._word: list[str] = []
        self._escape = ""
        self._quote = ""
        self._open: list[str] = []
        self._ready = True
        """A value may begin."""
        self._comma = False
        """A comma was read that is written before the next value."""
        self._at_key = False
        """The next value is a key of a dictionary."""

    def feed(self, text: str, start: int) -> int | None:
        return start + 1 if self._state(text[start]) else None

    def _head(self, char: str) -> bool:
        if char not in "=)":
            self.text.append(char)
            return len(self.text) < _MAX_HEAD_CHARS and char != CONTROL
        found = _PYTHON_HEAD.fullmatch("".join(self.text) + char)
        if found is None or not self._is_name(found[1]):
            return False
        self.name = found[1]
        self._write("{")
        if char == ")":
            self._end()
        else:
            self._write(f"{json.dumps(found[2])}: ")
            self._state = self._value
        return True

    def _end(self) -> None:
        self._write("}")
        self.complete = True

    def _next_key(self, char: str) -> bool:
        """After a comma between arguments."""
        self._key.append(char)
        if char == ")":  # after a comma at the end
            self._end()
            return not "".join(self._key[:-1]).strip()
        if char == "=":
            found = _PYTHON_KEY.fullmatch("".join(self._key))
            if found is None:
                return False
            self._write(f", {json.dumps(found[1])}: ")
            self._key, self._ready, self._state = [], True, self._value
        return len(self._key) < _MAX_HEAD_CHARS

    def _value(self, char: str) -> bool:
        """Outside of strings and words."""
        if char.isspace():
            return True
        if char in ",:)]}":
            return self._punctuation(char)
        if not self._ready or char in "=" + CONTROL:
            return False
        self._ready = False
        if char in "[({":
            self._write_value(_JSON_BRACKETS[char][0])
            self._open.append(char)
            self._ready, self._at_key = True, char == "{"
        elif char in "'\"":
            self._write_value('"')
            self._quote, self._state = char, self._in_string
        else:
            self._word, self._state = [char], self._in_word
        return True

    def _punctuation(self, char: str) -> bool:
        if char == ",":
            if self._ready:
                return False
            if not self._open:
                self._state = self._next_key
            self._ready = self._comma = bool(self._open)
            self._at_key = bool(self._open) and self._open[-1] == "{"
            return True
        if char == ":":
            fits = bool(self._open) and self._at_key and not self._ready
            self._write(": ")
            self._ready, self._at_key = True, False
            return fits
        if not self._open:
            if char != ")" or self._ready:
                return False
            self._end()
            return True
        opened = self._open.pop()
        self._write(_JSON_BRACKETS[opened][1])
        self._ready = self._comma = self._at_key = False
        return opened + char in ("[]", "()", "{}")

    def _in_word(self, char: str) -> bool:
        if char in "'\"" and "".join(self._word).lower() in ("r", "b", "u", "f"):
            self._write_value('"')
            self._quote, self._state = char, self._in_string
            return True
        if not (char.isspace() or char in ",:)]}"):
            self._word.append(char)
            return len(self._word) <= _MAX_WORD_CHARS and char != CONTROL
        word = _python_word("".join(self._word))
        self._write_value(word if not self._at_key or word[0] == '"' else json.dumps(word))
        self._state = self._value
        return self._value(char)

    def _in_string(self, char: str) -> bool:
        if self._escape:
            self._in_escape(char)
        elif char == "\\":
            self._escape = char
        elif char == self._quote:
            self._write('"')
            self._state = self._value
        else:
            self._write(json.dumps(char, ensure_ascii=False)[1:-1])
        return char != CONTROL

    def _in_escape(self, char: str) -> None:
        self._escape += char
        kind = self._escape[1]
        if kind in _HEX_ESCAPES:
            digits = self._escape[2:]
            if len(digits) < _HEX_ESCAPES[kind] and (not digits or char in string.hexdigits):
                return
            value = _escaped(self._escape)
        else:
            value = _PYTHON_ESCAPES.get(kind, self._escape)
        self._escape = ""
        self._write(json.dumps(value)[1:-1])

    def _write_value(self, text: str) -> None:
        self._write(", " + text if self._comma else text)
        self._comma = False

    def _write(self, text: str) -> None:
        self._arguments.append(text)


def _escaped(escape: str) -> str:
    r"""The character of \x41; the text itself if it is none."""
    try:
        return chr(int(escape[2:], 16))
    except (ValueError, OverflowError):
        return escape


def _python_word(word: str) -> str:
    """A number or a name of Python as JSON."""
    if word in _PYTHON_WORDS:
        return _PYTHON_WORDS[word]
    if _WORD.fullmatch(word):
        return word
    try:
        number: float = int(word, 0)
    except ValueError:
        try:
            number = float(word)
        except ValueError:
            return json.dumps(word)
    finite = isinstance(number, int) or number - number == 0
    return json.dumps(number) if finite else json.dumps(word)


# ---- Where calls are in an answer.


_NAME = re.compile(r"[\w.:/-]{1,128}")


class CallReader(ABC):
    """Separates the calls of an answer from its text.

    Whitespace before a call, and between calls, belongs to neither.

    Subclasses say how calls begin and follow each other: `begin` is the marker of the first call;
    `bare`, if not empty, also begins one as the first character of an answer.
    """

    bare = ""

    def __init__(
        self,
        begin: str,
        end: str,
        names: Collection[str],
        max_calls: int | None,
        only_calls: bool = False,
    ) -> None:
        """begin, end: the markers; end may be empty. names: of the tools. max_calls: further calls
        are left out; None: there is no limit. only_calls: the answer begins with a call for sure.
        """
        self._begin = begin
        self._end = end
        self._names = names
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._state: Callable[[str, list[AnswerPart]], str] = self._outside
        self._held = ""
        """Text that may be the beginning of a marker, with the whitespace before it."""
        self._raw = ""
        """What was read of a call before `_call`, to become text if it is no call."""
        self._call: _Call | None = None
        self._count = 0
        self._at_start = True
        self._after_end = False

    @property
    def held_space(self) -> str:
        """The white space that is text, unless a call follows it; not that between calls."""
        may_be_text = self._state == self._outside and not (self._after_end or self._only_calls)
        return self._held if may_be_text and self._held.isspace() else ""

    def push(self, text: str, parts: list[AnswerPart]) -> None:
        while text:
            text = self._state(text, parts)

    def finish(self, parts: list[AnswerPart], *, cut: bool = False) -> None:
        """The output has ended. cut: by its length, so that what follows a marker was a call; and
        so was what may be the beginning of a marker, where nothing but calls can come."""
        call = self._call
        is_next = cut and (self._only_calls or self._after_end)
        is_head = cut and (self._only_calls or bool(self._count) or self._begin in self._raw)
        if call is not None and call.name is not None and self._state == self._in_call:
            self._pass_on(call, parts)
            self._note_end(parts)
        elif self._state == self._in_call and call is not None and not is_head:
            _add_text(parts, self._raw + "".join(call.text))
        elif self._state == self._enter and not is_head:
            _add_text(parts, self._raw)
        elif self._state == self._broken:
            self._note_end(parts)
        elif self._state == self._outside and not is_next:
            _add_text(parts, self._held.lstrip() if self._after_end else self._held)
        self._held = ""

    @abstractmethod
    def _enter(self, text: str, parts: list[AnswerPart]) -> str:
        """The state after the first marker; `_raw` has it."""

    @abstractmethod
    def _follow(self, text: str, parts: list[AnswerPart]) -> str:
        """The state after a call."""

    def _is_name(self, name: str) -> bool:
        return _NAME.fullmatch(name) is not None

    def _is_known(self, name: str) -> bool:
        return name in self._names

    def _start_call(self, call: _Call) -> None:
        self._call, self._state = call, self._in_call

    def _leave(self) -> None:
        """Calls have ended; text follows, or another marker."""
        self._held, self._call = "", None
        self._state, self._after_end = self._outside, True

    def _outside(self, text: str, parts: list[AnswerPart]) -> str:
        text, self._held = self._held + text, ""
        if self._after_end:
            text = text.lstrip()
        if self.bare and self._at_start:
            rest = text.lstrip()
            if rest.startswith(self.bare):
                self._at_start = False
                self._raw, self._state = text[: len(text) - len(rest)], self._enter
                return rest
        at = text.find(self._begin)
        if at >= 0:
            shown = text[:at].rstrip()
            self._show(shown, parts)
            end = at + len(self._begin)
            self._raw, self._state = text[len(shown) : end], self._enter
            return text[end:]
        shown = text[: len(text) - _overlap(text, self._begin)].rstrip()
        self._show(shown, parts)
        self._held = text[len(shown) :]
        return ""

    def _show(self, text: str, parts: list[AnswerPart]) -> None:
        if text:
            self._at_start = self._after_end = False
            _add_text(parts, text)

    def _in_call(self, text: str, parts: list[AnswerPart]) -> str:
        call, at = self._call, 0
        assert call is not None
        while at < len(text) and not call.complete:
            begun, end = call.name is not None, call.feed(text, at)
            if call.name is not None and not begun:
                self._note_begin(call.name, parts)
            if end is None:
                return self._malformed(call, text[at:], parts)
            at = end
        if call.name is not None:
            self._pass_on(call, parts)
        if call.complete:
            self._note_end(parts)
            self._call, self._state = None, self._follow
        return text[at:]

    def _malformed(self, call: _Call, rest: str, parts: list[AnswerPart]) -> str:
        if call.name is None:
            self._show(self._raw + "".join(call.text), parts)
            self._leave()
            self._after_end = False
        else:
            self._pass_on(call, parts)
            self._state = self._broken
        return rest

    def _broken(self, text: str, parts: list[AnswerPart]) -> str:
        """The rest of a call whose arguments are not valid."""
        text, self._held = self._held + text, ""
        marker = self._end or self._begin
        at = text.find(marker)
        shown = text[:at] if at >= 0 else text[: len(text) - _overlap(text, marker)]
        if shown and self._call is not None and self._call.in_arguments:
            self._note_arguments(shown.replace(CONTROL, ""), parts)
        if at < 0:
            self._held = text[len(shown) :]
            return ""
        self._note_end(parts)
        self._leave()
        return text[at + len(self._end) :]

    def _pass_on(self, call: _Call, parts: list[AnswerPart]) -> None:
        if arguments := call.take():
            self._note_arguments(arguments, parts)

    def _too_many(self) -> bool:
        return self._max_calls is not None and self._count >= self._max_calls

    def _note_begin(self, name: str, parts: list[AnswerPart]) -> None:
        if not self._too_many():
            parts.append(CallBegin(self._count, name))

    def _note_arguments(self, text: str, parts: list[AnswerPart]) -> None:
        if not self._too_many():
            parts.append(CallArguments(self._count, text))

    def _note_end(self, parts: list[AnswerPart]) -> None:
        if not self._too_many():
            parts.append(CallEnd(self._count))
            self._count += 1

    def _skip_end(self, text: str) -> str | None:
        """The text after whitespace and the last marker, None if it may still come."""
        rest = (self._held + text).lstrip()
        self._held = ""
        if self._end and self._end.startswith(rest) and rest != self._end:
            self._held = rest
            return None
        return rest[len(self._end) :] if rest.startswith(self._end) else rest


class HermesCalls(CallReader):
    """<tool_call>{"name": "f", "arguments": {...}}</tool_call>, repeated."""

    def _enter(self, text: str, parts: list[AnswerPart]) -> str:
        self._start_call(_JsonCall(self._is_name, may_lack_arguments=True))
        return text

    def _follow(self, text: str, parts: list[AnswerPart]) -> str:
        rest = self._skip_end(text)
        if rest is None:
            return ""
        self._leave()
        return rest


class MistralCalls(CallReader):
    """[TOOL_CALLS][{"name": "f", "arguments": {...}}, ...], or [TOOL_CALLS]f{...}, repeated."""

    _in_list = False

    def _enter(self, text: str, parts: list[AnswerPart]) -> str:
        rest = text.lstrip()
        self._raw += text[: len(text) - len(rest)]
        if not rest:
            return ""
        self._in_list = rest[0] == "["
        if not self._in_list:
            self._start_call(_NamedCall(self._is_name))
            return rest
        self._raw += "["
        self._start_call(_JsonCall(self._is_name, may_lack_arguments=True))
        return rest[1:]

    def _follow(self, text: str, parts: list[AnswerPart]) -> str:
        rest = text.lstrip()
        if not rest:
            return ""
        if self._in_list and rest[0] == ",":
            self._raw = ","
            self._start_call(_JsonCall(self._is_name, may_lack_arguments=True))
            return rest[1:]
        self._leave()
        return rest[1:] if self._in_list and rest[0] == "]" else rest


class LlamaCalls(CallReader):
    """{"name": "f", "parameters": {...}} as the whole answer, or after <|python_tag|>; several with
    semicolons between them. An answer may be JSON, too, so only the names of tools make a call."""

    bare = "{"

    def _enter(self, text: str, parts: list[AnswerPart]) -> str:
        self._start_call(_JsonCall(self._is_known, may_lack_arguments=False))
        return text

    def _follow(self, text: str, parts: list[AnswerPart]) -> str:
        rest = text.lstrip()
        if not rest:
            return ""
        if rest[0] in ";,{":
            self._raw = "" if rest[0] == "{" else rest[0]
            return self._enter(rest[len(self._raw) :], parts)
        self._leave()
        return rest


class PythonicCalls(CallReader):
    """[f(a=1), g(b='x')] as the whole answer, or between <|python_start|> and <|python_end|>."""

    bare = "["

    def _enter(self, text: str, parts: list[AnswerPart]) -> str:
        rest = text.lstrip()
        self._raw += text[: len(text) - len(rest)]
        if not rest:
            return ""
        if rest[0] == "[":
            self._raw, rest = self._raw + "[", rest[1:]
        self._start_call(_PythonCall(self._is_known))
        return rest

    def _follow(self, text: str, parts: list[AnswerPart]) -> str:
        rest = text.lstrip()
        if not rest:
            return ""
        if rest[0] == ",":
            self._raw = ","
            self._start_call(_PythonCall(self._is_known))
            return rest[1:]
        self._state = self._close
        return rest[1:] if rest[0] == "]" else rest

    def _close(self, text: str, parts: list[AnswerPart]) -> str:
        rest = self._skip_end(text)
        if rest is None:
            return ""
        self._leave()
        return rest
