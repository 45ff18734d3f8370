"""The check of grammars in a process of its own: hostile ones are refused within a second."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bros.core import grammars, worker_process
from bros.core.clock import ManualClock
from bros.core.errors import InvalidRequestError, OverloadedError
from bros.core.request import Grammar
from bros.core.tenants import TenantAccounts, TenantLimits
from bros.core.worker_process import WorkerProcess
from bros.text import grammar_check
from bros.text.grammar_check import GrammarChecker
from support.machine_speed import slowdown
from support.processes import cpu_s
from support.tiny_tokenizer import save_tokenizer

COMPILING_S, REST_S = 0.5, 0.5
"""Most CPU time of a refusal: that of the child which compiles, where the kernel's timer ends it,
and that of all else on a machine of nominal speed. Without the timer some would take minutes."""

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarChecker]:
    made = GrammarChecker(save_tokenizer(tmp_path_factory.mktemp("tokenizer")), 440, [1])
    yield made
    made.close()


def check(checker: GrammarChecker, grammar: Grammar, tenant: str = "") -> None:
    """As clients do: again, if the machine is too busy."""
    while True:
        try:
            return asyncio.run(checker.check(tenant, grammar))
        except OverloadedError:
            pass


def cpu_s_of(checker: GrammarChecker) -> float:
    """CPU time so far of this process and of those that check."""
    running = [each._process for each in checker._all]
    return time.process_time() + sum(cpu_s(each.pid) for each in running if each is not None)


def wide(count: int, **more: Any) -> Grammar:
    properties = {f"p{number}": {"type": "string"} for number in range(count)}
    return grammars.json_schema({"type": "object", "properties": properties, **more})


def multiple_of_a_large_prime() -> Grammar:
    return grammars.json_schema({"type": "integer", "multipleOf": 9_999_991})


def product_of_choices() -> Grammar:
    def options(number: int) -> dict[str, Any]:
        return {"anyOf": [{"properties": {f"a{number}_{i}": {}}} for i in range(4)]}

    return grammars.json_schema({"type": "object", "allOf": [options(n) for n in range(12)]})


def chain(length: int) -> Grammar:
    rules = "\n".join(f'a{i}: "x" a{i + 1}' for i in range(length))
    return grammars.lark(f'start: a0\n{rules}\na{length}: "y"')


@pytest.mark.parametrize(
    "make",
    [
        product_of_choices,
        multiple_of_a_large_prime,
        lambda: chain(14_000),
        lambda: grammars.lark("start: " + " | ".join(f'"w{i}"' for i in range(25_000))),
        lambda: grammars.lark("start: " + "(" * 100_000 + '"a"' + ")" * 100_000),
        lambda: grammars.regex("(" * 50_000 + "a" + ")" * 50_000),
        lambda: grammars.lark("start: " + "x" * 1_000_000),
        lambda: grammars.lark("root ::= " + "(" * 100_000 + '"a"'),
    ],
    ids=["product", "multiple", "chain", "alternatives", "nested", "nested regex",
         "megabyte", "gbnf"],
)  # fmt: skip
def test_hostile_grammars_are_refused_quickly_and_others_go_on(
    checker: GrammarChecker, make: Callable[[], Grammar]
) -> None:
    check(checker, grammars.regex("warm"))
    before_s = cpu_s_of(checker)
    with pytest.raises(InvalidRequestError):
        check(checker, make())
    took_s = cpu_s_of(checker) - before_s
    assert took_s < COMPILING_S + REST_S * slowdown()
    check(checker, grammars.regex(f"on{next(NUMBERS)}"))


def test_what_would_fail_after_the_first_tokens_is_refused_before(checker: GrammarChecker) -> None:
    check(checker, wide(400))
    with pytest.raises(InvalidRequestError, match="it cannot be followed: .*max is 2000"):
        check(checker, wide(600))


@pytest.mark.parametrize("times", ["", "?", "*"])
def test_what_would_fail_at_the_first_token_that_it_does_not_force_is_refused_before(
    checker: GrammarChecker, times: str
) -> None:
    """The alternatives begin with ten digits, of which none is forced; the output may also be
    empty."""

    def alternatives(count: int) -> str:
        return "(" + " | ".join(f'"{i:05}"' for i in range(0, 10**5, 10**5 // count)) + ")"

    check(checker, grammars.lark(f"start: {alternatives(1_500)}{times}"))
    with pytest.raises(InvalidRequestError, match="it cannot be followed: .*max is 2000"):
        check(checker, grammars.lark(f"start: {alternatives(3_000)}{times}"))


@pytest.mark.parametrize(("wide", "narrow"), [('"!"', "/[a-z]+/"), ('"z"', "/[a-y]+/")])
def test_a_grammar_that_fails_in_one_of_its_branches_may_be_used(
    checker: GrammarChecker, wide: str, narrow: str
) -> None:
    many = " | ".join(f'"{i:05}"' for i in range(0, 10**5, 33))
    grammar = grammars.lark(f"start: {narrow} | {wide} x\nx: {many}")
    check(checker, grammar)
    assert checker.knows("", grammar)


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.lark('start: "<tool_call>" /[a-z]+/'),
        grammars.lark('start: "ab<|end|>" /[a-z]+/'),
        grammars.lark("start: <tool_call> /[a-z]+/"),
        grammars.json_schema({"const": "a <tool_call> b"}),
    ],
    ids=["added", "special", "token", "json"],
)
def test_a_grammar_may_begin_with_a_text_that_reads_like_a_token(
    checker: GrammarChecker, grammar: Grammar
) -> None:
    check(checker, grammar)
    assert checker.knows("", grammar)


def test_good_texts_are_remembered(tmp_path: Path) -> None:
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1])
    gbnf = grammars.lark('root ::= "a" b\nb ::= [a-z]+')
    check(made, gbnf)
    made.close()  # from now on everything else is refused
    for _ in range(3):
        check(made, Grammar(gbnf.text, after="x", param="other"))
        made.check_blocking("", gbnf)
    with pytest.raises(InvalidRequestError, match="the server stops"):
        check(made, grammars.regex("other"))


def test_each_tenant_has_its_own_texts_and_loses_its_own_oldest(tmp_path: Path) -> None:
    limits = {"ann": TenantLimits(cached_grammars=2)}
    accounts = TenantAccounts(limits)
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1], accounts)
    texts = [grammars.regex(str(number)) for number in range(3)]
    for grammar in texts:
        check(made, grammar, "ann")
    made.check_blocking("bob", texts[0])
    assert made.counts() == {"ann": 2, "bob": 1}
    known = {(name, i) for name in ("ann", "bob") for i in range(3) if made.knows(name, texts[i])}
    made.close()
    assert known == {("ann", 1), ("ann", 2), ("bob", 0)}


def test_the_processes_count_as_cpu_time_of_the_tenant(tmp_path: Path) -> None:
    accounts = TenantAccounts({"ann": TenantLimits(cpu_seconds=1)}, clock=ManualClock())
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1], accounts)

    async def ask(number: int) -> None:
        with pytest.raises(InvalidRequestError):
            await made.check("ann", wide(3500 + number, additionalProperties=False))

    try:
        asyncio.run(ask(0))
        assert accounts.cpu_wait_s("ann") == 0
        asked = 1
        while accounts.cpu_wait_s("ann") == 0 and asked < 50:
            asyncio.run(ask(asked))
            asked += 1
        assert accounts.cpu_wait_s("ann") > 0 and accounts.cpu_wait_s("bob") == 0
    finally:
        made.close()


@pytest.mark.parametrize(
    ("grammar", "says", "code"),
    [
        (grammars.regex("(?=a)b", param="p"), "'p' cannot be used: .*look-around", "grammar"),
        (Grammar("start: %json {", param="p"), "'p' cannot be used", "grammar"),
        (
            grammars.json_schema({"type": "string", "minLength": 3, "maxLength": 1}, param="p"),
            r"Invalid schema in 'p': Unsatisfiable schema: minLength \(3\)",
            "json_schema",
        ),
        (
            grammars.json_schema({"oneOf": [{"minLength": 1}, {"maxLength": 2}]}, param="p"),
            r"Invalid schema in 'p': more than one option of a 'oneOf' may hold; use anyOf, or",
            "json_schema",
        ),
        (grammars.lark('root ::= ("a"', param="p"), "'p' cannot be used", "grammar"),
    ],
)
def test_what_is_wrong_is_said_without_the_text(
    checker: GrammarChecker, grammar: Grammar, says: str, code: str
) -> None:
    for ask in (lambda: check(checker, grammar), lambda: checker.check_blocking("", grammar)):
        with pytest.raises(InvalidRequestError, match=says) as caught:
            ask()
        assert (caught.value.param, caught.value.code) == ("p", f"invalid_{code}")


def test_the_slow_grammars_of_one_tenant_leave_a_process_to_others(
    checker: GrammarChecker,
) -> None:
    async def race() -> list[str]:
        done: list[str] = []

        async def ask(tenant: str, grammar: Grammar) -> None:
            try:
                await checker.check(tenant, grammar)
            except (InvalidRequestError, OverloadedError):
                pass
            done.append(tenant)

        slow = [wide(3500 + n, additionalProperties=False) for n in range(3)]
        await asyncio.gather(
            *(ask("slow", grammar) for grammar in slow), ask("quick", grammars.regex("quick"))
        )
        return done

    async def start_both() -> None:
        first = grammars.regex("both"), grammars.regex("processes")
        await asyncio.gather(*(checker.check(g.text, g) for g in first))

    asyncio.run(start_both())
    assert asyncio.run(race())[0] == "quick"


def test_real_time_grammars_go_before_best_effort_ones_of_the_same_tenant(
    checker: GrammarChecker,
) -> None:
    async def race() -> list[str]:
        done: list[str] = []

        async def ask(name: str, grammar: Grammar, *, urgent: bool) -> None:
            try:
                await checker.check("one", grammar, urgent=urgent)
            except (InvalidRequestError, OverloadedError):
                pass
            done.append(name)

        slow = [wide(3600 + n, additionalProperties=False) for n in range(3)]
        await asyncio.gather(
            *(ask("best-effort", grammar, urgent=False) for grammar in slow),
            ask("real-time", grammars.regex(f"rt{next(NUMBERS)}"), urgent=True),
        )
        return done

    async def start_both() -> None:
        first = grammars.regex("two"), grammars.regex("ready processes")
        await asyncio.gather(*(checker.check(g.text, g) for g in first))

    asyncio.run(start_both())
    assert asyncio.run(race())[0] == "real-time"


@pytest.mark.parametrize("urgent", [False, True])
def test_a_process_for_urgent_grammars_is_started_ahead(tmp_path: Path, urgent: bool) -> None:
    """Starting it takes seconds on a busy machine."""
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1])
    try:
        asyncio.run(made.check("one", grammars.regex("a"), urgent=urgent))
        running = [each._process is not None for each in made._free]
    finally:
        made.close()
    assert running == [True, not urgent, False]


def test_a_process_that_was_killed_is_started_again(tmp_path: Path) -> None:
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1])
    try:
        check(made, grammars.regex("a"))
        process = made._all[0]._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        check(made, grammars.regex("b"))
    finally:
        made.close()
    with pytest.raises(InvalidRequestError, match="the server stops"):
        check(made, grammars.regex("c"))


def test_stopped_processes_keep_no_grammar_waiting_for_ever(tmp_path: Path) -> None:
    """Those that run are stopped: the clients may try again, and then all goes on."""
    hung: list[bool] = []
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1], on_hung=lambda: hung.append(True))

    async def both(name: str) -> list[BaseException | None]:
        first = grammars.regex(f"{name}1"), grammars.regex(f"{name}2")
        asked = (made.check(grammar.text, grammar) for grammar in first)
        return await asyncio.gather(*asked, return_exceptions=True)

    try:
        assert asyncio.run(both("good")) == [None, None]
        for each in made._free[:2]:
            assert each._process is not None and each._connection is not None
            worker_process._set_timeout(each._connection, 0.2)
            os.kill(each._process.pid, signal.SIGSTOP)
        assert [type(error) for error in asyncio.run(both("slow"))] == [OverloadedError] * 2
        assert len(hung) == 2
        assert asyncio.run(both("slow")) == [None, None]
    finally:
        made.close()


def test_a_model_without_tokenizer_says_so(tmp_path: Path) -> None:
    made = GrammarChecker(tmp_path, 440, [1])
    try:
        with pytest.raises(InvalidRequestError, match=r"no tokenizer\.json"):
            check(made, grammars.regex("a"))
    finally:
        made.close()


class Compiler:
    """Takes its time, and finds nothing wrong."""

    error: str | None = None

    def __init__(self, *, works: bool) -> None:
        self._works = works

    def __call__(self, text: str) -> str:
        if self._works:
            while True:
                pass
        time.sleep(60)
        return ""


def test_a_child_without_cpu_time_is_no_reason_to_refuse_a_grammar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its client has to try again; one that has used its time is refused."""
    in_child: Any = grammar_check._in_child
    monkeypatch.setattr(grammar_check, "_WALL_S", 600.0)
    assert in_child(Compiler(works=True), "x") == grammar_check._TOO_LONG.encode()
    monkeypatch.setattr(grammar_check, "_WALL_S", 0.01)
    assert in_child(Compiler(works=False), "x") == grammar_check._BUSY


async def test_a_busy_machine_is_said_and_rows_are_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GrammarChecker(save_tokenizer(tmp_path), 440, [1])
    replies = [b"\0", b"\0", b"", b""]
    monkeypatch.setattr(WorkerProcess, "ask", lambda self, text: replies.pop(0))
    with pytest.raises(OverloadedError) as raised:
        await made.check("", grammars.regex("a"))
    assert raised.value.retry_after_s > 0
    made.check_blocking("", grammars.regex("a"))
    assert len(replies) == 1
    await made.check("", grammars.regex("a"))  # it is known by now
    made.close()
