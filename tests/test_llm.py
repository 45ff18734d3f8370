"""bros.LLM: offline generation with a tiny model."""

from __future__ import annotations

import array
import asyncio
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken

from bros import LLM, SamplingParams
from bros.core import grammars, loop_thread
from bros.core.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
)
from bros.core.interfaces import EngineStats
from bros.core.request import FinishReason, ServiceClass
from bros.engine import outbox
from bros.engine.client import MessageClient
from bros.engine.grammars import Grammars
from bros.engine.messages import Outputs, Reply
from bros.executor.runner import ModelRunner
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import (
    TEMPLATE,
    save_chat_llama,
    save_tokenizer,
    sentencepiece_backend,
    tiny_tokenizer,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(max_tokens=500, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_llama(folder)
    assert tiny_tokenizer().vocab_size <= 1000
    return folder


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), kernels="reference", kv_blocks=64, threads=1) as llm:
        yield llm


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["one", [5, 6, 7], "a longer one than the first"]
    together = llm.generate(prompts, GREEDY, progress=False)
    alone = [llm.generate(prompt, GREEDY, progress=False)[0] for prompt in prompts]
    assert [answer[0].token_ids for answer in together] == [a[0].token_ids for a in alone]
    assert all(len(answer[0].token_ids) == 6 for answer in together)


def test_tokens_that_are_not_streamed_come_together(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, a message per step would take a core from the engine."""
    monkeypatch.setattr(outbox, "GATHER_S", 60.0)  # for a slow machine
    messages: list[Outputs] = []
    on_reply = MessageClient.on_reply

    def noted(client: MessageClient, reply: Reply) -> None:
        if isinstance(reply, Outputs):
            messages.append(reply)
        on_reply(client, reply)

    monkeypatch.setattr(MessageClient, "on_reply", noted)
    sampling = SamplingParams(max_tokens=100, ignore_eos=True)
    answers = llm.generate(["one", "two"], sampling, progress=False)
    assert [len(answer[0].token_ids) for answer in answers] == [100, 100]
    assert len(messages) <= 4  # the first token and the others of each


def test_params_are_for_all_or_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=k, ignore_eos=True, n=k) for k in (1, 2)]
    answers = llm.generate(["a", "b"], each, progress=False)
    assert [[len(choice.token_ids) for choice in answer] for answer in answers] == [[1], [2, 2]]
    with pytest.raises(InvalidRequestError, match="2 sampling params for 1 prompts"):
        llm.generate(["a"], each, progress=False)


@pytest.mark.parametrize(
    "prompt", [[["a"]], [[1.5]], [5.5], [None], ["\ud800"], [b"bytes", "text"]]
)
def test_what_is_no_prompt_is_refused_and_the_engine_goes_on(llm: LLM, prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^prompts\S* must be a text or a list of token"):
        llm.generate(prompt, GREEDY, progress=False)
    with pytest.raises(InvalidRequestError, match=r"token id 1099511627776.* outside"):
        llm.generate([[2**40]], progress=False)
    with pytest.raises(InvalidRequestError, match=r"^messages\[0\] must be a list"):
        llm.chat(["hello"], GREEDY, progress=False)
    with pytest.raises(InvalidRequestError, match=r"^messages\S* must be a list"):
        llm.chat("hello", GREEDY, progress=False)
    assert len(llm.generate("one", GREEDY, progress=False)) == 1


def test_prompts_may_be_any_iterable_of_texts_or_token_ids(llm: LLM) -> None:
    ids = [5, 6, 7]
    (expected,) = llm.generate(ids, GREEDY, progress=False)
    one: list[Callable[[], Any]] = [
        *(lambda: np.array(ids), lambda: torch.tensor(ids), lambda: tuple(ids), lambda: iter(ids)),
        *(lambda: [np.int64(each) for each in ids], lambda: list(torch.tensor(ids))),
        *(lambda: array.array("i", ids), lambda: range(5, 8)),
    ]
    for prompt in one:
        assert llm.generate(prompt(), GREEDY, progress=False)[0][0].token_ids == (
            expected[0].token_ids
        )
        assert llm.context(prompt()).token_ids == tuple(ids)
        assert llm.embed(prompt()) == llm.embed(ids)
    several: list[Callable[[], Any]] = [
        *(lambda: np.array([ids, ids]), lambda: torch.tensor([ids, ids])),
        *(lambda: (each() for each in one[:2]), lambda: dict.fromkeys([tuple(ids), "b"]).keys()),
        *(lambda: [np.array(ids), "b"], lambda: iter([iter(ids), "b"])),
    ]
    for prompts in several:
        answers = llm.generate(prompts(), iter([GREEDY, GREEDY]), progress=False)
        assert answers[0][0].token_ids == expected[0].token_ids and len(answers) == 2
        assert len(llm.embed(prompts())) == 2
    (text,) = llm.generate("b", GREEDY, progress=False)
    (found,) = llm.generate(np.array(["b"]), GREEDY, progress=False)
    assert found[0].token_ids == text[0].token_ids


def test_what_callers_need_comes_from_the_package_itself(folder: Path) -> None:
    code = """
        import sys
        import bros

        assert "torch" not in sys.modules and "bros.llm" not in sys.modules
        from bros import *

        sampling = SamplingParams(grammar=grammars.choice(["yes", "no"]))
        with LLM(sys.argv[1], kernels="reference", kv_blocks=64, threads=1) as llm:
            ((answer,),) = llm.generate("a", sampling, service_class=ServiceClass.RT)
            assert isinstance(answer, ChoiceResult) and isinstance(llm.context(), Context)
            for wrong in ([1] * 5000, None):
                try:
                    llm.generate(wrong)
                except InvalidRequestError as error:
                    assert isinstance(error, BrosError)
                    print(isinstance(error, PromptTooLongError))
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "True\nFalse\n"), done.stderr


