"""POST /v1/completions without streaming."""

from __future__ import annotations

import pytest

from support.scripted_server import Server, assert_envelope


async def test_answer_has_the_shape_that_openai_documents(server: Server) -> None:
    body = (await server.complete(prompt="abc")).json()
    assert body.pop("id").startswith("cmpl-")
    assert body == {
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "scripted",
        "service_tier": "default",
        "system_fingerprint": "bros-0.1.0-fp32-reference-fp32",
        "choices": [
            {
                "index": 0,
                "text": "Hello world",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 12,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "given"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([64, 65, 66], [[64, 65, 66]]),
        ([[64], [65, 66]], [[64], [65, 66]]),
    ],
)
async def test_a_prompt_is_text_or_tokens_one_or_several(
    server: Server, prompt: object, given: list[str | list[int]]
) -> None:
    body = (await server.complete(prompt=prompt)).json()
    expected = [server.tokenizer.encode(p) if isinstance(p, str) else p for p in given]
    assert [list(request.prompt_token_ids) for request in server.engine.submitted] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(given)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_are_numbered_prompt_by_prompt(server: Server) -> None:
    body = (await server.complete(prompt=["a", "b"], n=2, echo=True)).json()
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
        (0, "aHello world"),
        (1, "aHello world"),
        (2, "bHello world"),
        (3, "bHello world"),
    ]


async def test_echo_of_token_ids_is_their_text(server: Server) -> None:
    ids = server.tokenizer.encode("née ")
    body = (await server.complete(prompt=ids, echo=True)).json()
    assert body["choices"][0]["text"] == "née Hello world"


async def test_sixteen_tokens_are_the_default(server: Server) -> None:
    server.engine.text = "x" * 100
    body = (await server.complete(max_tokens=None)).json()
    assert body["choices"][0]["text"] == "x" * 16


async def test_logprobs_are_parallel_lists(server: Server) -> None:
    server.engine.text = "hé!"
    choice = (await server.complete(logprobs=1)).json()["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "!"],
        "token_logprobs": [-0.5] * 4,
        "top_logprobs": [
            {"h": -0.5},
            {"bytes:\\xc3": -0.5},
            {"bytes:\\xa9": -0.5},
            {"!": -0.5},
        ],
        "text_offset": [0, 1, 1, 2],
    }


async def test_logprobs_of_zero_give_only_the_chosen_tokens(server: Server) -> None:
    choice = (await server.complete(logprobs=0)).json()["choices"][0]
    assert choice["logprobs"]["top_logprobs"] is None
    assert "".join(choice["logprobs"]["tokens"]) == "Hello world"


async def test_one_prompt_that_is_too_long_refuses_all_before_any_is_submitted(
    server: Server,
) -> None:
    error = assert_envelope(await server.complete(prompt=["fine", "x" * 600]), 400)
    assert error["param"] == "prompt"
    assert "600 tokens" in error["message"]
    assert server.engine.submitted == []


async def test_one_prompt_that_the_engine_refuses_refuses_all_and_leaves_nothing_running(
    server: Server,
) -> None:
    server.engine.refuses = "-1"
    response = await server.complete(prompt=["fine", "not fine", "fine as well"])
    assert assert_envelope(response, 429)["code"] == "rate_limit_exceeded"
    accepted = {request.request_id for request in server.engine.submitted}
    assert len(accepted) == 2
    assert accepted <= set(server.engine.aborted)


async def test_empty_prompt_is_refused(server: Server) -> None:
    assert assert_envelope(await server.complete(prompt=""), 400)["param"] == "prompt"


async def test_token_outside_the_vocabulary_is_refused(server: Server) -> None:
    error = assert_envelope(await server.complete(prompt=[5, 99_999]), 400)
    assert error["param"] == "prompt"
    assert "99999" in error["message"]


async def test_too_many_choices_are_refused(server: Server) -> None:
    error = assert_envelope(await server.complete(prompt=["a"] * 100, n=11), 400)
    assert error["param"] == "prompt"
    assert server.engine.submitted == []


async def test_best_of_may_only_repeat_n(server: Server) -> None:
    assert (await server.complete(best_of=2, n=2)).status_code == 200
    assert assert_envelope(await server.complete(best_of=2), 400)["param"] == "best_of"
