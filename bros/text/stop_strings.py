"""Matching of stop strings in a text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The first match is the one that ends first; of several that end there, the longest. The result
    does not depend on how the text is cut. The matcher holds text only while it may be the
    beginning of a stop string.
    """

    __slots__ = ("_held", "_patterns")

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that is certainly before any match, the matched stop string or None).

        Do not call `push` or `finish` after a match.
        """
        if not text:
            return "", None
        whole = self._held + text
        offset = len(self._held)
        end, found = len(whole) + 1, ""
        for pattern in self._patterns:
            position = pattern.advance(text)
            if position is not None and (offset + position, -len(pattern.text)) < (
                end,
                -len(found),
            ):
                end, found = offset + position, pattern.text
        if found:
            return whole[: end - len(found)], found
        keep = len(whole) - max((pattern.matched for pattern in self._patterns), default=0)
        self._held = whole[keep:]
        return whole[:keep], None

    def would_stop(self, text: str) -> bool:
        """Whether there would be a match if this text was pushed."""
        found = self._held + text
        return bool(text) and any(pattern.text in found for pattern in self._patterns)

    def finish(self) -> str:
        """The held text, at the end of a text; what is pushed then begins another one."""
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.matched = 0
        return held


class _Pattern:
    """Knuth-Morris-Pratt.

    matched: characters of `text` that the input so far ends with.
    """

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0] * len(text)  # longest proper border of text[: i + 1]
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._borders[length - 1]
            length += text[i] == text[length]
            self._borders[i] = length

    def advance(self, text: str) -> int | None:
        """Consume `text`; returns the position in it right after the first full match, or None."""
        goal, matched, position = self.text, self.matched, 0
        while position < len(text):
            if matched == 0:
                position = text.find(goal[0], position)
                if position < 0:
                    break
                matched = 1
            else:
                while matched and text[position] != goal[matched]:
                    matched = self._borders[matched - 1]
                matched += text[position] == goal[matched]
            position += 1
            if matched == len(goal):
                return position
        self.matched = matched
        return None
