"""Grammars by llguidance, with a small byte-level tokenizer: what they allow, force and refuse."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import threading
import time
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bros.core import grammars
from bros.core.clock import ManualClock
from bros.core.errors import InvalidRequestError, OverloadedError
from bros.core.interfaces import GrammarState, StopRule
from bros.core.request import Grammar
from bros.engine import grammars as engine_grammars
from bros.engine.grammars import Grammars
from support.machine_speed import slowdown
from support.scheduling import engine_info
from support.tier import by_tier, examples, seed
from support.tiny_tokenizer import byte_level_backend, save_tokenizer

END = 1  # <|end|>
VOCAB = 440  # more than the tokenizer has, as in many models
BACKEND = byte_level_backend()
STOPS = StopRule(frozenset({END}), 0, END)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def made(folder: Path | None, *, ahead: bool = False, **info: Any) -> Grammars:
    about = dataclasses.replace(
        engine_info(), **{"vocab_size": VOCAB, "eos_token_ids": (END,), **info}
    )
    return Grammars(folder, about, ManualClock(), ahead=ahead)


@pytest.fixture(params=[False, True], ids=["on demand", "ahead"])
def compiler(folder: Path, request: pytest.FixtureRequest) -> Grammars:
    return made(folder, ahead=request.param)


def ids(text: str) -> list[int]:
    found: list[int] = BACKEND.encode(text, add_special_tokens=False).ids
    return found


def text_of(tokens: list[int]) -> str:
    return str(BACKEND.decode(tokens, skip_special_tokens=False))


def allowed(state: GrammarState) -> set[int]:
    mask = np.frombuffer(state.constraint().mask(), np.uint8)
    return set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())


def follow(state: GrammarState, text: str) -> None:
    for token_id in ids(text):
        assert state.constraint().allows(token_id)
        state.advance([token_id], 0)


def test_choice_is_forced_where_its_options_agree(compiler: Grammars) -> None:
    state = compiler.state(grammars.choice(["stop here", "stop there"]), STOPS)
    forced = list(state.advance((), 99))
    assert "stop ".startswith(text_of(forced).rstrip()) and forced
    rest = "stop here"[len(text_of(forced)) :]
    follow(state, rest)
    assert list(state.advance((), 99)) == [END]


def test_at_most_so_many_tokens_are_forced(compiler: Grammars) -> None:
    grammar = grammars.choice(["The quick brown fox"])
    whole = list(compiler.state(grammar, STOPS).advance((), 99))
    assert text_of(whole) == "The quick brown fox<|end|>" and len(whole) > 3
    for most in range(len(whole)):
        state = compiler.state(grammar, STOPS)
        assert list(state.advance((), most)) == whole[:most]
        assert allowed(state) >= {whole[most]}


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.json_object(),
        grammars.json_schema({"type": "array", "items": {"enum": ["stop", 1, None]}}),
        grammars.regex(r"[a-z]+ (dog|fox)/?\d*"),
        grammars.lark('start: "<" start ">" | "x"+'),
    ],
    ids=["object", "array", "regex", "lark"],
)
def test_checks_and_masks_agree_and_every_walk_ends_in_a_match(
    folder: Path, grammar: Grammar
) -> None:
    """A check of a token, a mask computed when it is asked for, and one computed ahead."""
    checking, masking, ahead = made(folder), made(folder), made(folder, ahead=True)
    for number in range(by_tier(fast=4, long=100)):
        rng = random.Random(seed(number))
        states = [each.state(grammar, STOPS) for each in (checking, masking, ahead)]
        for state in states:
            state.advance((), 0)
        tokens: list[int] = []
        for _ in range(40):
            by_check = {t for t in range(VOCAB) if states[0].constraint().allows(t)}
            by_mask = allowed(states[1])
            assert by_mask == allowed(states[2]) and by_mask
            # Where the text is forced, the mask has the token only that the tokenizer would take.
            assert by_check == by_mask or (by_check > by_mask and len(by_mask) == 1)
            if END in by_check and (len(tokens) > 25 or by_check == {END}):
                break
            token_id = rng.choice(sorted(by_check - {END}))
            tokens.append(token_id)
            assert len({tuple(state.advance([token_id], 0)) for state in states}) == 1
        assert 0 not in tokens, "the text of a special token is not a special token"
        if END in by_check and grammar.text.startswith("start: %json"):
            json.loads(BACKEND.decode(tokens, skip_special_tokens=False))


def test_forced_tokens_are_those_that_are_allowed_alone_or_spell_what_is(
    compiler: Grammars,
) -> None:
    schema = {
        "type": "object",
        "properties": {"over": {"type": "integer"}, "dog": {"enum": ["lazy", "quick"]}},
        "required": ["over", "dog"],
        "additionalProperties": False,
    }
    forcing = compiler.state(grammars.json_schema(schema), STOPS)
    text = text_of(list(forcing.advance((), 99)))
    assert text.startswith('{"over":')
    follow(forcing, '{"over": 3,'[len(text) :])
    text += text_of(list(forcing.advance((), 99)))
    assert ' "dog"' in text


def test_output_may_end_only_where_it_is_complete(compiler: Grammars) -> None:
    stop_word = ids("z")[0]
    stops = StopRule(frozenset({END, stop_word}), 0, END)
    state = compiler.state(grammars.regex("[a-z]{2,3}"), stops)
    state.advance((), 0)
    for complete in (False, False, True):
        assert ({END, stop_word} <= allowed(state)) is complete
        assert state.constraint().allows(stop_word) is complete
        assert state.constraint().allows(END) is complete
        state.advance(ids("a"), 0)
    assert allowed(state) == {END, stop_word}


def test_min_tokens_keep_it_from_ending_unless_nothing_can_follow(compiler: Grammars) -> None:
    state = compiler.state(grammars.regex("a{1,3}"), StopRule(frozenset({END}), 9, END))
    state.advance(ids("a")[:1], 0)
    assert END not in allowed(state) and not state.constraint().allows(END)
    state.advance(ids("a")[:1], 0)
    state.advance(ids("a")[:1], 0)
    assert allowed(state) == {END}


def test_without_stop_tokens_it_ends_where_nothing_can_follow(compiler: Grammars) -> None:
    """As with ignore_eos."""
    state = compiler.state(grammars.regex("a{1,2}"), StopRule(frozenset(), 0, END))
    assert list(state.advance(ids("a")[:1], 99)) == []
    assert END not in allowed(state) and not state.constraint().allows(END)
    assert list(state.advance(ids("a")[:1], 99)) == [END]
    assert allowed(state) == {END}


def test_grammar_begins_behind_the_text_it_comes_after(compiler: Grammars) -> None:
    grammar = dataclasses.replace(grammars.choice(["dog", "fox"]), after="</t>")
    state = compiler.state(grammar, STOPS)
    assert list(state.advance((), 99)) == []
    assert END not in allowed(state) and len(allowed(state)) > 400
    follow(state, "some </ text </t")
    closing = [t for t in range(VOCAB) if ">" in text_of([t]) and t > END]
    for token_id in closing:  # one that extends past it would have to be cut
        goes_on = text_of([token_id]).startswith(">") and text_of([token_id]) != ">"
        assert state.constraint().allows(token_id) is not goes_on
    forced = state.advance(ids(">"), 99)
    assert not forced
    firsts = {text_of([t])[0] for t in allowed(state)}
    assert firsts == {"d", "f"}


def test_unknown_end_of_free_text_is_found_where_it_overlaps_itself(compiler: Grammars) -> None:
    grammar = dataclasses.replace(grammars.choice(["x"]), after="aab")
    state = compiler.state(grammar, STOPS)
    for char in "aaa":
        state.advance(ids(char), 0)
    assert list(state.advance(ids("b"), 99))[:1] == ids("x")


def test_special_tokens_are_named_in_brackets_and_never_spelled(compiler: Grammars) -> None:
    spelled = compiler.state(grammars.lark('start: "<|start|>"'), STOPS)
    assert 0 not in spelled.advance((), 99)
    named = compiler.state(grammars.lark('start: <|start|> "x"'), STOPS)
    assert list(named.advance((), 99))[0] == 0


def test_anchors_mean_nothing_where_the_whole_output_has_to_match(compiler: Grammars) -> None:
    for pattern in ("^(a|b)c$", "(a|b)c"):
        state = compiler.state(grammars.regex(pattern), STOPS)
        follow(state, "bc")
        assert list(state.advance((), 99)) == [END]


def matches(compiler: Grammars, grammar: Grammar, text: str) -> bool:
    """Whether the text is a whole output."""
    try:
        state = compiler.state(grammar, STOPS)
        follow(state, text)
    except AssertionError:
        return False
    return END in allowed(state)


bounds = st.one_of(
    st.integers(-20, 20),
    st.integers(-(10**14), 10**14),
    st.decimals(-3, 3, places=2).map(float),
    st.sampled_from([0.0001, -0.00025, 99.99999999999999, -1e-9]),
)


@settings(max_examples=examples(60))
@given(bounds, bounds, st.booleans(), st.booleans())
@example(-1, 2, True, False)  # next to an integer
@example(1, 1.5, True, False)  # no integer between them
@example(0, 0.5, True, True)
@example(-200, 99.99999999999999, False, False)
@example(0.01, 0.19, False, False)
def test_numbers_are_within_their_bounds_as_a_program_reads_them(
    folder: Path, one: float, other: float, above: bool, below: bool
) -> None:
    low, high = sorted((one, other))
    assume(high - low > 1e-3)
    schema = {
        "type": "number",
        "exclusiveMinimum" if above else "minimum": low,
        "exclusiveMaximum" if below else "maximum": high,
    }
    grammar, compiler = grammars.json_schema(schema), made(folder)
    for bound in (low, high):
        for number in (bound, math.nextafter(bound, math.inf), math.nextafter(bound, -math.inf)):
            digits = format(Decimal(repr(float(number))), "f")
            for text in (digits, digits.removesuffix(".0"), f"{digits}0000001"):
                if matches(compiler, grammar, text):
                    jsonschema.validate(json.loads(text), schema)
    # The compiler leaves out some forms: between 0.01 and 0.19 it takes 0.10, but not 0.1.
    middle = (Decimal(repr(float(low))) + Decimal(repr(float(high)))) / 2
    forms = (format(middle.normalize(), "f"), f"{middle:.4f}", f"{middle:.8f}")
    assert any(matches(compiler, grammar, form) for form in forms)


def test_classes_of_schemas_have_brackets_in_them(compiler: Grammars) -> None:
    """As in ECMAScript, and not classes in classes, unless all of these are closed."""
    for pattern, good, bad in (
        ("^[^[]+$", "a]b", "a[b"),
        ("[a[]", "[", "b"),
        ("[[a][b]", "[b", "ab]"),
        (r"[\[a]b[c[]", "[b[", "abb"),
        ("[[:digit:]]", "7", ":"),
    ):
        grammar = grammars.json_schema({"type": "string", "pattern": f"^{pattern}$"})
        shown = [matches(compiler, grammar, json.dumps(text)) for text in (good, bad)]
        assert shown == [True, False], pattern
    record = {"additionalProperties": False, "patternProperties": {"^[[b]$": {"type": "null"}}}
    grammar = grammars.json_schema({"type": "object", **record})
    assert matches(compiler, grammar, '{"[": null}')
    assert not matches(compiler, grammar, '{"a": null}')


def test_a_token_that_is_not_allowed_is_an_error(compiler: Grammars) -> None:
    state = compiler.state(grammars.choice(["dog"]), STOPS)
    with pytest.raises(ValueError, match="does not allow token"):
        state.advance(ids("x"), 0)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar("start: other", param="guided_grammar"), "unknown name"),
        (Grammar("start: /(?=a)b/"), "look-around"),
        (grammars.json_schema({"pattern": "^a{2,1}$"}), r"must be <= the end in '\^a\{2,1\}\$'"),
        (Grammar("start: <|none|>"), "unknown special token"),
    ],
)
def test_what_does_not_compile_is_refused_with_its_field(
    compiler: Grammars, grammar: Grammar, says: str
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=says) as caught:
            compiler.state(grammar, STOPS)
        assert caught.value.param == grammar.param
    assert compiler.counters.compiled == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: made(None), "this engine has no tokenizer"),
        (lambda folder: made(folder.parent), r"no tokenizer\.json"),
        (lambda folder: made(folder, eos_token_ids=()), "no end-of-sequence token"),
    ],
)
def test_models_that_cannot_have_grammars_say_why(
    folder: Path, make: Callable[[Path], Grammars], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        make(folder).state(grammars.json_object(), STOPS)


def test_tokens_beyond_the_vocabulary_of_the_model_are_left_out(tmp_path: Path) -> None:
    """Such as a padding token that was added to the tokenizer alone."""
    backend = byte_level_backend()
    size, eos = backend.get_vocab_size(), backend.token_to_id("<|end|>")
    backend.add_special_tokens(["<|pad|>"])
    save_tokenizer(tmp_path, backend)
    tokenizer = engine_grammars.load_tokenizer(tmp_path, size, [eos])
    assert tokenizer.vocab_size == size
    assert tokenizer.tokenize_str("a") == backend.encode("a", add_special_tokens=False).ids


def test_it_compiles_on_a_thread_and_once_for_equal_texts(folder: Path) -> None:
    compiler, done = made(folder), threading.Semaphore(0)
    one, two = grammars.json_object(), grammars.json_object(param="other")
    assert not compiler.prepare(one, done.release)
    first = compiler.prepare(two, done.release)
    assert done.acquire(timeout=60) and (first or done.acquire(timeout=60))
    assert compiler.prepare(one, done.release) and compiler.prepare(two, done.release)
    assert compiler.counters.compiled == 1


@dataclasses.dataclass
class Watched:
    """What llguidance was asked for, and on which thread."""

    loads: list[int] = dataclasses.field(default_factory=list)
    masks_of: list[object] = dataclasses.field(default_factory=list)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen = Watched()
    load, compile_one = engine_grammars.load_tokenizer, engine_grammars.compile_grammar

    def loading(*arguments: Any) -> Any:
        seen.loads.append(threading.get_ident())
        return load(*arguments)

    class Matcher:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher

        def compute_bitmask(self) -> object:
            seen.masks_of.append(threading.get_ident())
            return self._matcher.compute_bitmask()

        def deep_copy(self) -> Any:
            return self._matcher.deep_copy()

    def compiling(*arguments: Any) -> Any:
        return Matcher(compile_one(*arguments))

    monkeypatch.setattr(engine_grammars, "load_tokenizer", loading)
    monkeypatch.setattr(engine_grammars, "compile_grammar", compiling)
    return seen


def test_what_is_loaded_ahead_is_not_loaded_while_others_wait(
    folder: Path, watched: Watched
) -> None:
    compiler = made(folder)
    compiler.load_ahead()
    compiler.state(grammars.json_object(), STOPS)
    assert watched.loads == [threading.get_ident()]


def test_the_first_mask_is_computed_where_the_grammar_is_compiled(
    folder: Path, watched: Watched
) -> None:
    """Copies then have it: that of a large object would hold up a step."""
    compiler = made(folder)
    state = compiler.state(grammars.json_object(), STOPS)
    assert len(watched.masks_of) == 1 and threading.get_ident() not in watched.masks_of
    assert allowed(state)


def test_gbnf_is_converted(compiler: Grammars) -> None:
    state = compiler.state(grammars.lark('root ::= "stop " b\nb ::= "here" | "there"'), STOPS)
    forced = text_of(list(state.advance((), 99)))
    assert forced and "stop ".startswith(forced.rstrip())
    follow(state, "stop there"[len(forced) :])
    assert list(state.advance((), 99)) == [END]
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        compiler.state(grammars.lark('root ::= ("a"'), STOPS)


def test_when_too_many_wait_to_be_compiled_others_may_try_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bros.engine.grammars._MAX_COMPILING", 1)
    compiler, busy, going = made(folder), threading.Event(), threading.Event()

    def hold() -> None:
        going.set()
        busy.wait(timeout=60)

    compiler._compiler.put(hold)
    assert going.wait(timeout=60)
    done = threading.Semaphore(0)
    first, second = grammars.choice(["a"]), grammars.choice(["b"])
    assert not compiler.prepare(first, done.release)
    for ask in (
        lambda: compiler.prepare(second, done.release),
        lambda: compiler.state(second, STOPS),
    ):
        with pytest.raises(OverloadedError, match="try again"):
            ask()
    assert not compiler.prepare(first, done.release)  # it waits already
    busy.set()
    assert done.acquire(timeout=60) and done.acquire(timeout=60)
    compiler.state(second, STOPS)


def test_tenants_do_not_share_what_is_compiled(folder: Path) -> None:
    compiler, grammar = made(folder), grammars.choice(["a"])
    for tenant in ("ann", "bob", "ann", "bob"):
        compiler.state(grammar, STOPS, tenant)
    assert compiler.counters.compiled == 2


def test_the_tenant_with_the_most_compiled_grammars_loses_its_oldest(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bros.engine.grammars._MAX_COMPILED", 3)
    compiler = made(folder)
    compiler.state(grammars.choice(["b"]), STOPS, "bob")
    for number in range(4):
        compiler.state(grammars.choice([str(number)]), STOPS, "ann")
    before = compiler.counters.compiled
    compiler.state(grammars.choice(["b"]), STOPS, "bob")
    assert compiler.counters.compiled == before
    compiler.state(grammars.choice(["0"]), STOPS, "ann")
    assert compiler.counters.compiled == before + 1


@pytest.mark.parametrize(
    ("bound", "most"),
    [("_MAX_COMPILED", 3), ("_MAX_COMPILED_BYTES", 3 * len(grammars.choice(["1"]).text))],
)
def test_the_compiled_grammars_are_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    monkeypatch.setattr(f"bros.engine.grammars.{bound}", most)
    compiler = made(folder)
    for number in (1, 2, 3, 1, 4, 1, 2):  # 4 takes the place of 2
        compiler.state(grammars.choice([str(number)]), STOPS)
    assert compiler.counters.compiled == 5


def test_masks_refuse_tokens_that_only_the_model_has(compiler: Grammars) -> None:
    state = compiler.state(grammars.regex("(.|\n)*"), STOPS)
    state.advance((), 0)
    size = BACKEND.get_vocab_size()
    assert size < VOCAB and max(allowed(state)) < size
    assert not state.constraint().allows(VOCAB - 1)


@pytest.mark.parametrize(
    "grammar",
    [
        grammars.regex("(a{1,1000}){1,1000}"),
        grammars.regex("((a{1,100}){1,100}){1,100}"),
        grammars.regex(".*a.{400}"),
        grammars.regex("(.*a.{12}){10}"),
        grammars.regex(r"(a+\s?){1,1000}z"),
        grammars.lark('start: x* "q"\nx: "a" | "a" x | x x'),
        grammars.lark('start: e\ne: e e | /[a-z]/ | e "," e | e "." e | e " " e'),
        grammars.lark('start: e\ne: e e | /[a-z]/ | e "," e'),
    ],
    ids=["nested", "thrice", "exponential", "several", "words", "ambiguous", "items", "pairs"],
)
def test_a_step_with_a_grammar_that_grows_without_end_stays_short(
    folder: Path, grammar: Grammar
) -> None:
    """Its automaton is built only as far as the output goes, up to a bound that ends the output;
    another one ends it if the parser takes longer with each token."""
    state = made(folder).state(grammar, STOPS)
    (token_id,) = ids("a")
    times_s = []
    for _ in range(500):
        began_s = time.thread_time()
        try:
            state.advance((), 0)
            assert token_id in allowed(state)
            state.advance([token_id], 0)
        except ValueError as error:
            reasons = ("too many expressions constructed", "Too many items", "too ambiguous")
            assert any(reason in str(error) for reason in reasons)
            break
        finally:
            times_s.append(time.thread_time() - began_s)
    assert max(times_s) < 0.05 * slowdown()