def test_texts_and_token_ids_can_be_told_from_each_other(llm: LLM) -> None:
    ids = llm.encode("hello there")
    assert llm.context("hello there").token_ids == tuple(ids)
    plain = llm.encode("hello there", add_special_tokens=False)
    assert plain and ids[-len(plain) :] == plain
    assert llm.decode(ids) == llm.decode(np.array(ids)) == "hello there"
    assert llm.decode(ids, skip_special_tokens=False) == llm.context("hello there").text
    assert llm.decode([]) == ""
    assert "".join(map(llm.token_text, ids)) == llm.decode(ids, skip_special_tokens=False)
    with pytest.raises(InvalidRequestError, match="token_id"):
        llm.token_text(10**6)
    (answer,) = llm.generate(ids, GREEDY, progress=False)[0]
    assert llm.decode(answer.token_ids) == answer.text
    with pytest.raises(PromptTooLongError):
        llm.generate([5] * (llm.max_model_len + 1), progress=False)
    assert llm.generate([5] * (llm.max_model_len - 1), progress=False)
    for wrong in (None, 5, "a", [1.5], ["a"], [[5]], [-1], [2**40]):
        with pytest.raises(InvalidRequestError, match=r"^'?token_ids"):
            llm.decode(wrong)  # type: ignore[arg-type]
    for wrong in (None, 5, b"a", "\ud800"):
        with pytest.raises(InvalidRequestError, match="^text must be a text"):
            llm.encode(wrong)  # type: ignore[arg-type]


