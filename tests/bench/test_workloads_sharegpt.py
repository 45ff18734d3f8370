"""ShareGPT files: what people wrote is the prompt, its answer gives the length."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bros.bench.plan import digest
from bros.bench.workloads.catalogue import ShareGpt, TokenLimits, read_sharegpt
from bros.bench.workloads.contents import OpenLoop, RandomArrivals
from bros.core.errors import ConfigError


class Letters:
    """A token per character."""

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def chat(*said: tuple[str, str]) -> dict[str, Any]:
    turns = [{"from": role, "value": value} for role, value in said]
    return {"id": "x", "conversations": turns}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., ShareGpt]:
    def write_and_read(content: Any, **options: Any) -> ShareGpt:
        path = tmp_path / "chats.json"
        text = content if isinstance(content, str) else json.dumps(content)
        path.write_text(text, encoding="utf-8")
        return read_sharegpt(path, Letters(), **{"seed": 1, **options})

    return write_and_read


def asked(found: ShareGpt) -> dict[str, tuple[int, int]]:
    """Prompt -> its tokens and those of the answer."""
    texts = found.content.texts
    return {
        texts[piece.key]: (piece.tokens, draft.output_tokens)
        for (draft,) in found.content.recorded
        for piece in draft.prompt
    }


def test_the_first_question_and_its_answer_are_used(read: Callable[..., ShareGpt]) -> None:
    found = read(
        [
            chat(("human", " How are you? \n"), ("gpt", "Fine, thanks."), ("human", "Why?")),
            chat(("gpt", "(continued)"), ("user", "Tell me"), ("assistant", "What?")),
            chat(("system", "Be kind."), ("human", "Hello"), ("bing", "Good day")),
        ]
    )
    assert asked(found) == {"How are you?": (12, 13), "Tell me": (7, 5), "Hello": (5, 8)}
    assert found[1:] == (0, 0, 0)


def test_what_cannot_be_used_is_counted(read: Callable[..., ShareGpt]) -> None:
    found = read(
        [
            chat(),
            chat(("human", "nobody answers")),
            chat(("human", "one"), ("human", "two"), ("gpt", "three")),
            chat(("human", "abc"), ("gpt", "long enough")),
            chat(("human", "abcd"), ("gpt", "no")),
            chat(("human", "p" * 21), ("gpt", "long enough")),
            chat(("human", "p" * 20), ("gpt", "a" * 31)),
            chat(("human", "p" * 20), ("gpt", "a" * 30)),
        ],
        limits=TokenLimits(longest_prompt=20, longest_together=50),
    )
    assert asked(found) == {"p" * 20: (20, 30)}
    assert (found.without_question, found.too_short, found.too_long) == (3, 2, 2)


def test_seed_and_count_choose_the_conversations(read: Callable[..., ShareGpt]) -> None:
    content = [chat(("human", f"question {k}"), ("gpt", "answer")) for k in range(60)]
    every, some, others = (
        list(asked(read(content, seed=seed, take=take)))
        for seed, take in ((1, None), (1, 10), (2, 10))
    )
    assert sorted(every) == sorted(f"question {k}" for k in range(60))
    assert some == every[:10]
    assert others != some


def test_other_texts_are_another_plan(read: Callable[..., ShareGpt]) -> None:
    plans = set()
    for word in ("left", "side"):
        found = read([chat(("human", f"the {word} hand"), ("gpt", "which one"))])
        sessions = OpenLoop(found.content, RandomArrivals(1.0)).sessions(10.0, 1)
        plans.add(digest(sessions, []))
    assert len(plans) == 2


GOOD = '  {"conversations": []}'


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ("", 1, "does not begin with"),
        ('{"a": 1}', 1, "does not begin with"),
        (f"[\n{GOOD},\n{GOOD}\n", 4, "neither , nor ] follows"),
        (f"[\n{GOOD},\n{{]\n", 3, "not a JSON list"),
        (f"[\n{GOOD},\n\n 7]", 4, "not a conversation"),
        (f'[\n{GOOD},\n{{"items": []}}]', 3, "not a conversation"),
        ('[{"conversations": {"from": "a"}}]', 1, "not a conversation"),
        ('[\n{"conversations": [{"from": "human"}]}]', 2, "not a conversation"),
        ('[\n{"conversations": [{"from": "human", "value": null}]}]', 2, "not a conversation"),
    ],
)
def test_a_wrong_line_is_named(
    read: Callable[..., ShareGpt], tmp_path: Path, text: str, line: int, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        read(text)
    assert str(caught.value).startswith(f"{tmp_path / 'chats.json'}:{line}: ")


@pytest.mark.parametrize("text", ["[" * 100_000, "[" + "1" * 5_000 + "]"], ids=["deep", "long"])
def test_what_python_cannot_read_is_refused(
    read: Callable[..., ShareGpt], tmp_path: Path, text: str
) -> None:
    with pytest.raises(ConfigError, match="not a JSON list that can be read") as caught:
        read(text)
    assert str(caught.value).startswith(f"{tmp_path / 'chats.json'}: ")


def test_half_characters_of_scraped_texts_are_replaced(read: Callable[..., ShareGpt]) -> None:
    turns = (
        '{"from": "human", "value": "\\ud800 is half"}, {"from": "gpt", "value": "a half \\ud800"}'
    )
    found = read(f'[{{"conversations": [{turns}]}}]')
    assert list(found.content.texts.values()) == ["? is half"]


def test_nothing_to_use_is_an_error(read: Callable[..., ShareGpt], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no usable conversation"):
        read([])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sharegpt(tmp_path / "missing.json", Letters(), seed=1)
