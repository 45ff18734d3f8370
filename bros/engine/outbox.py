"""Sends the replies of an engine to its client, and gathers output that is not streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bros.core.clock import Clock
from bros.core.request import EngineRequest, Output, RequestOutput, merged
from bros.engine.messages import Outputs, Refused, Reply, Reported

GATHER_S = 0.5
"""Tokens of gathered requests are sent this many seconds after those before them, at the end of a
step. Who handles a message takes a core from the step that runs: with one per step, a step of
`bros.LLM` took 11 % longer than alone with 1 row and 13 % longer with 8 (SmolLM2-135M in int4, two
cores of a Zen 4). Tokens that are held are lost with an engine that dies, and computed again."""


class Outbox:
    """Sends replies, and holds tokens of gathered requests (EngineRequest.gathered) back.

        step 1   a: 5, b: 9      ->  a: 5, b: 9      the first token goes out at once
        step 2   a: 7, b: 3      ->        b: 3
        step 3   a: 8, b: 4      ->        b: 4      b is not gathered
        step 4   a: 2, its last  ->  a: 7 8 2

    An output that is more than a token, as one with log-probabilities is, takes those before it
    along, and goes out at once. Nothing overtakes anything else of its request; and a report comes
    after all tokens of earlier steps, which it may list as cached. So with a router, which gets ten
    reports a second, tokens are held for as long as that.
    """

    def __init__(self, send: Callable[[Reply], None], clock: Clock) -> None:
        """send: sends a reply to the client."""
        self._send = send
        self._clock = clock
        self._held: dict[str, list[int] | None] = {}
        """The tokens of each gathered request; None: its first output has not gone out."""
        self._flushed_s = clock.now()

    def open(self, request: EngineRequest) -> None:
        """The request is submitted to the engine next."""
        if request.gathered:
            self._held.setdefault(request.request_id)

    def send(self, reply: Reply) -> None:
        """Send a reply; tokens are held if they are of gathered requests."""
        if isinstance(reply, Outputs) and self._held:
            outputs = self._without_held(reply.outputs)
            if outputs:
                self._send(Outputs(tuple(outputs)))
            return
        if isinstance(reply, Reported):
            self._flush()
        elif isinstance(reply, Refused) and self._held.get(reply.request_id, ()) is None:
            del self._held[reply.request_id]
        self._send(reply)

    def flush_if_due(self) -> None:
        """Send what has been held for long enough. Call it between two steps."""
        if self._held and self._clock.now() - self._flushed_s >= GATHER_S:
            self._flush()

    def _without_held(self, outputs: Sequence[Output]) -> list[Output]:
        sent: list[Output] = []
        for output in outputs:
            if not isinstance(output, tuple):
                sent.append(self._with_held(output))
                continue
            request_id, token_id = output
            tokens = self._held.get(request_id)
            if tokens is not None:
                tokens.append(token_id)
                continue
            sent.append(output)
            if request_id in self._held:
                self._held[request_id] = []
        return sent

    def _with_held(self, output: RequestOutput) -> RequestOutput:
        """The output with the tokens before it."""
        request_id = output.request_id
        if request_id not in self._held or not output.has_begun:
            return output
        tokens = self._held[request_id]
        if output.finish_reason is None:
            self._held[request_id] = []
        else:
            del self._held[request_id]
        return merged(_of_tokens(request_id, tokens), output) if tokens else output

    def _flush(self) -> None:
        self._flushed_s = self._clock.now()
        outputs: list[Output] = []
        for request_id, tokens in self._held.items():
            if tokens:
                outputs.append(_of_tokens(request_id, tokens))
                tokens.clear()
        if outputs:
            self._send(Outputs(tuple(outputs)))


def _of_tokens(request_id: str, token_ids: Sequence[int]) -> RequestOutput:
    return RequestOutput(request_id, token_ids=tuple(token_ids))
