"""No input of one client holds the event loop: for each attack, the CPU time of its longest turn
and its longest lag.

Neither counts what other processes of a busy machine do, so that the bounds are those of an idle
one (see MeasuredLoop). What the cores cost a client is measured by benchmarks/input_stalls.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import pytest

from bros.text.grammar_check import GrammarChecker
from support.hostile_grammars import HOSTILE
from support.loops import LONGEST_TURN_S, MeasuredLoop, check_turns
from support.scripted_server import Server
from support.session_server import SessionClient, keeping
from support.tier import by_tier
from support.tiny_tokenizer import save_tokenizer

Attack = Callable[[Server], Awaitable[object]]


async def transformed(server: Server, text: str, transforms: str | None) -> None:
    """Wait for a call that puts a transformed text into its prompt."""
    session = await SessionClient.open(server.http)
    call = {
        "template": "{{input:text}}{{output:answer}}",
        "parameters": [{"name": "text", "value": text, "transforms": transforms}],
        "wait": True,
    }
    await send(server, f"/v1/sessions/{session.id}/requests", call)


async def send(server: Server, path: str, body: Any) -> None:
    """Send a body that was written before: the client shares the loop. Without spaces, since some
    attacks would be too large with them."""
    content = await asyncio.to_thread(lambda: json.dumps(body, separators=(",", ":")).encode())
    await send_json(server, path, content)


async def send_json(server: Server, path: str, content: bytes) -> None:
    response = await server.http.post(
        path, content=content, headers={"content-type": "application/json"}
    )
    late = response.status_code == 504  # values that the attack waits for, on a busy machine
    assert response.status_code < 500 or late, response.text


async def read(server: Server, path: str, query: bytes = b"") -> None:
    """Get a large reply and drop it: the client of other tests would join its parts on the loop."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query,
        "headers": [(b"host", b"test")],
    }
    statuses = []

    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()  # the client stays

    async def sent(message: MutableMapping[str, Any]) -> None:
        statuses.append(message.get("status"))

    await server.app(scope, receive, sent)
    assert statuses[0] == 200


async def slow_regexes(server: Server) -> None:
    text, sessions = "a" * 1500 + "b", by_tier(fast=3, long=20)
    attacks = (transformed(server, text, 'regex("(a|aa)+$")') for _ in range(sessions))
    await asyncio.gather(*attacks)


async def slow_regexes_in_one_program(server: Server) -> None:
    """Behind them, the session still answers: where each of 200 took its 0.25 s, it waited 48 s."""
    session = await SessionClient.open(server.http)
    call = {
        "template": "{{input:text}}{{output:answer}}",
        "parameters": [
            {"name": "text", "value": "a" * 1500 + "b", "transforms": 'regex("(a|aa)+$")'}
        ],
    }
    program = {"requests": [call] * by_tier(fast=20, long=200), "wait": True}
    async with asyncio.timeout(10):
        assert (await session.ask("POST", "/requests", json=program)).status_code == 424
        good = {"requests": [{"template": "Say {{output:answer}}"}], "wait": True}
        assert (await session.ask("POST", "/requests", json=good)).status_code == 200


async def large_join(server: Server) -> None:
    text = "[" + ",".join("1" * 500_000) + "]"
    await transformed(server, text, f'join("{"x" * 4000}")')


async def large_inputs(server: Server) -> None:
    text = "word and " * by_tier(fast=100_000, long=430_000)
    await asyncio.gather(*(transformed(server, text, None) for _ in range(4)))


async def many_values(server: Server) -> None:
    """Each short enough to be encoded on the loop."""
    names = [f"v{i}" for i in range(by_tier(fast=200, long=1000))]
    session = await SessionClient.open(server.http)
    call = {
        "template": "".join(f"{{{{input:{name}}}}}" for name in names) + "{{output:answer}}",
        "parameters": [{"name": name, "value": "word " * 700} for name in names],
        "wait": True,
    }
    await send(server, f"/v1/sessions/{session.id}/requests", call)


async def tokenize(server: Server) -> None:
    bodies = [{"prompt": "word and " * n} for n in (by_tier(fast=20_000, long=110_000), 440_000)]
    await asyncio.gather(*(send(server, "/tokenize", body) for body in bodies * 4))


async def many_tokens(server: Server) -> None:
    """The text with the most tokens, and the most token ids; none is a small integer, which Python
    need not allocate."""
    await send(server, "/tokenize", {"prompt": "q~" * by_tier(fast=2**17, long=2**19)})
    for count in (999_990, 499_990):
        ids = b"[" + b"300," * (count - 1) + b"300]"  # json.dumps would hold the interpreter
        await send_json(server, "/detokenize", b'{"tokens":' + ids + b"}")
        await send_json(server, "/v1/completions", b'{"max_tokens":1,"prompt":' + ids + b"}")


