"""Which answers of a session the prompt of a plain client contains: the inputs of its call.

A plain client sends texts, not variables. An answer is an input of its request if the client names
the call (`PlainPrompt.inputs`), if an assistant message is this answer, or if another message
contains it word for word. So the graph has the edges of chains whose steps pass on texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bros.semantic.core.graph import Graph
from bros.semantic.core.nodes import Call, InputPiece, Variable
from bros.semantic.core.template import Text

MAX_INPUTS = 64
"""Most inputs of a plain call, the latest answers first: a conversation contains all of its earlier
answers, so its edges would grow with the square of its length."""

MIN_CHARS = 24
"""Shortest answer that is searched for within a message. In documents of 20,000 characters about
one subject (those in docs/), a beginning of a word and what follows it occurs in another one by
chance in 11 % of all cases with 8 characters, in 0.5 % with 16 and in 0.08 % with 24."""

MAX_SCANNED_CHARS = 1_000_000
"""Most characters that are searched, or from which answers are cut, for one request. That takes
0.4 ms with texts and at most 17 ms with texts made to be slow; the event loop waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPrompt:
    """What is known of the prompt of a plain client.

    texts: contents of its messages except the assistant's, or its prompts.
    replies: contents of its assistant messages.
    inputs: ids of calls whose answers it contains, as the client says; unknown ones are ignored.
    """

    texts: Sequence[str] = ()
    replies: Sequence[str] = ()
    inputs: Sequence[str] = ()

    def contains(self, answer: str) -> bool:
        """Whether an answer occurs in it; true also if it is too long to be searched."""
        answer = answer.strip()
        num_chars = sum(map(len, self.texts)) + sum(map(len, self.replies))
        if num_chars > MAX_SCANNED_CHARS:
            return True
        return any(answer in text for texts in (self.texts, self.replies) for text in texts)


EMPTY_PROMPT = PlainPrompt()


def find_inputs(graph: Graph, prompt: PlainPrompt) -> list[Variable]:
    """The answers in the graph that the prompt contains, in the order of their calls.

    Of equal answers only the latest is found, and an answer within another one that was found is
    not. Answers that their own prompt contains (quotations) are found only if the client names them
    or an assistant message is equal to them, because the prompts may quote the same source.
    """
    replies = {reply.strip() for reply in prompt.replies}
    search = _Search(prompt.texts)
    named = {call_id for call_id in prompt.inputs if call_id in graph.calls}
    for call_id in named:
        for _, answer in _answers(graph.calls[call_id]):
            replies.discard(answer)
            search.cut(answer)
    found: list[Variable] = []
    for call in reversed(graph.calls.values()):
        for variable, answer in _answers(call):
            if call.id not in named:
                if answer in replies:
                    replies.remove(answer)
                elif search.finds(answer) and not _is_quotation(graph, variable, answer, search):
                    search.cut(answer)
                else:
                    continue
            found.append(variable)
        if len(found) >= MAX_INPUTS:
            break
    return found[MAX_INPUTS - 1 :: -1]


def _answers(call: Call) -> Iterator[tuple[Variable, str]]:
    """(variable, text without white space at its ends) of the outputs with a value, last first."""
    for llm_call in reversed(call.llm_calls):
        for variable in llm_call.outputs:
            answer = (variable.text or "").strip()
            if answer:
                yield variable, answer


class _Search:
    """Searches the texts of a prompt, and cuts answers from them, up to MAX_SCANNED_CHARS."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._text = "\0".join(texts)
        self._left = MAX_SCANNED_CHARS

    def finds(self, answer: str) -> bool:
        return len(answer) >= MIN_CHARS and self.scan(self._text, answer) is True

    def scan(self, text: str, answer: str) -> bool | None:
        """Whether the text contains the answer; None if no more characters may be searched."""
        return answer in text if self._may_read(text) else None

    def cut(self, answer: str) -> None:
        """Remove an answer, unless no more characters may be searched: then none that is within it
        is found either."""
        if len(answer) >= MIN_CHARS and self._may_read(self._text):
            self._text = self._text.replace(answer, "\0")

    def _may_read(self, text: str) -> bool:
        """Whether the characters of the text may be read; they count as read then."""
        if len(text) > self._left:
            return False
        self._left -= len(text)
        return True


def _is_quotation(graph: Graph, variable: Variable, answer: str, search: _Search) -> bool:
    """Whether the prompt of its own call contains the answer; true also if that is not known."""
    llm_call = variable.producer
    assert llm_call is not None
    if variable.quotation:
        return True
    for piece in llm_call.call.pieces[: llm_call.prompt_end]:
        text: str | None = None
        if isinstance(piece, Text):
            text = piece.text
        elif isinstance(piece, InputPiece) and piece.variable_id in graph.variables:
            text = graph.variables[piece.variable_id].text
        if text and search.scan(text, answer) is not False:
            return True
    return False
