from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bros.core.errors import BrosError, InvalidRequestError
from bros.core.request import (
    MAX_SEED,
    EngineRequest,
    FinishReason,
    PackedLogprobs,
    SamplingParams,
    ServiceClass,
    TokenLogprobs,
)

INT32 = 2**31 - 1
# field -> (low, low is allowed, high), as the docstring and the OpenAI API have it.
RANGES: dict[str, tuple[float, bool, float]] = {
    "temperature": (0, True, 100),
    "top_p": (0, False, 1),
    "top_k": (0, True, INT32),
    "min_p": (0, True, 1),
    "n": (1, True, 128),
    "presence_penalty": (-2, True, 2),
    "frequency_penalty": (-2, True, 2),
    "repetition_penalty": (0.01, True, 100),
    "min_tokens": (0, True, INT32),
    "max_tokens": (0, True, INT32),
    "logprobs": (0, True, 20),
    "prompt_logprobs": (0, True, 20),
    "seed": (-MAX_SEED - 1, True, MAX_SEED),
}
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
FLOATS += ("repetition_penalty",)


def make(name: str, value: Any) -> SamplingParams:
    return SamplingParams(**{name: value})


@given(st.sampled_from(sorted(RANGES)), st.data())
def test_values_are_accepted_exactly_inside_their_range(name: str, data: st.DataObject) -> None:
    low, low_allowed, high = RANGES[name]
    if name in FLOATS:
        value = data.draw(st.one_of(st.floats(low - 1, high + 1), st.just(low), st.just(high)))
    else:
        whole = st.integers(int(low) - 5, int(high) + 5)
        value = data.draw(st.one_of(whole, st.just(low), st.just(high)))
    if (low <= value if low_allowed else low < value) and value <= high:
        assert getattr(make(name, value), name) == value
    else:
        with pytest.raises(InvalidRequestError, match=f"^{name} must be in ") as caught:
            make(name, value)
        assert caught.value.param == name
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(name, value)
    assert caught.value.param == name