def test_conversations_and_contexts_may_be_any_iterable(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (expected,) = llm.chat(conversation, GREEDY, progress=False)
    for messages in (iter(conversation), iter([iter(conversation)]), [tuple(conversation)]):
        (found,) = llm.chat(messages, GREEDY, progress=False)
        assert found[0].token_ids == expected[0].token_ids
    context = llm.context(iter(conversation))
    (found_in,) = llm.generate_in(iter([context]), iter([[]]), iter([GREEDY]))
    assert found_in.token_ids == expected[0].token_ids


OF_ANOTHER_KIND: list[tuple[Callable[[Any], object], str]] = [
    (lambda llm: llm.generate(None), "prompts must be a text, a list of token ids, or a list"),
    (lambda llm: llm.generate(5), "prompts must be a text"),
    (lambda llm: llm.generate({"prompt": "a"}), "prompts must be a text"),
    (lambda llm: llm.generate([{"prompt": "a"}]), r"prompts\[0\] must be a text or a list of"),
    (lambda llm: llm.generate(["a", None]), r"prompts\[1\] must be a text or a list of token"),
    (
        lambda llm: llm.generate(np.array([0.5])),
        r"prompts\[0\] must be a text or a list",
    ),
    (lambda llm: llm.embed(None), "texts must be a text, a list of token ids, or a list of"),
    (lambda llm: llm.context(None), "beginning must be a text, a list of token ids, or mess"),
    (lambda llm: llm.context({"role": "user"}), "beginning must be a text"),
    (lambda llm: llm.context("\ud800"), "beginning must be a text or a list of token ids"),
    (lambda llm: llm.context().fill(5), "prompt must be a text or a list of token ids, got 5"),
    (lambda llm: llm.chat(None), r"messages must be a list of {.*}, or a list of such lists"),
    (lambda llm: llm.chat("hello"), "messages must be .*, got 'hello'"),
    (lambda llm: llm.chat({"role": "user", "content": "a"}), "messages must be a list"),
    (
        lambda llm: llm.chat([{"role": "user", "content": "\ud800"}]),
        r"messages\[0\]: the content has half of a surrogate pair",
    ),
    (lambda llm: llm.generate("a", {"max_tokens": 3}), "params must be SamplingParams or a li"),
    (lambda llm: llm.generate("a", 5), "params must be SamplingParams or a list"),
    (lambda llm: llm.generate(["a"], [None]), r"params\[0\] must be SamplingParams, got None"),
    (lambda llm: llm.generate(["a"], [{"n": 3}]), r"params\[0\] must be SamplingParams, got"),
    (lambda llm: llm.generate_in(["a"], "b"), r"contexts\[0\] must be a context, got 'a'"),
    (lambda llm: llm.generate_in(llm.context("a"), "b"), "contexts must be a list of contexts"),
    (lambda llm: llm.generate_in([llm.context("a")], 5), "prompts must be a text or a list"),
    (lambda llm: llm.context("a").generate("b", {}), "params must be SamplingParams or a list"),
]


def test_what_is_of_another_kind_is_refused_in_the_terms_of_the_caller(llm: LLM) -> None:
    for ask, message in OF_ANOTHER_KIND:
        with pytest.raises(InvalidRequestError, match=f"^{message}"):
            ask(llm)


def test_outputs_match_a_grammar(folder: Path) -> None:
    with LLM(str(folder), kernels="reference", kv_blocks=64, threads=1) as llm:
        gbnf = 'root ::= "stop " "there" | "go on"'
        for grammar in (grammars.choice(["stop there", "go on"]), grammars.lark(gbnf)):
            sampling = SamplingParams(grammar=grammar, n=4, seed=3, max_tokens=20)
            (answer,) = llm.generate(["The fox"], sampling, progress=False)
            assert {choice.text for choice in answer} <= {"stop there", "go on"}
        with pytest.raises(InvalidRequestError, match="The grammar cannot be used: unknown name"):
            llm.generate(["a"], SamplingParams(grammar=grammars.lark("start: x")), progress=False)


def test_a_call_may_have_more_grammars_than_an_engine_lets_wait(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_with = Grammars._compile_with

    def compiles_slowly(*args: Any) -> None:
        time.sleep(0.001)
        compile_with(*args)

    monkeypatch.setattr(Grammars, "_compile_with", compiles_slowly)
    words = [f"word {number}" for number in range(700)]
    params = [SamplingParams(grammar=grammars.choice([word])) for word in words]
    with ThreadPoolExecutor(2) as pool:  # as for two calls at once
        calls = [
            pool.submit(llm.generate, ["say"] * 350, params[begin:][:350], progress=False)
            for begin in (0, 350)
        ]
        found = [choice.text for call in calls for (choice,) in call.result()]
    assert found == words


def test_a_call_may_have_more_prompts_than_the_queue_takes(folder: Path) -> None:
    with LLM(str(folder), kernels="reference", kv_blocks=64, threads=1, max_queue=4) as llm:
        prompts = [[5, 6, 7 + number] for number in range(30)]
        two = GREEDY.with_changes(n=2)
        answers = llm.generate(prompts, two, progress=False)
        (alone,) = llm.generate(prompts[20], two, progress=False)
    assert [[choice.token_ids for choice in answer] for answer in answers[20:21]] == [
        [choice.token_ids for choice in alone]
    ]


def test_a_grammar_of_a_chat_applies_after_the_reasoning(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, vocab_size=1000)
    save_tokenizer(tmp_path, chat_template=TEMPLATE + "<think>")
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    # The bias lets a random model end its thoughts: a grammar forbids the marker behind them.
    sampling = SamplingParams(
        logit_bias={backend.token_to_id("</think>"): 5},
        grammar=grammars.choice(["yes", "no"]),
        n=4,
        seed=1,
        max_tokens=200,
    )
    conversation = [{"role": "user", "content": "hello"}]
    with LLM(str(tmp_path), kernels="reference", kv_blocks=64, threads=1) as llm:
        (answers,) = llm.chat(conversation, sampling, progress=False)
        (raw,) = llm.generate("hello", sampling, progress=False)
        (free,) = llm.chat(conversation, sampling.with_changes(grammar=None), progress=False)
    assert {answer.text for answer in answers} <= {"yes", "no"}
    assert any(answer.reasoning for answer in answers)
    assert {(answer.text, answer.reasoning) for answer in raw} <= {("yes", ""), ("no", "")}
    assert [answer.reasoning for answer in free] == [answer.reasoning for answer in answers]
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([[]], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [{"x": 1}]}], "messages[0].tool_calls"),
    ],
)
def test_messages_that_no_template_can_take_are_refused(
    llm: LLM, messages: Any, param: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        llm.chat(messages, GREEDY, progress=False)
    assert raised.value.param == param
    if messages != [[]]:
        with pytest.raises(InvalidRequestError):
            llm.context(messages)


def test_contents_may_be_parts(llm: LLM) -> None:
    plain = [{"role": "user", "content": "hello\nthere"}]
    parts = [{"type": "text", "text": text} for text in ("hello", "there")]
    first, second = (
        llm.chat([{"role": "user", "content": content}], GREEDY, progress=False)[0][0]
        for content in (plain[0]["content"], parts)
    )
    assert first.token_ids == second.token_ids


def test_a_wrong_class_is_refused_and_the_engine_goes_on(llm: LLM) -> None:
    asked: list[Callable[[Any], object]] = [
        lambda wrong: llm.generate("a", GREEDY, service_class=wrong, progress=False),
        lambda wrong: llm.context("a", service_class=wrong),
        lambda wrong: llm.embed("a", service_class=wrong),
    ]
    for ask in asked:
        with pytest.raises(InvalidRequestError, match="service_class must be"):
            ask("best")
    assert llm.generate("a", GREEDY, service_class="rt", progress=False)  # type: ignore[arg-type]


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, GREEDY, progress=False)
    two = llm.chat([conversation, conversation], GREEDY, progress=False)
    assert [answer[0].token_ids for answer in two] == [one[0].token_ids] * 2
    # The rendered conversation is longer than one block, and that block is found again.
    assert [answer[0].cached_tokens for answer in (one, *two)] == [0, 16, 16]


