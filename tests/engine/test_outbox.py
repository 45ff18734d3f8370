"""What is held back of an engine's output, and that nothing of it is lost, late or out of order."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.errors import QueueFullError
from bros.core.interfaces import EngineReport
from bros.core.request import (
    FinishReason,
    Output,
    PromptLogprobs,
    RequestOutput,
    expanded,
)
from bros.engine.messages import Accepted, Outputs, Refused, Reply, Reported
from bros.engine.outbox import GATHER_S, Outbox
from support.wire import ASK

REPORT = Reported(EngineReport(version=1))
PAUSES_S = st.integers(0, 8).map(lambda number: number * GATHER_S / 4)  # exact in binary


class Sent:
    """An outbox with the requests "g0", "g1" ..., which are gathered, and "s0" ..., which are not.

    replies: what has gone out.
    tokens: those of them, by request.
    """

    def __init__(self, gathered: int = 1, streamed: int = 1) -> None:
        self.clock = ManualClock()
        self.replies: list[Reply] = []
        self.outbox = Outbox(self.replies.append, self.clock)
        self.names = [f"g{i}" for i in range(gathered)] + [f"s{i}" for i in range(streamed)]
        for name in self.names:
            request = dataclasses.replace(ASK, request_id=name, gathered=name.startswith("g"))
            self.outbox.open(request)

    def step(self, *outputs: Output) -> list[Output]:
        """Send the outputs of a step; returns those that have gone out."""
        before = len(self.replies)
        self.outbox.send(Outputs(outputs))
        self.outbox.flush_if_due()
        return self._outputs(before)

    def pause(self, seconds: float) -> list[Output]:
        """Time passes; returns the outputs that have gone out."""
        before = len(self.replies)
        self.clock.advance(seconds)
        self.outbox.flush_if_due()
        return self._outputs(before)

    def _outputs(self, first: int) -> list[Output]:
        found: list[Output] = []
        for reply in self.replies[first:]:
            assert isinstance(reply, Outputs) and reply.outputs
            found += reply.outputs
        return found

    @property
    def tokens(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for output in map(expanded, self._outputs(0)):
            found[output.request_id] += output.token_ids
        return found


def test_tokens_after_the_first_are_held_until_their_time_has_come() -> None:
    sent = Sent()
    assert sent.step(("g0", 5), ("s0", 9)) == [("g0", 5), ("s0", 9)]
    assert sent.step(("g0", 7), ("s0", 3)) == [("s0", 3)]
    assert sent.step(("g0", 8)) == []
    assert sent.pause(0.9 * GATHER_S) == []
    assert sent.pause(0.2 * GATHER_S) == [RequestOutput("g0", token_ids=(7, 8))]
    assert sent.step(("g0", 1)) == []
    assert sent.pause(0.9 * GATHER_S) == []
    assert sent.pause(0.2 * GATHER_S) == [RequestOutput("g0", token_ids=(1,))]
    assert sent.pause(9.0) == []


@pytest.mark.parametrize(
    "last",
    [
        RequestOutput("g0", token_ids=(2,), finish_reason=FinishReason.STOP),
        RequestOutput("g0", finish_reason=FinishReason.ABORT),
        RequestOutput("g0", finish_reason=FinishReason.ERROR, error="why", retry_after_s=2.5),
    ],
)
def test_the_last_output_takes_all_tokens_along(last: RequestOutput) -> None:
    sent = Sent()
    sent.step(("g0", 5))
    sent.step(("g0", 7))
    assert sent.step(last) == [dataclasses.replace(last, token_ids=(7, *last.token_ids))]
    assert sent.pause(9.0) == []
    assert sent.step(("g0", 4), ("g0", 6)) == [("g0", 4), ("g0", 6)]  # of a later request


def test_results_of_the_prompt_are_not_the_first_token() -> None:
    sent = Sent()
    of_prompt = RequestOutput("g0", prompt_logprobs=(PromptLogprobs(1, 0, b"", b"", b""),))
    assert sent.step(of_prompt) == [of_prompt]
    assert sent.step(("g0", 5)) == [("g0", 5)]
    assert sent.step(("g0", 7)) == []


def test_a_report_comes_after_the_tokens_that_it_may_list() -> None:
    sent = Sent()
    sent.step(("g0", 5))
    sent.step(("g0", 7))
    sent.replies.clear()
    sent.outbox.send(REPORT)
    assert sent.replies == [Outputs((RequestOutput("g0", token_ids=(7,)),)), REPORT]


def test_other_replies_go_out_at_once() -> None:
    sent = Sent()
    sent.step(("g0", 5))
    sent.step(("g0", 7))
    sent.replies.clear()
    reply = Accepted("x", ASK.service_class)
    sent.outbox.send(reply)
    assert sent.replies == [reply]


def test_the_tokens_of_a_running_request_survive_the_refusal_of_its_id() -> None:
    sent = Sent()
    sent.step(("g0", 5))
    sent.step(("g0", 7))
    sent.outbox.open(dataclasses.replace(ASK, request_id="g0", gathered=True))
    sent.outbox.send(Refused.from_error("g0", QueueFullError(3, 1.0)))
    assert sent.step(("g0", 8)) == []
    assert sent.pause(GATHER_S) == [RequestOutput("g0", token_ids=(7, 8))]


def test_a_request_that_is_refused_is_forgotten() -> None:
    sent = Sent()
    refused = Refused.from_error("g0", QueueFullError(3, 1.0))
    sent.outbox.send(refused)
    assert sent.replies == [refused]
    assert sent.step(("g0", 5)) == [("g0", 5)]
    assert sent.step(("g0", 7)) == [("g0", 7)]  # nobody has asked to gather them


@given(
    steps=st.lists(
        st.tuples(st.sets(st.integers(0, 4)), PAUSES_S, st.booleans()),
        max_size=40,
    ),
    ends=st.lists(st.integers(0, 40), min_size=5, max_size=5),
)
def test_every_token_comes_once_in_order_and_in_time(
    steps: list[tuple[set[int], float, bool]], ends: list[int]
) -> None:
    """Each step gives some requests a token; then time passes, and a report may be sent."""
    sent = Sent(gathered=3, streamed=2)
    made: dict[str, list[int]] = {name: [] for name in sent.names}
    ended: set[str] = set()
    for number, (rows, seconds, reports) in enumerate(steps):
        outputs: list[Output] = []
        for row in sorted(rows):
            name = sent.names[row]
            if name in ended:
                continue
            made[name].append(number)
            if number >= ends[row]:
                ended.add(name)
                reason = FinishReason.LENGTH
                outputs.append(RequestOutput(name, token_ids=(number,), finish_reason=reason))
            else:
                outputs.append((name, number))
        if outputs:
            sent.step(*outputs)
        for name in sent.names:
            if name.startswith("s") or name in ended or len(made[name]) == 1:
                assert sent.tokens[name] == made[name]
        sent.pause(seconds)
        if reports:
            sent.outbox.send(REPORT)
            sent.replies.pop()
        if reports or seconds >= GATHER_S:
            assert all(sent.tokens[name] == made[name] for name in sent.names)
    sent.pause(GATHER_S)
    assert all(sent.tokens[name] == made[name] for name in sent.names)
