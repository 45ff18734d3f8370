"""How long calls are likely to take, learnt from those that were run."""

from __future__ import annotations

from collections import OrderedDict

MAX_NAMES = 10_000
"""Functions that are remembered; those unheard of for the longest are forgotten."""

FIRST_GUESS_TOKENS = 128.0
"""Tokens that a call generates that may generate more, as long as nothing is known."""


class Estimates:
    """Moving averages: of output tokens for every function, of seconds for each token.

    weight: how much the latest observation counts. The first one of a kind counts fully, so that
    the guesses given here are soon forgotten.
    """

    def __init__(
        self,
        *,
        prompt_token_s: float = 0.001,
        output_token_s: float = 0.03,
        weight: float = 0.2,
    ) -> None:
        self._weight = weight
        self._tokens: OrderedDict[str, float] = OrderedDict()
        self._prompt_token_s = prompt_token_s
        self._output_token_s = output_token_s
        self._prompts = 0
        self._outputs = 0

    def expected_tokens(self, name: str, max_tokens: int | None) -> float:
        """Tokens that a call of this function generates; at least 1, at most max_tokens."""
        expected = self._tokens.get(name, FIRST_GUESS_TOKENS)
        return max(1.0, expected if max_tokens is None else min(expected, float(max_tokens)))

    def seconds(self, prompt_tokens: float, output_tokens: float) -> float:
        """From the start of a call to its end. prompt_tokens: those that are not cached."""
        return prompt_tokens * self._prompt_token_s + output_tokens * self._output_token_s

    def observe_tokens(self, name: str, output_tokens: int) -> None:
        """A call of this function was run to its end."""
        known = self._tokens.get(name, float(output_tokens))
        self._tokens[name] = known + self._weight * (output_tokens - known)
        self._tokens.move_to_end(name)
        if len(self._tokens) > MAX_NAMES:
            self._tokens.popitem(last=False)

    def observe_prompt(self, tokens: int, seconds: float) -> None:
        """So many tokens that were not cached took so long, waiting included."""
        if tokens > 0:
            weight = self._weight if self._prompts else 1.0
            self._prompt_token_s += weight * (seconds / tokens - self._prompt_token_s)
            self._prompts += 1

    def observe_output(self, tokens: int, seconds: float) -> None:
        """So many tokens after the first took so long."""
        if tokens > 0:
            weight = self._weight if self._outputs else 1.0
            self._output_token_s += weight * (seconds / tokens - self._output_token_s)
            self._outputs += 1