def test_arguments_of_calls_in_a_chat_may_be_an_object_or_its_json(llm: LLM) -> None:
    def conversation(arguments: object) -> list[dict[str, object]]:
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "x"}]

    chats = [conversation({"a": [1]}), conversation('{"a":[1]}'), conversation("{oops")]
    one, two, other = llm.chat(chats, GREEDY, progress=False)
    assert one[0].token_ids == two[0].token_ids and other[0].finish_reason.complete


def test_forks_of_a_context_answer_like_plain_prompts_and_compute_what_differs(llm: LLM) -> None:
    with llm.context("a beginning of a few blocks, " * 10) as context:
        beginning = context.token_ids
        assert len(context) == len(beginning) > 48
        forks = [context.fork() for _ in range(3)]
        answers = llm.generate_in(forks, [" one", " two", [5, 6, 7]], GREEDY)
        assert [answer.cached_tokens for answer in answers] == [len(beginning) // 16 * 16] * 3
        prompts = [
            list(fork.token_ids[: len(fork) - len(answer.token_ids)])
            for fork, answer in zip(forks, answers, strict=True)
        ]
        assert all(tuple(prompt[: len(context)]) == beginning for prompt in prompts)
        plain = llm.generate(prompts, GREEDY, progress=False)
        assert [choice.text for (choice,) in plain] == [answer.text for answer in answers]
        assert context.token_ids == beginning
        before = forks[0].token_ids
        added = forks[0].fill(" more")
        further = forks[0].generate(" and", GREEDY)
        assert forks[0].token_ids[: len(before)] == before and added
        ((expected,),) = llm.generate(
            [forks[0].token_ids[: -len(further.token_ids)]], GREEDY, progress=False
        )
        assert further.token_ids == expected.token_ids
    with pytest.raises(InvalidRequestError, match="has been freed"):
        context.fork()
    assert context.free() == 0 and forks[1].free() == len(forks[1])


def test_texts_of_a_context_have_special_tokens_at_its_beginning_only(llm: LLM) -> None:
    context = llm.context()
    assert context and not len(context)
    context.fill("one")
    context.fill(" two")
    tokenizer = llm._engine.tokenizer
    assert list(context.token_ids) == [
        *tokenizer.encode("one"),
        *tokenizer.encode(" two", add_special_tokens=False),
    ]
    assert context.text == tokenizer.decode(context.token_ids, skip_special_tokens=False)
    messages = [{"role": "user", "content": "hello"}]
    chat = llm.context(messages)
    assert list(chat.token_ids) == tokenizer.apply_chat_template(messages)
    ((plain,),) = llm.chat(messages, GREEDY, progress=False)
    assert chat.generate(params=GREEDY).text == plain.text


def test_forks_with_one_seed_have_different_answers_that_can_be_repeated(llm: LLM) -> None:
    def answers(params: SamplingParams | list[SamplingParams]) -> list[tuple[int, ...]]:
        with llm.context("a beginning") as context:
            forks = [context.fork() for _ in range(3)]
            return [answer.token_ids for answer in llm.generate_in(forks, " of", params)]

    params = SamplingParams(seed=7, max_tokens=6, ignore_eos=True)
    first = answers(params)
    assert len(set(first)) == 3 and first == answers(params)
    assert answers([params] * 3) == first[:1] * 3


def test_a_text_goes_on_within_a_word_of_its_context(tmp_path: Path) -> None:
    """SentencePiece writes a space before any text that it encodes."""
    backend = sentencepiece_backend()
    save_tiny_llama(tmp_path, vocab_size=backend.get_vocab_size())
    save_tokenizer(tmp_path, backend, bos_token="<s>", eos_token="</s>")
    with LLM(str(tmp_path), kernels="reference", kv_blocks=64, threads=1) as llm:
        context = llm.context("the")
        the = SamplingParams(max_tokens=2, logit_bias={backend.token_to_id("▁the"): 100})
        assert context.generate("m", the).text == " the the"
        context.fill(" sun")
        assert context.text == "them the the sun"


def test_what_a_context_cannot_do_names_itself(llm: LLM, folder: Path) -> None:
    context = llm.context("a beginning")
    before = context.token_ids
    with pytest.raises(InvalidRequestError, match="n=2; fork it"):
        context.generate(" of", SamplingParams(n=2))
    with pytest.raises(PromptTooLongError):
        context.fill([1] * 5000)
    with pytest.raises(PromptTooLongError):
        context.generate([1] * 5000)
    with pytest.raises(InvalidRequestError, match="2 prompts for 1 contexts"):
        llm.generate_in([context], ["a", "b"])
    with pytest.raises(InvalidRequestError, match="two jobs at once"):
        llm.generate_in([context, context], "a")
    with (
        LLM(str(folder), kernels="reference", kv_blocks=64, threads=1) as other,
        pytest.raises(InvalidRequestError, match="another LLM"),
    ):
        other.generate_in([context], "a")
    assert context.token_ids == before
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        context.generate(" of")
    assert context.free() == 0


@pytest.mark.slow
def test_forks_of_the_embedded_model() -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(threads=1) as llm:
        context = llm.context(
            "The rivers of Europe are long, and ships go up and down on them. " * 3
        )
        forks = [context.fork() for _ in range(2)]
        answers = llm.generate_in(forks, ["The longest one is", "The widest one is"], greedy)
        prompts = [
            fork.token_ids[: len(fork) - len(answer.token_ids)]
            for fork, answer in zip(forks, answers, strict=True)
        ]
        plain = llm.generate(prompts, greedy, progress=False)
    assert [choice.text for (choice,) in plain] == [answer.text for answer in answers]
    assert [answer.cached_tokens for answer in answers] == [len(context) // 16 * 16] * 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "prompts[2]: The prompt is empty"),
        ([1] * 5000, "prompts[2]: This model's maximum context length"),
        ([999_999], "'prompts[2]' has token id 999999, which is outside the vocabulary"),
        ([1.5], "prompts[2] must be a text or a list of token ids"),
    ],
)
def test_an_error_names_the_prompt_and_nothing_has_run_before_it(
    llm: LLM, bad: list[int], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        llm.generate([[5, 6], [5, 7], bad, [5, 8]], GREEDY, progress=False)
    assert str(raised.value).startswith(message) and raised.value.param == "prompts[2]"
    assert llm._run(llm._engine.client.stats()).steps == 0


def test_an_error_names_the_text_or_the_prompt_of_a_context(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError, match=r"^texts\[1\]: This model takes at most"):
        llm.embed([[5], [1] * 5000])
    with pytest.raises(InvalidRequestError, match=r"^texts\[1\]: The text is empty"):
        llm.embed([[5], []])
    with pytest.raises(InvalidRequestError, match=r"^'texts\[1\]' has token id 999999"):
        llm.embed([[5], [999_999]])
    contexts = [llm.context("one"), llm.context("two")]
    with pytest.raises(PromptTooLongError, match=r"^prompts\[1\]: This model's maximum"):
        llm.generate_in(contexts, ["a", [1] * 5000])
    with pytest.raises(InvalidRequestError, match=r"^'prompts\[1\]' has token id 999999"):
        llm.generate_in(contexts, ["a", [999_999]])
    with pytest.raises(InvalidRequestError, match="^'prompt' has token id 999999"):
        contexts[0].generate([999_999])


def test_an_error_names_the_conversation_and_its_message(llm: LLM) -> None:
    good = [{"role": "user", "content": "hello"}]
    for bad, name in (
        ([*good, {"role": "user"}], "messages[1][1]: the content must be"),
        ([], "messages[1] must not be empty"),
        ([{"role": "user", "content": "x " * 5000}], "messages[1]: This model's maximum"),
    ):
        with pytest.raises(InvalidRequestError) as raised:
            llm.chat([good, bad, good], GREEDY, progress=False)
        assert str(raised.value).startswith(name)
        assert str(raised.value.param).startswith("messages[1]")
    with pytest.raises(InvalidRequestError, match=r"^beginning\[1\]: the content must be"):
        llm.context([*good, {"role": "user"}])


def test_an_error_names_the_prompt_of_params_and_of_a_grammar(llm: LLM) -> None:
    wrong = SamplingParams(stop_token_ids=(999_999,))
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: 'stop_token_ids' has") as raised:
        llm.generate(["a", "b"], [GREEDY, wrong], progress=False)
    assert raised.value.param == "stop_token_ids"
    wrong = SamplingParams(grammar=grammars.lark("start: x"))
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: The grammar cannot"):
        llm.generate(["a", "b"], [GREEDY, wrong], progress=False)
    with pytest.raises(InvalidRequestError, match=r"^The grammar cannot"):
        llm.generate("b", wrong, progress=False)


def test_nothing_to_do_and_what_cannot_be_done(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []
    with pytest.raises(PromptTooLongError):
        llm.generate(["fine", [1] * 5000], GREEDY, progress=False)
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1, "it goes on working"


def test_a_wrong_option_names_itself(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        LLM(str(folder), max_num_seqs=0)


def test_options_may_be_paths_and_numbers_of_bytes(folder: Path) -> None:
    with LLM(folder, kernels="reference", kv_memory=2**20, host_kv_memory=2**20, threads=1) as llm:
        in_number = llm._engine.client.info
    with LLM(
        str(folder), kernels="reference", kv_memory="1MiB", host_kv_memory="1MiB", threads=1
    ) as llm:
        assert llm._engine.client.info == in_number


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"kv_mem": "1GiB"}, TypeError, "LLM has no option 'kv_mem'; did you mean kv_memory?"),
        ({"dtype": "bf16"}, TypeError, "LLM has no option 'dtype'; it has those of the engine"),
        ({"port": 9000}, TypeError, "LLM has no option 'port'"),
        ({"model": 5}, ConfigError, "model: a name or a path is needed, got 5"),
        ({"model": Path("/no/such")}, ModelError, "there is no file or folder /no/such"),
        ({"kv_memory": -1}, ConfigError, "--kv-memory: '-1' is not a size"),
        ({"kv_memory": True}, ConfigError, "--kv-memory: 'True' is not a size"),
        ({"cuda_graphs": False}, ConfigError, "--cuda-graphs: False is not one of on, off"),
    ],
)
def test_what_is_no_option_or_no_model_is_named(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        LLM(**options)


def test_threads_that_generate_at_once_each_get_their_own_answers(llm: LLM) -> None:
    prompts = [[5, 6, 7 + n] for n in range(4)]
    sampling = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    alone = [llm.generate(prompt, sampling, progress=False)[0][0] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = pool.map(lambda ids: llm.generate(ids, sampling, progress=False), prompts)
    assert [answer.token_ids for ((answer,),) in together] == [a.token_ids for a in alone]


def test_when_a_step_fails_the_caller_that_waits_gets_the_reason(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "execute", failing_after(3, ModelRunner.execute))
    with pytest.raises(EngineDeadError, match="device on fire"):
        llm.generate(["one", "two"], LONG, progress=False)
    with pytest.raises(EngineDeadError, match="device on fire"):
        llm.context("a beginning")


def test_when_a_step_hangs_the_caller_that_waits_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, go_on = ModelRunner.execute, threading.Event()

    def hanging(self: ModelRunner, *args: Any) -> Any:
        go_on.wait()
        return execute(self, *args)

    with LLM(str(folder), kernels="reference", kv_blocks=64, hang_timeout=1.0) as llm:
        for _ in range(3):  # the first steps of a size may take long
            llm.generate(["one", "two"], GREEDY, progress=False)
        monkeypatch.setattr(ModelRunner, "execute", hanging)
        begun_s = time.monotonic()
        with pytest.raises(EngineDeadError, match="has not ended after .* cannot be replaced"):
            llm.generate(["one", "two"], GREEDY, progress=False)
        assert time.monotonic() - begun_s > 0.5
        with pytest.raises(EngineDeadError, match="has not ended"):
            llm.context("a beginning")
    assert "bros-engine" in {thread.name for thread in threading.enumerate()}  # not waited for
    go_on.set()


def failing_after(steps: int, execute: Callable[..., Any]) -> Callable[..., Any]:
    """`execute`, which fails after so many steps."""
    left = [None] * steps

    def failing(*args: object) -> object:
        if not left:
            raise RuntimeError("device on fire")
        left.pop()
        return execute(*args)

    return failing


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_aborts_what_the_caller_waits_for(llm: LLM) -> None:
    def interrupt() -> None:
        while not stats().by_class[ServiceClass.BE].running:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    def stats() -> EngineStats:
        return llm._run(llm._engine.client.stats())

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1]] * 60, LONG, progress=False)
    interrupting.join()
    while stats().by_class[ServiceClass.BE].running:
        time.sleep(0.001)
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1, "it goes on working"


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("late", [0.2, 0.5], ids=["in time", "too late"])
def test_an_interrupt_in_a_context_stays_one(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """The context is freed as the block ends, while the job in it may not have ended yet."""
    abort = MessageClient.abort

    async def aborts_late(client: MessageClient, request_id: str) -> None:
        await asyncio.sleep(late)
        await abort(client, request_id)

    def interrupt() -> None:
        while not llm._run(llm._engine.client.stats()).by_class[ServiceClass.BE].running:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(MessageClient, "abort", aborts_late)
    if late > 0.2:
        monkeypatch.setattr(loop_thread, "_INTERRUPT_S", 0.1)
    interrupting = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt), llm.context("a beginning") as context:
        interrupting.start()
        context.generate(" of", LONG)
    interrupting.join()
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1, "it goes on working"


