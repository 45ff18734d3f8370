"""bros.LLM: offline generation with a tiny model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bros import LLM, SamplingParams
from bros.core.errors import ConfigError, InvalidRequestError, PromptTooLongError
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import TEMPLATE, save_tokenizer, tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, vocab_size=1000)
    save_tokenizer(folder, chat_template=TEMPLATE)
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


def test_params_are_for_all_or_for_each(llm: LLM) -> None:
    each = [SamplingParams(max_tokens=k, ignore_eos=True, n=k) for k in (1, 2)]
    answers = llm.generate(["a", "b"], each, progress=False)
    assert [[len(choice.token_ids) for choice in answer] for answer in answers] == [[1], [2, 2]]
    with pytest.raises(InvalidRequestError, match="2 sampling params for 1 prompts"):
        llm.generate(["a"], each, progress=False)


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(conversation, GREEDY, progress=False)
    two = llm.chat([conversation, conversation], GREEDY, progress=False)
    assert [answer[0].token_ids for answer in two] == [one[0].token_ids] * 2
    # The rendered conversation is longer than one block, and that block is found again.
    assert [answer[0].cached_tokens for answer in (one, *two)] == [0, 16, 16]


def test_nothing_to_do_and_what_cannot_be_done(llm: LLM) -> None:
    assert llm.generate([], GREEDY, progress=False) == []
    with pytest.raises(PromptTooLongError):
        llm.generate(["fine", [1] * 5000], GREEDY, progress=False)
    assert len(llm.generate("fine", GREEDY, progress=False)) == 1, "it goes on working"


def test_a_wrong_option_names_itself(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--max-num-seqs"):
        LLM(str(folder), max_num_seqs=0)


def test_closing_from_another_thread_ends_what_waits(llm: LLM) -> None:
    errors: list[BaseException] = []

    def endless() -> None:
        params = SamplingParams(max_tokens=500, ignore_eos=True)
        try:
            llm.generate([[1]] * 60, params, progress=False)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=endless)
    waiting.start()
    llm.close()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    llm.close()
