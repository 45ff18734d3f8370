r"""The grammar of templates: text with placeholders between double braces.

    template    = (text | placeholder)*
    placeholder = "{{" ["input:" | "output:"] name [":" sampling] "}}"

Names are identifiers; white space between the parts of a placeholder is ignored. Everything else
is literal text, including single braces and "}}", so JSON examples need no escapes:

    \{{       the text {{
    \\{{x}}   a backslash and a placeholder; backslashes are escapes only directly before {{
    {{{x}}}   a brace, a placeholder, a brace: the last two of several open braces open it

A name without a role has the role that the call's parameters give it; the default is input.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bros.core.errors import InvalidRequestError
from bros.semantic.schema import MAX_PARAMETERS, Role

_BRACES = re.compile(r"\{+")
# The lookbehind makes a match start at the first backslash of a run, to keep the time linear.
_LITERAL_OPEN = re.compile(r"(?<!\\)(\\*)\{\{")
_NAME = r"[^\W\d]\w*"
_INSIDE = re.compile(
    rf"\s*(?:(?P<role>input|output)\s*:\s*)?(?P<name>{_NAME})\s*(?::\s*(?P<sampling>{_NAME})\s*)?\}}\}}"
)
_BACKSLASHES_AT_END = re.compile(r"(?<!\\)(\\+)(\{?)\Z")
_SHOWN_CHARS = 40

MAX_OPENINGS = MAX_PARAMETERS
"""Most places with two open braces in a template, or in all messages of a call: it has no more
placeholders. Each takes some 10 µs until it is part of a graph, of which the event loop does a
half."""


@dataclass(frozen=True, slots=True)
class Text:
    """Literal text in a template."""

    text: str


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A placeholder in a template.

    role: None if the template does not give one.
    sampling: name of a set of sampling parameters; only outputs have one.
    begins_answer: the model's answer to a conversation begins with this output, so it may think
        first; set where the conversation is rendered.
    """

    name: str
    role: Role | None = None
    sampling: str | None = None
    begins_answer: bool = field(default=False, compare=False)


Piece = Text | Placeholder