def test_an_interrupt_while_the_model_is_loaded_ends_the_program_at_once(folder: Path) -> None:
    """At most after loading, which no other thread can end."""
    code = """
        import os, signal, sys, threading
        import bros.transport.local as local
        from bros import LLM

        # A shell lets what it starts in the background ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        def interrupted(*args, build=local.build_engine, **options):
            os.kill(os.getpid(), signal.SIGINT)
            return build(*args, **options)

        local.build_engine = interrupted
        try:
            LLM(sys.argv[1], kv_blocks=64, threads=1)
        except KeyboardInterrupt:
            print("interrupted")
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
    assert "Error" not in done.stderr and "terminate" not in done.stderr


def test_a_forked_child_is_refused_at_once_and_leaves_without_waiting(folder: Path) -> None:
    """multiprocessing.Pool forks by default; threads such as the engine's do not survive that."""
    code = """
        import multiprocessing, os, sys
        from bros import LLM
        from bros.core.errors import EngineDeadError

        def ask(prompt):
            try:
                return llm.generate(prompt, progress=True)
            except EngineDeadError as error:
                return str(error)

        llm = LLM(sys.argv[1], kernels="reference", kv_blocks=64, threads=1)
        context = llm.context("a beginning")
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.map(ask, ["one"])[0])
        with llm, context:
            child = os.fork()
            if child:
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if child:
            print("left")
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refused, status, left = done.stdout.splitlines()
    assert re.match(r"This LLM .* belongs to process \d+, and a forked child", refused)
    assert (status, left) == ("0", "left")
    assert "generating" not in done.stdout + done.stderr


@pytest.mark.parametrize("progress", ["", "progress=None", "progress=False", "progress=True"])
def test_a_progress_bar_is_on_stderr_and_in_files_only_if_asked_for(
    folder: Path, progress: str
) -> None:
    """The output of a script is often read by a program."""
    code = f"""
        import sys
        from bros import LLM, SamplingParams

        with LLM(sys.argv[1], kernels="reference", kv_blocks=64, threads=1) as llm:
            for _ in range(2):
                llm.generate(["one", "two"], SamplingParams(max_tokens=2), {progress})
        """
    command = [sys.executable, "-c", textwrap.dedent(code), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("generating") == (2 if progress == "progress=True" else 0)


def test_a_progress_bar_is_on_a_terminal_and_leaves_redirected_output_alone() -> None:
    code = """
        import sys
        from bros.terminal import progress_bar

        with progress_bar("counting") as advance:
            advance(1, 2, "half")
            print("data")
        """
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environ = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environ, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 65536)
    os.close(ours)
    assert (done.returncode, done.stdout) == (0, b"data\n")
    assert b"counting" in shown and b"1/2" in shown


def test_closing_from_another_thread_ends_what_waits(llm: LLM) -> None:
    errors: list[BaseException] = []

    def endless() -> None:
        try:
            llm.generate([[1]] * 60, LONG, progress=False)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=endless)
    waiting.start()
    llm.close()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    llm.close()
