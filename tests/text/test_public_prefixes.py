"""Which tokens of prompts are public, beside a naive count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bros.text.public_prefixes import PublicPrefixes
from support.scripted_server import make_tokenizer

SYSTEM = "Be kind & brief."

lists = st.lists(st.integers(0, 1), max_size=12)


@given(st.lists(lists, max_size=4), lists)
def test_what_a_prompt_has_in_common_with_a_prefix_is_public(
    prefixes: list[list[int]], prompt: list[int]
) -> None:
    expected = max(
        n
        for n in range(len(prompt) + 1)
        if n == 0 or any(len(p) >= n and p[:n] == prompt[:n] for p in prefixes)
    )
    public = PublicPrefixes(prefixes=prefixes)
    assert public.count(prompt) == expected
    assert public.count(tuple(prompt)) == expected
    assert public.count(prompt, cache_salt="s") == 0


def test_a_text_is_public_as_prompt_and_as_system_message() -> None:
    tokenizer = make_tokenizer()
    public = PublicPrefixes.of(tokenizer, [SYSTEM])
    plain = tokenizer.encode(SYSTEM)
    assert public.count(tokenizer.encode(f"{SYSTEM} What?")) == len(plain)
    system, user = {"role": "system", "content": SYSTEM}, {"role": "user", "content": "What?"}
    chat = tokenizer.apply_chat_template([system, user])
    begins = tokenizer.decode(chat[: public.count(chat)], skip_special_tokens=False)
    assert begins == f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
    other = tokenizer.apply_chat_template([{"role": "system", "content": "Be rude."}, user])
    begins = tokenizer.decode(other[: public.count(other)], skip_special_tokens=False)
    assert begins == "<|im_start|>system\nBe "


def test_all_or_nothing() -> None:
    prompt = [1, 2, 3]
    assert PublicPrefixes().count(prompt) == 0
    everything = PublicPrefixes(all_tokens=True)
    assert everything.count(prompt) > 10**9 and everything.count(prompt, cache_salt="s") == 0