def parse_template(source: str, param: str = "template") -> tuple[Piece, ...]:
    """The pieces of a template in order; no Text is empty or adjacent to another Text.

    Raises InvalidRequestError (`param`) for more than MAX_OPENINGS, and with line and column of a
    malformed or unclosed placeholder. `with_roles` checks the placeholders against each other.
    """
    pieces: list[Piece] = []
    text: list[str] = []
    at = num_openings = 0
    while (opening := source.find("{{", at)) >= 0:
        num_openings += 1
        if num_openings > MAX_OPENINGS:
            raise too_many_openings(param)
        before = source[at:opening]
        plain = before.rstrip("\\")
        num_backslashes = len(before) - len(plain)
        text += plain, "\\" * (num_backslashes // 2)
        if num_backslashes % 2:
            text.append("{{")
            at = opening + 2
            continue
        braces = _BRACES.match(source, opening)
        assert braces is not None
        text.append(braces[0][2:])
        placeholder, at = _placeholder(source, braces.end(), param)
        _add_text(pieces, text)
        pieces.append(placeholder)
        text = []
    text.append(source[at:])
    _add_text(pieces, text)
    return tuple(pieces)


def too_many_openings(param: str) -> InvalidRequestError:
    """The error about a call with more than MAX_OPENINGS."""
    message = f"A call has at most {MAX_OPENINGS} placeholders, and braces that look like one."
    return InvalidRequestError(message, param=param)


def render_template(pieces: Sequence[Piece]) -> str:
    """The template that `parse_template` parses into these pieces, if no Text is empty or
    adjacent to another Text."""
    parts: list[str] = []
    for piece, following in itertools.zip_longest(pieces, pieces[1:]):
        if isinstance(piece, Placeholder):
            parts.append(_placeholder_source(piece))
            continue
        text = _LITERAL_OPEN.sub(r"\1\1\\{{", piece.text)
        if isinstance(following, Placeholder):
            text = _BACKSLASHES_AT_END.sub(r"\1\1\2", text)
        parts.append(text)
    return "".join(parts)


def join_texts(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """The pieces with adjacent texts joined."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and isinstance(piece, Text) and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return tuple(joined)


def with_roles(
    pieces: Sequence[Piece], roles: Mapping[str, Role | None], param: str = "template"
) -> tuple[Piece, ...]:
    """The same pieces with a role in each placeholder. roles: those that the parameters give.

    Raises InvalidRequestError (`param`) if a name has two roles, an output occurs twice or directly
    after another output, or an input has sampling parameters.
    """
    known = _roles(pieces, roles, param)
    resolved = tuple(
        replace(piece, role=known[piece.name]) if isinstance(piece, Placeholder) else piece
        for piece in pieces
    )
    seen: set[str] = set()
    before: Piece | None = None
    for piece in resolved:
        if isinstance(piece, Placeholder):
            if piece.role is Role.OUTPUT:
                _check_output(piece, before, seen, param)
                seen.add(piece.name)
            elif piece.sampling is not None:
                message = f"The input {piece.name!r} cannot have sampling parameters."
                raise InvalidRequestError(message, param=param)
        before = piece
    return resolved


def is_output(piece: Piece | None) -> bool:
    """Whether it is an output placeholder. Its role must be known."""
    return isinstance(piece, Placeholder) and piece.role is Role.OUTPUT


def _placeholder(source: str, start: int, param: str) -> tuple[Placeholder, int]:
    """The placeholder whose inner text begins at `start`, and the position after it."""
    found = _INSIDE.match(source, start)
    if found is None:
        raise InvalidRequestError(_syntax_error(source, start), param=param)
    role = found["role"] and Role(found["role"])
    if role is Role.INPUT and found["sampling"]:
        message = f"{_position(source, start)}: an input cannot have sampling parameters."
        raise InvalidRequestError(message, param=param)
    return Placeholder(found["name"], role or None, found["sampling"]), found.end()


def _syntax_error(source: str, start: int) -> str:
    place = _position(source, start)
    end = source.find("}}", start)
    following = source.find("{{", start)
    if end < 0 or 0 <= following < end:
        return f"{place}: {{{{ is not closed by }}}}. Write \\{{{{ for two braces that are text."
    inside = source[start:end].strip()
    if len(inside) > _SHOWN_CHARS:
        inside = inside[:_SHOWN_CHARS] + "..."
    return (
        f"{place}: {inside!r} is not a placeholder, which is written {{{{name}}}}, "
        "{{input:name}}, {{output:name}} or {{output:name:sampling}} with names of letters, digits "
        "and underscores. Write \\{{ for two braces that are text."
    )


def _position(source: str, start: int) -> str:
    """Line and column, counted from 1, of the two braces before `start`."""
    braces = start - 2
    line = source.count("\n", 0, braces) + 1
    column = braces - (source.rfind("\n", 0, braces) + 1) + 1
    return f"Line {line}, column {column}"


def _add_text(pieces: list[Piece], parts: list[str]) -> None:
    if text := "".join(parts):
        pieces.append(Text(text))


def _placeholder_source(placeholder: Placeholder) -> str:
    parts = (placeholder.role, placeholder.name, placeholder.sampling)
    return "{{" + ":".join(part for part in parts if part is not None) + "}}"


def _roles(
    pieces: Sequence[Piece], roles: Mapping[str, Role | None], param: str
) -> dict[str, Role]:
    """Name -> role, from the template or the parameters; the default is input."""
    known = {name: role for name, role in roles.items() if role is not None}
    for piece in pieces:
        if isinstance(piece, Placeholder) and piece.role is not None:
            if known.setdefault(piece.name, piece.role) is not piece.role:
                other = known[piece.name]
                message = (
                    f"The placeholder {piece.name!r} is an {piece.role} here and an {other} in "
                    "the parameters or elsewhere in the template."
                )
                raise InvalidRequestError(message, param=param)
    names = (piece.name for piece in pieces if isinstance(piece, Placeholder))
    return {name: known.get(name, Role.INPUT) for name in names}


def _check_output(output: Placeholder, before: Piece | None, seen: set[str], param: str) -> None:
    if output.name in seen:
        message = f"The output {output.name!r} occurs twice; each is generated once."
        raise InvalidRequestError(message, param=param)
    if is_output(before):
        message = (
            f"The output {output.name!r} follows another output directly; there must be text or an "
            "input between them."
        )
        raise InvalidRequestError(message, param=param)