@pytest.mark.parametrize("name", sorted(RANGES))
@pytest.mark.parametrize("value", [True, "1", [1], 1.5])
def test_values_of_another_type_are_refused(name: str, value: Any) -> None:
    """Python checks no types, and the engine would fail with all its requests."""
    if name in FLOATS and value == 1.5:
        return
    with pytest.raises(InvalidRequestError, match=f"^{name} must be a .*number, got ") as caught:
        make(name, value)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("grammar", value) for value in ("root ::= x", {"type": "object"})),
        *(("stop", value) for value in (5, {"a": 1}, [b"end"], [None])),
        *(("stop_token_ids", value) for value in (5, "12", [1.0], [True])),
        *(("logit_bias", value) for value in ([1], "a", {"1": 2.0}, {1: "2"}, {1.5: 1.0})),
    ],
)
def test_what_is_no_number_has_its_type_checked(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(name, value)
    assert caught.value.param == name and "must " in str(caught.value)


@pytest.mark.parametrize("name", sorted(RANGES))
def test_numbers_of_numpy_become_those_of_python(name: str) -> None:
    values: list[Any] = [np.int64(1), np.uint8(1)]
    if name in FLOATS:
        values += [np.float32(0.5), np.float64(0.5)]
    for value in values:
        found = getattr(make(name, value), name)
        assert found == value and type(found) in (int, float)
    with pytest.raises(InvalidRequestError, match=f"^{name} must be a .*number, got "):
        make(name, np.bool_(True))
    if name not in FLOATS:
        with pytest.raises(InvalidRequestError, match=f"^{name} must be a whole number, got "):
            make(name, np.float32(1))


def test_numbers_of_numpy_in_lists_and_maps_become_those_of_python() -> None:
    params = SamplingParams(
        stop_token_ids=np.array([1, 2]),  # type: ignore[arg-type]
        logit_bias={np.int64(3): np.float32(0.5)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(stop_token_ids=(1, 2), logit_bias={3: 0.5})
    found = [*params.stop_token_ids, *params.logit_bias, *params.logit_bias.values()]
    assert [type(each) for each in found] == [int, int, int, float]


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "logit_bias"])
def test_none_is_nothing(name: str) -> None:
    assert make(name, None) == SamplingParams()
    assert pickle.loads(pickle.dumps(make(name, None))) == SamplingParams()


def test_min_tokens_must_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4
    with pytest.raises(InvalidRequestError, match="must not exceed max_tokens") as caught:
        SamplingParams(min_tokens=5, max_tokens=4)
    assert caught.value.param == "min_tokens"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["a"] * 17),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", range(257)),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("stop_token_ids", [2**31]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", {1: math.nan}),
    ],
)
def test_wrong_stops_and_biases_are_refused(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        make(field, value)
    assert caught.value.param == field


def test_stop_takes_one_string_or_several() -> None:
    assert make("stop", "END").stop == ("END",)
    assert make("stop", ["a", "b"]).stop == ("a", "b")
    assert make("stop_token_ids", [1, 2]).stop_token_ids == (1, 2)


@given(st.floats(-2, 2), st.floats(-2, 2), st.floats(0.01, 100))
def test_history_is_needed_exactly_for_penalties(
    presence: float, frequency: float, repetition: float
) -> None:
    params = SamplingParams(
        presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition
    )
    assert params.needs_history == ((presence, frequency, repetition) != (0.0, 0.0, 1.0))
    assert not SamplingParams().needs_history


@given(st.floats(0, 100))
def test_greedy_is_temperature_zero(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).greedy == (temperature == 0)


def test_with_changes_copies_and_checks_again() -> None:
    params = SamplingParams(n=3, stop=("a",))
    changed = params.with_changes(n=1, seed=7)
    assert (changed.n, changed.seed, changed.stop) == (1, 7, ("a",))
    assert (params.n, params.seed) == (3, None)
    with pytest.raises(InvalidRequestError, match="^n must be in"):
        params.with_changes(n=0)


def test_params_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().n = 2  # type: ignore[misc]


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_equal_params_are_equal(seed: int, other: int) -> None:
    assume(seed != other)
    assert SamplingParams(seed=seed) == SamplingParams(seed=seed)
    assert SamplingParams(seed=seed) != SamplingParams(seed=other)


def test_enums_are_their_wire_values() -> None:
    assert [str(c) for c in ServiceClass] == ["rt", "be"]
    assert [str(r) for r in FinishReason] == ["stop", "length", "abort", "error"]


def test_invalid_request_is_a_bros_error_and_a_value_error() -> None:
    assert issubclass(InvalidRequestError, BrosError)
    assert issubclass(InvalidRequestError, ValueError)


# Texts that could be taken for one another: digits and separators of the encoding.
names = st.text(alphabet="01:a.é", max_size=4) | st.text(max_size=20)
owners = st.tuples(names, names)


def salt_of(tenant: str, cache_salt: str, **fields: Any) -> str:
    return EngineRequest(
        request_id="r", prompt_token_ids=(1,), sampling=SamplingParams(), tenant=tenant,
        cache_salt=cache_salt, **fields,
    ).kv_salt  # fmt: skip


@given(owners, owners)
def test_salts_are_equal_only_for_the_same_tenant_and_cache_salt(
    one: tuple[str, str], other: tuple[str, str]
) -> None:
    assert (salt_of(*one) == salt_of(*other)) == (one == other)


@given(names, names)
def test_no_cache_salt_reaches_another_tenant(tenant: str, other: str) -> None:
    """Not even one that is made of what the other tenant's salts look like."""
    assume(tenant != other)
    for cache_salt in ("", "a", other, salt_of(other, ""), salt_of(other, "a")):
        assert salt_of(tenant, cache_salt) not in (salt_of(other, ""), salt_of(other, "a"))


def test_the_user_is_no_border() -> None:
    assert salt_of("t", "s", user="u") == salt_of("t", "s", user="v")


LOGPROBS = st.floats(max_value=0.0, allow_nan=False)
TOKENS = st.integers(0, INT32)
POSITIONS = st.lists(
    st.builds(TokenLogprobs, TOKENS, LOGPROBS, st.lists(st.tuples(TOKENS, LOGPROBS)).map(tuple))
)


@given(POSITIONS, st.slices(10))
def test_packed_log_probabilities_are_the_same_ones(
    entries: list[TokenLogprobs], part: slice
) -> None:
    packed = PackedLogprobs(entries[:2])
    packed.extend(entries[2:])
    assert list(packed) == [packed[i] for i in range(len(packed))] == entries
    assert packed == entries
    assert packed[part] == entries[part]
    assert packed[:-1] == entries[:-1]
    assert packed.num_numbers == sum(1 + len(entry.top) for entry in entries)


def test_packed_log_probabilities_take_little_memory() -> None:
    """As objects they take 2.5 KB for each token."""
    entry = TokenLogprobs(5, -0.25, tuple((i, -1.5) for i in range(20)))
    packed = PackedLogprobs([entry] * 1000)
    assert packed.num_bytes == 1000 * 256
