"""What was read of a prompt goes with a request to its next replica."""

from __future__ import annotations

from array import array

from bros.core.request import PooledTokens, PromptLogprobs, RequestOutput
from bros.router.replica_set import RoutedRequest
from support.router_group import ask


def piece(first: int, count: int) -> tuple[PromptLogprobs, ...]:
    numbers = array("i", [1] * count).tobytes()
    return (PromptLogprobs(first, 0, numbers, numbers, numbers),)


def test_the_next_engine_reads_the_rest() -> None:
    item = RoutedRequest(ask("r"))
    assert item.next_request().num_read == 0
    item.forward(RequestOutput(request_id="r", prompt_logprobs=piece(1, 5)))
    item.forward(RequestOutput(request_id="r", prompt_logprobs=piece(6, 2)))
    assert item.next_request().num_read == 7
    item.forward(("r", 9))
    again = item.next_request()
    assert (again.num_read, again.resumed) == (7, 1)


def test_the_sums_of_an_embedding_go_on_too() -> None:
    item = RoutedRequest(ask("r"))
    item.forward(RequestOutput(request_id="r", pooled=(PooledTokens(16, 16, b""),)))
    assert item.next_request().num_read == 16


def test_cached_tokens_come_with_the_first_output_after_the_prompt() -> None:
    got: list[RequestOutput] = []
    item = RoutedRequest(ask("r"))
    item.stream.connect(got.append)  # type: ignore[arg-type]
    item.forward(RequestOutput(request_id="r", prompt_logprobs=piece(1, 5)))
    item.forward(RequestOutput(request_id="r", token_ids=(3,), cached_tokens=4))
    item.forward(RequestOutput(request_id="r", token_ids=(3,), cached_tokens=8))
    assert [output.cached_tokens for output in got] == [0, 4, 0]