async def many_prompts(server: Server) -> None:
    body = {"prompt": ["word " * 100] * by_tier(fast=200, long=500), "max_tokens": 1}
    await send(server, "/v1/completions", body)


async def empty_messages(server: Server) -> None:
    for count in (60_000, 10_000):
        body = {"messages": [{"role": "user", "content": ""}] * count, "max_tokens": 1}
        await send(server, "/v1/chat/completions", body)


async def empty_parts(server: Server) -> None:
    for count in (100_000, 10_000):
        parts = [{"type": "text", "text": ""}] * count
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        await send(server, "/v1/chat/completions", body)


async def empty_lists(server: Server) -> None:
    for count in (1_300_000, 100_000):
        await send(server, "/v1/completions", {"prompt": [[]] * count})


async def wrong_parts(server: Server) -> None:
    """If the errors of all parts were collected, the interpreter would be held for seconds."""
    count = by_tier(fast=500_000, long=990_000)
    session = await SessionClient.open(server.http)
    chat = {"messages": [{"role": "user", "content": ""}], "max_tokens": 1}
    await send(server, f"/v1/sessions/{session.id}/requests", {"requests": [1] * count})
    await send(server, "/v1/messages", chat | {"tools": [1] * count})
    await send(server, "/detokenize", {"tokens": [""] * (count // 2)})
    names = {str(i): "" for i in range(by_tier(fast=100_000, long=190_000))}
    await send(server, "/v1/chat/completions", chat | {"logit_bias": names})
    await send(server, "/v1/chat/completions", chat | {"slo": names})


async def empty_calls(server: Server) -> None:
    session = await SessionClient.open(server.http)
    calls: list[object] = [{}] * by_tier(fast=20_000, long=140_000)
    await send(server, f"/v1/sessions/{session.id}/requests", {"requests": calls})


async def json_of_clients(server: Server) -> None:
    """What is parsed or written besides the body: arguments, tools, schemas, template variables."""
    count = by_tier(fast=300_000, long=1_300_000)
    user = {"role": "user", "content": "x"}
    for arguments in ("[" + "[]," * count + "[]]", '{"a":"' + "[]," * count + '"}'):
        function = {"name": "f", "arguments": arguments}
        call = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}
        call["tool_calls"][0]["function"] = function  # type: ignore[index]
        await send(server, "/v1/chat/completions", {"messages": [user, call], "max_tokens": 1})
    numbers = {"enum": [0.5] * by_tier(fast=100_000, long=250_000)}
    function = {"name": "f", "parameters": numbers}  # type: ignore[dict-item]
    chat = {"messages": [user], "max_tokens": 1}
    tools = [{"type": "function", "function": function}]
    await send(server, "/v1/chat/completions", chat | {"tools": tools})
    await send(server, "/v1/chat/completions", chat | {"chat_template_kwargs": {"a": numbers}})
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": numbers}}
    await send(server, "/v1/chat/completions", chat | {"response_format": schema})
    tool = {"name": "f", "input_schema": numbers}
    await send(server, "/v1/messages", chat | {"tools": [tool]})
    used = {"type": "tool_use", "id": "c", "name": "f", "input": numbers}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}
    messages = [user, {"role": "assistant", "content": [used]}, result]
    await send(server, "/v1/messages", {"messages": messages, "max_tokens": 1})


async def many_placeholders(server: Server) -> None:
    """One call with as many placeholders as are allowed, and more; also without any text."""
    for count in (4_999, by_tier(fast=20_000, long=40_000)):
        session = await SessionClient.open(server.http)
        names = [f"a{i}" for i in range(count)]
        call = {
            "template": "".join(f"{{{{{name}}}}}" for name in names) + "{{output:o}}",
            "parameters": [{"name": name, "role": "input", "value": ""} for name in names],
        }
        path = f"/v1/sessions/{session.id}/requests"
        await send(server, path, call | {"wait": True, "timeout_s": 20})
        await send(server, path, {"requests": [call, call]})
        await session.ask("DELETE")
    session = await SessionClient.open(server.http)
    for count in (4_999, by_tier(fast=100_000, long=550_000)):
        call = {"template": "{{x}}" * count + "{{output:o}}"}
        call["parameters"] = [{"name": "x", "value": ""}]  # type: ignore[assignment]
        await send(server, f"/v1/sessions/{session.id}/requests", call | {"wait": True})
        paper = {"prompt": call["template"], "placeholders": [], "session_id": "mine"}
        await send(server, "/v1/submit", paper)


async def many_outputs(server: Server) -> None:
    session = await SessionClient.open(server.http)
    path = f"/v1/sessions/{session.id}/requests"
    calls = [
        {"template": "".join(f"x{{{{output:o{i}}}}}" for i in range(1000))}
        for _ in range(by_tier(fast=5, long=40))
    ]
    await send(server, path, {"requests": calls})
    names = [{"name": f"o{i}", "role": "output"} for i in range(5000)]
    await send(server, path, {"native": True, "parameters": names})
    await session.ask("DELETE")


async def long_conversations(server: Server) -> None:
    """The chat template is rendered once for each output."""
    session = await SessionClient.open(server.http)
    path = f"/v1/sessions/{session.id}/requests"
    for count, text in ((99, "x" * by_tier(fast=500, long=3000)), (5000, ""), (1_500, "x" * 2000)):
        turns = [
            [{"role": "user", "content": text}, {"role": "assistant", "content": f"{{{{a{i}}}}}"}]
            for i in range(count)
        ]
        roles = [{"name": f"a{i}", "role": "output"} for i in range(min(count, 99))]
        messages = [message for turn in turns for message in turn]
        await send(server, path, {"messages": messages, "parameters": roles})
    await send(server, path, {"messages": [{"role": "user", "content": ""}] * 60_000})


async def waiting_program(server: Server) -> None:
    session = await SessionClient.open(server.http)
    calls = [{"template": "Say {{output:o}}"}] * by_tier(fast=500, long=2000)
    body = {"requests": calls, "wait": True, "timeout_s": by_tier(fast=1, long=10)}
    await send(server, f"/v1/sessions/{session.id}/requests", body)
    await session.ask("DELETE")


async def large_values(server: Server) -> None:
    """All replies that have them. Quotes are written with escapes, the slowest of all."""
    session = await SessionClient.open(server.http)
    path = f"/v1/sessions/{session.id}"
    for number in range(by_tier(fast=2, long=10)):
        value = {"id": f"v{number}", "name": "v", "value": '"' * 2_000_000}
        await send(server, f"{path}/variables", value)
    for number in range(by_tier(fast=200, long=5000)):
        await send(server, f"{path}/variables", {"name": f"n{number}", "value": '"' * 500})
    for rest in ("", "/variables", "/variables/v1"):
        await read(server, path + rest)
    await read(server, f"{path}/variables/v1", b"stream=true")


async def hostile_grammars(server: Server) -> None:
    """Schemas, patterns and grammars, in every field that takes one."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    session = await SessionClient.open(server.http)
    call = {"template": "Say {{output:o}}", "wait": True}
    bodies = [
        *(("/v1/chat/completions", chat | dict(fields)) for fields in HOSTILE.values()),
        *(
            (f"/v1/sessions/{session.id}/requests", call | {"sampling": dict(fields)})
            for fields in by_tier(fast=[*HOSTILE.values()][:3], long=[*HOSTILE.values()])
        ),
    ]
    for _ in range(by_tier(fast=1, long=3)):
        await asyncio.gather(*(send(server, path, body) for path, body in bodies))


ATTACKS: list[Attack] = [
    slow_regexes,
    slow_regexes_in_one_program,
    large_join,
    large_inputs,
    many_values,
    tokenize,
    many_tokens,
    many_prompts,
    empty_messages,
    empty_parts,
    empty_lists,
    wrong_parts,
    empty_calls,
    json_of_clients,
    many_placeholders,
    many_outputs,
    long_conversations,
    waiting_program,
    large_values,
    hostile_grammars,
]


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    made = GrammarChecker(save_tokenizer(tmp_path_factory.mktemp("tokenizer")), 440, [1])
    yield made
    made.close()


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_no_turn_of_the_loop_is_long(attack: Attack, checker: GrammarChecker) -> None:
    async def main(loop: MeasuredLoop) -> None:
        server = Server(grammars=checker)
        async with server.http, keeping(server):
            await server.chat()
            with loop.measuring():
                await attack(server)

    check_turns(main)


def holding_the_interpreter() -> None:
    sum(range(50_000_000))


def sleeping() -> None:
    time.sleep(0.2)


@pytest.mark.parametrize(
    ("on_thread", "work", "seen"),
    [
        (False, sleeping, True),
        (False, holding_the_interpreter, True),
        (True, sleeping, False),
        (True, holding_the_interpreter, True),
    ],
)
def test_a_lag_is_seen_whatever_causes_it(
    on_thread: bool, work: Callable[[], None], seen: bool
) -> None:
    loop = MeasuredLoop()

    async def main() -> None:
        with loop.measuring():
            await asyncio.sleep(0.05)
            assert loop.longest_lag_s < LONGEST_TURN_S
            if on_thread:
                await asyncio.to_thread(work)
            else:
                work()
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    assert (loop.longest_lag_s > LONGEST_TURN_S) == seen
