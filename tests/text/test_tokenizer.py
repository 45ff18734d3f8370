"""Tokenizer folders are read as transformers reads them, without transformers or torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, processors
from transformers import PreTrainedTokenizerFast

from bros.core.clock import ManualClock
from bros.core.errors import InvalidRequestError, ModelError, PromptTooLongError
from bros.text.tokenizer import ChatTemplates, Tokenizer
from support.tiny_tokenizer import (
    SENTENCES,
    SPECIAL,
    TEMPLATE,
    byte_level_backend,
    save_tokenizer,
    sentencepiece_backend,
    tiny_tokenizer,
)

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Größe of a fox? <b>&</b> 😀"},
]
TOKENIZER = tiny_tokenizer()


def transformers_ids(folder: Path, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    ids: list[int] = reference.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **kwargs
    )
    return ids


# ---- Text


@given(st.text())
def test_round_trip_and_bytes(text: str) -> None:
    token_ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(token_ids) == text
    assert b"".join(TOKENIZER.token_bytes(i) for i in token_ids) == text.encode()
    assert all(0 <= i < TOKENIZER.vocab_size for i in token_ids)


@given(st.lists(st.integers(0, 430), max_size=40), st.booleans())
@example([417], False)  # the first one beyond the vocabulary
def test_decode_is_that_of_the_library(token_ids: list[int], skip: bool) -> None:
    backend = TOKENIZER_BACKEND
    expected = backend.decode(token_ids, skip_special_tokens=skip)
    assert TOKENIZER.decode(token_ids, skip_special_tokens=skip) == expected


TOKENIZER_BACKEND = byte_level_backend()


def test_special_tokens_are_known_and_skipped() -> None:
    assert (TOKENIZER.bos_token, TOKENIZER.eos_token) == ("<|start|>", "<|end|>")
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id) == (0, 1)
    token_ids = TOKENIZER.encode("the<|end|> dog<tool_call>")
    assert 1 in token_ids
    assert TOKENIZER.decode(token_ids) == "the dog<tool_call>"
    assert TOKENIZER.decode(token_ids, skip_special_tokens=False) == "the<|end|> dog<tool_call>"
    assert TOKENIZER.token_text(1) == "<|end|>"


def test_token_bytes_of_half_characters() -> None:
    token_ids = TOKENIZER.encode("é")
    assert [TOKENIZER.token_bytes(i) for i in token_ids] in ([b"\xc3", b"\xa9"], [b"\xc3\xa9"])
    first_half = TOKENIZER_BACKEND.token_to_id("ð")  # how byte F0 is written
    assert TOKENIZER.token_bytes(first_half) == b"\xf0"
    assert TOKENIZER.token_text(first_half) == "\ufffd"
    assert TOKENIZER.token_bytes(10**6) == b""


def test_token_bytes_of_byte_fallback_and_spaces(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, sentencepiece_backend(), bos_token="<s>", eos_token="</s>")
    tokenizer = Tokenizer.load(tmp_path)
    token_ids = tokenizer.encode("the st~")
    pieces = [tokenizer.token_bytes(i) for i in token_ids]
    assert pieces == [b" the", b" st", b"~"]
    assert tokenizer.decode(token_ids) == "the st~"


def test_many_threads_may_share_a_tokenizer() -> None:
    texts = [f"{sentence} {i}" for i in range(20) for sentence in SENTENCES]
    expected = [(TOKENIZER.encode(text), text) for text in texts]

    def both(tokenizer: Tokenizer, text: str) -> tuple[list[int], str]:
        token_ids = tokenizer.encode(text)
        return token_ids, tokenizer.decode(token_ids)

    fresh = tiny_tokenizer()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda text: both(fresh, text), texts)) == expected


# ---- Folders


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_eos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"bos_token": {"__type": "AddedToken", "content": "<|start|>"}, "add_bos_token": True},
    ],
)
@pytest.mark.parametrize("template", [False, True], ids=["plain", "with post-processor"])
def test_tokens_around_a_prompt_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], template: bool
) -> None:
    backend = byte_level_backend()
    if template:
        backend.post_processor = processors.TemplateProcessing(
            single="<|start|> $A", special_tokens=[("<|start|>", 0)]
        )
    save_tokenizer(tmp_path, backend, **config)
    reference = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = "the dog"
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    plain = reference(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == plain


def test_a_special_token_only_the_config_names_is_special(tmp_path: Path) -> None:
    backend = byte_level_backend()
    dog = backend.token_to_id("Ġdog")
    save_tokenizer(tmp_path, backend, eos_token="Ġdog")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_id == dog
    assert tokenizer.decode([dog]) == ""
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_special_tokens_map_is_read_and_the_config_wins(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "x", "unk_token": "<|end|>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.bos_token == SPECIAL["bos_token"]


def test_truncation_and_padding_left_from_training_do_not_apply(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=10)
    tokenizer = Tokenizer.load(save_tokenizer(tmp_path, backend))
    text = SENTENCES[0]
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_an_old_folder_is_converted(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.model.save(str(tmp_path))  # vocab.json and merges.txt
    config = {"tokenizer_class": "GPT2Tokenizer", **SPECIAL, "unk_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.load(tmp_path)
    text = "The dog, 😀."
    assert tokenizer.encode(text) == backend.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no tokenizer.json"),
        ({"tokenizer.json": "{}"}, "cannot be read"),
        ({"tokenizer.json": "{", "tokenizer_config.json": "{}"}, "cannot be read"),
        ({"tokenizer_config.json": "{"}, "not valid JSON"),
        ({"tokenizer_config.json": "[]"}, "does not hold a JSON object"),
    ],
)
def test_unusable_folders_are_explained(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=message):
        Tokenizer.load(tmp_path)


def test_an_unsupported_decoder_is_refused_at_load(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, sentencepiece_backend(decoders.CTC()))
    with pytest.raises(ModelError, match="CTC"):
        Tokenizer.load(tmp_path)


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template=TEMPLATE)
    program = (
        "import sys, pathlib; from bros.text.tokenizer import Tokenizer\n"
        "import bros.text.generation\n"
        f"tokenizer = Tokenizer.load(pathlib.Path({str(tmp_path)!r}))\n"
        "print(tokenizer.apply_chat_template([{'role': 'user', 'content': 'the dog'}]))\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    token_ids, modules = done.stdout.splitlines()
    messages = [{"role": "user", "content": "the dog"}]
    assert json.loads(token_ids) == tiny_tokenizer().apply_chat_template(messages)
    assert modules == "[]"


# ---- Chat templates

TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, None]}}}]
TEMPLATES = {
    "plain": TEMPLATE,
    "special token variables": "{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}",
    "white space": "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n"
    "{% endfor %}",
    "json": "{{ messages | tojson }}{{ tools | tojson(indent=2) }}",
    "loop controls": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "generation tag": "{% for m in messages %}a{% generation %}{{ m.content }}{% endgeneration %}"
    "{% endfor %}b",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "own variable": "{{ 'thinking' if enable_thinking else 'not' }}",
    "nothing given": "{% if tools is not none %}tools{% endif %}"
    "{% if documents is not none %}documents{% endif %}{{ messages[0].content }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(tmp_path: Path, name: str) -> None:
    save_tokenizer(tmp_path, chat_template=TEMPLATES[name])
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.has_chat_template
    for kwargs in ({}, {"tools": TOOLS, "enable_thinking": True}):
        ours = tokenizer.apply_chat_template(MESSAGES, **kwargs)
        assert ours == transformers_ids(tmp_path, MESSAGES, **kwargs)


def test_templates_in_files_and_lists(tmp_path: Path) -> None:
    variants: list[dict[str, Any]] = [
        {"chat_template": [{"name": "default", "template": "d"}]},
        {
            "chat_template": [
                {"name": "default", "template": "d"},
                {"name": "tool_use", "template": "with tools"},
            ]
        },
    ]
    for config in variants:
        tokenizer = Tokenizer.load(save_tokenizer(tmp_path, **config))
        for tools in (None, TOOLS):
            ours = tokenizer.apply_chat_template(MESSAGES, tools=tools)
            assert ours == transformers_ids(tmp_path, MESSAGES, tools=tools)
    (tmp_path / "chat_template.jinja").write_text("from the file", encoding="utf-8")
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "from the file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES, tools=TOOLS) == "tool file"


@pytest.mark.parametrize("wrong", [5, ["default"], [{"name": "default"}], {"default": "x"}])
def test_templates_of_another_form_are_refused(tmp_path: Path, wrong: Any) -> None:
    save_tokenizer(tmp_path, chat_template=wrong)
    with pytest.raises(ModelError, match="neither a text nor a list of named ones"):
        Tokenizer.load(tmp_path)


def test_template_in_the_file_of_older_folders(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert not Tokenizer.load(tmp_path).has_chat_template
    (tmp_path / "chat_template.json").write_text('{"chat_template": "old"}')
    assert Tokenizer.load(tmp_path).render_chat(MESSAGES) == "old"


def test_the_date_in_a_template_comes_from_the_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    save_tokenizer(tmp_path, chat_template="{{ strftime_now('%Y-%m-%d') }}")
    expected = datetime.fromtimestamp(clock.unix_time()).strftime("%Y-%m-%d")
    assert Tokenizer.load(tmp_path, clock).render_chat(MESSAGES) == expected


def test_generation_prompt_can_be_left_out() -> None:
    assert TOKENIZER.render_chat(MESSAGES).endswith("<|start|>assistant\n")
    assert TOKENIZER.render_chat(MESSAGES, add_generation_prompt=False).endswith("<|end|>\n")


def test_no_template_is_a_clear_error() -> None:
    tokenizer = tiny_tokenizer(template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="no chat template") as caught:
        tokenizer.apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + messages[0].content.number }}", "number"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    ],
)
def test_what_a_template_cannot_take_is_the_requests_fault(template: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        tiny_tokenizer(template).apply_chat_template(MESSAGES)
    assert caught.value.param == "messages"


def test_a_template_that_is_no_jinja_fails_at_load(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat_template="{% for %}")
    with pytest.raises(ModelError, match="chat template 'default' is not valid"):
        Tokenizer.load(tmp_path)


def test_a_text_far_beyond_the_limit_is_refused_early_and_no_other() -> None:
    tokenizer = tiny_tokenizer()
    text = "the dog and the cat 🙂 " * 6000
    count = len(tokenizer.encode(text))
    assert tokenizer.encode(text, limit=count) == tokenizer.encode(text)
    with pytest.raises(PromptTooLongError, match="more than") as caught:
        tokenizer.encode(text, limit=1000)
    assert 1000 < caught.value.prompt_tokens < count
    assert len(tokenizer.encode("the dog " * 10, limit=1)) > 1, "short texts are simply encoded"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("backend", [byte_level_backend, sentencepiece_backend])
def test_long_texts_are_encoded_like_short_ones(
    backend: Callable[[], tokenizers.Tokenizer], special: bool
) -> None:
    """Long ones are encoded without the interpreter lock, by another method of the library."""
    made = Tokenizer(backend(), {}, ChatTemplates({}, {}, ManualClock()))
    text = "The quick <s> brown\n\n  fox é 😀 </s> " * 500
    expected = backend().encode(text, add_special_tokens=special).ids
    assert made.encode(text, add_special_tokens=special) == expected
