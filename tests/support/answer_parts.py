"""Parts of parsed answers."""

from __future__ import annotations

from collections.abc import Iterable

from bros.text.answers import AnswerPart, CallArguments, ReasoningPart, TextPart


def joined_parts(parts: Iterable[AnswerPart]) -> list[AnswerPart]:
    """Neighbors of one kind joined."""
    found: list[AnswerPart] = []
    for part in parts:
        match part, found[-1] if found else None:
            case TextPart(text), TextPart(before):
                found[-1] = TextPart(before + text)
            case ReasoningPart(text), ReasoningPart(before):
                found[-1] = ReasoningPart(before + text)
            case CallArguments(number, text), CallArguments(_, before):
                found[-1] = CallArguments(number, before + text)
            case _:
                found.append(part)
    return found
