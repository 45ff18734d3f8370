"""Stored step time models: written, read back, refused and found."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bros
from bros.core.clock import ManualClock
from bros.core.errors import ConfigError
from bros.core.machine import available_cores
from bros.profiling.fitting import FitError
from bros.profiling.profiles import (
    MEASURED,
    QUICK,
    SCHEMA,
    Profile,
    ProfileKey,
    checkout_profiles,
    device_slug,
    find_profile,
    iso_date,
    load_profile,
    profile_folders,
    versions,
)
from bros.scheduler.cost_model import CostModel

KEY = ProfileKey(
    device="acme-9000-2-threads",
    model="org/model-1B",
    weights="fp32",
    kernels="cpu-avx512",
    kv_dtype="fp32",
    threads=2,
)
MODEL = CostModel(
    constant_s=0.03,
    token_s=0.0004,
    sample_s=0.0002,
    pair_s=4e-7,
    context_s=2e-6,
    hinges=((16, 0.0008), (64, -0.0002)),
    padding=((16, 1), (128, 8)),
)
PROFILE = Profile(
    key=KEY,
    kind=MEASURED,
    model=MODEL,
    versions={"bros": "0.1.0", "torch": "2.13.0"},
    date="2026-01-02T03:04:05+00:00",
    steps=180,
    max_step_tokens=1024,
    fitted=FitError(0.02, 0.08),
    held_out=FitError(0.03, 0.09),
)


def ignore(line: str) -> None:
    raise AssertionError(line)


coefficient = st.floats(0.0, 1.0, allow_subnormal=False)
text = st.text(max_size=8)
errors = st.none() | st.builds(FitError, coefficient, coefficient)
models = st.builds(
    CostModel,
    constant_s=coefficient,
    token_s=coefficient,
    sample_s=coefficient,
    pair_s=coefficient,
    context_s=coefficient,
    unique_context_s=coefficient,
    hinges=st.sampled_from([(), ((8, 0.001),), ((8, 0.5), (64, -0.25))]),
    padding=st.sampled_from([(), ((16, 1), (128, 8))]),
    swap_constant_s=coefficient,
    swap_token_s=coefficient,
    swap_out_constant_s=coefficient,
    swap_out_token_s=coefficient,
    overlap_swap=st.booleans(),
)
profiles = st.builds(
    Profile,
    key=st.builds(
        ProfileKey,
        device=text,
        model=text,
        weights=text,
        kernels=text,
        kv_dtype=text,
        threads=st.integers(0, 512),
        tp=st.integers(1, 64),
    ),
    kind=st.sampled_from(["measured", "quick", "analytic"]),
    model=models,
    versions=st.dictionaries(text, text, max_size=2),
    date=text,
    steps=st.integers(0, 1000),
    max_step_tokens=st.integers(0, 1000),
    fitted=errors,
    held_out=errors,
    kv_capacity_tokens=st.none() | st.integers(0, 10**7),
    assumptions=st.dictionaries(text, text, max_size=2),
)


@given(profiles)
def test_json_and_back_is_the_same(profile: Profile) -> None:
    assert Profile.from_json(profile.to_json()) == profile


@given(profiles)
def test_older_ones_have_one_time_for_copies_in_both_directions(profile: Profile) -> None:
    content = json.loads(profile.to_json())
    for name in ("swap_out_constant_s", "swap_out_token_s"):
        del content["coefficients"][name]
    model = dataclasses.replace(
        profile.model,
        swap_out_constant_s=profile.model.swap_constant_s,
        swap_out_token_s=profile.model.swap_token_s,
    )
    expected = dataclasses.replace(profile, model=model)
    assert Profile.from_json(json.dumps(content)) == expected


def test_one_rank_is_not_written_as_if_there_had_never_been_more() -> None:
    assert "tp" not in json.loads(PROFILE.to_json())
    shared = dataclasses.replace(PROFILE, key=dataclasses.replace(KEY, tp=3))
    assert json.loads(shared.to_json())["tp"] == 3


def test_json_is_short_enough_to_read() -> None:
    written = PROFILE.to_json()
    assert "[16, 0.0008],\n      [64, -0.0002]\n" in written
    assert "/" not in written.replace("org/model", "")


def changed(path: str, value: Any = None, *, remove: bool = False) -> str:
    """PROFILE's JSON with one value replaced, added or removed; path: names joined by dots."""
    content = json.loads(PROFILE.to_json())
    *outer, name = path.split(".")
    place = content
    for step in outer:
        place = place[step]
    if remove:
        del place[name]
    else:
        place[name] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is not a profile of step times"),
        ('{"name": "tokenizer"}', "is not a profile of step times"),
        (
            changed("schema", SCHEMA + 1),
            f"reads schema {SCHEMA}; measure again with `bros profile`",
        ),
        (changed("device", remove=True), "device is missing"),
        (changed("coefficients.pair_s", remove=True), "coefficients.pair_s is missing"),
        (changed("coefficients", 3), "coefficients is not an object"),
        (changed("extra", 3), "extra is not a field of a profile"),
        (changed("coefficients.extra", 3), "coefficients.extra is not a field"),
        (changed("kind", "guessed"), "kind is not one of measured, quick, analytic"),
        (changed("model", 7), "model is not a text"),
        (changed("threads", -1), "threads is not a whole number that is not negative"),
        (changed("threads", True), "threads is not a whole number"),
        (changed("coefficients.token_s", "fast"), "token_s is not a number that is not negative"),
        (changed("coefficients.token_s", -1e-9), "token_s is not a number that is not negative"),
        (changed("coefficients.token_s", float("nan")), "token_s is not a number"),
        (changed("coefficients.overlap_swap", 1), "overlap_swap is not true or false"),
        (changed("coefficients.hinges", [[16]]), "hinges is not pairs of numbers"),
        (changed("coefficients.hinges", [[16, 1.0], [8, 1.0]]), "hinges is not pairs of numbers"),
        (changed("coefficients.hinges", [[16, -0.5]]), "more tokens never take less time"),
        (changed("coefficients.padding", [[16, 0]]), "padding is not pairs of (limit, multiple)"),
        (changed("coefficients.padding", [[16, 1.5]]), "padding is not pairs of (limit, multiple)"),
        (changed("versions", {"torch": 2}), "versions is not an object of texts"),
        (changed("relative_errors.fitted.mape", "low"), "relative_errors.fitted.mape is not"),
        (changed("relative_errors.guessed", {}), "relative_errors.guessed is not a field"),
        (changed("kv_capacity_tokens", "many"), "kv_capacity_tokens is not a whole number"),
    ],
)
def test_wrong_files_are_refused_in_plain_words(
    written: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(written)
    with pytest.raises(ConfigError) as caught:
        load_profile(path)
    assert str(caught.value).startswith(f"the profile {path} cannot be used: ")
    assert complaint in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.json", tmp_path, binary):
        with pytest.raises(ConfigError, match=f"{path} cannot be read"):
            load_profile(path)


def test_a_profile_is_saved_in_its_place_and_found_there(tmp_path: Path) -> None:
    path = PROFILE.save(tmp_path)
    assert path == tmp_path / "acme-9000-2-threads" / "org-model-1B-fp32.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert load_profile(path) == PROFILE
    assert find_profile([tmp_path], KEY, ignore) == PROFILE


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"kv_dtype": "bf16"}, "org-model-1B-fp32-kv-bf16.json"),
        ({"weights": "bf16", "kv_dtype": "bf16"}, "org-model-1B-bf16.json"),
        ({"kernels": "reference"}, "org-model-1B-fp32-reference.json"),
        ({"kernels": "torch"}, "org-model-1B-fp32-torch.json"),
        ({"threads": 1}, "org-model-1B-fp32-on-1.json"),
        ({"threads": 1, "tp": 2}, "org-model-1B-fp32-on-1-tp2.json"),
        ({"model": "../../etc/x"}, "etc-x-fp32.json"),
    ],
)
def test_variants_lie_side_by_side(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    other = dataclasses.replace(PROFILE, key=dataclasses.replace(KEY, **change))
    PROFILE.save(tmp_path)
    assert other.save(tmp_path) == tmp_path / KEY.device / name
    assert find_profile([tmp_path], other.key, ignore) == other
    assert find_profile([tmp_path], KEY, ignore) == PROFILE


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(ProfileKey)])
def test_a_profile_of_something_else_is_not_found(field: str, tmp_path: Path) -> None:
    PROFILE.save(tmp_path)
    other: Any = 64 if field in ("threads", "tp") else "other"
    assert find_profile([tmp_path], dataclasses.replace(KEY, **{field: other}), print) is None


def test_the_first_folder_that_has_one_wins(tmp_path: Path) -> None:
    mine = dataclasses.replace(PROFILE, date="2001-01-01T00:00:00+00:00")
    mine.save(tmp_path / "mine")
    PROFILE.save(tmp_path / "shipped")
    folders = [tmp_path / "absent", tmp_path / "mine", tmp_path / "shipped"]
    assert find_profile(folders, KEY, ignore) == mine


def test_a_quick_one_does_not_hide_a_thorough_one_in_a_later_folder(tmp_path: Path) -> None:
    quick = dataclasses.replace(PROFILE, kind=QUICK, max_step_tokens=256)
    quick.save(tmp_path / "mine")
    folders = [tmp_path / "mine", tmp_path / "shipped"]
    assert find_profile(folders, KEY, ignore, step_tokens=256) == quick
    assert find_profile(folders, KEY, ignore, step_tokens=257) is None
    PROFILE.save(tmp_path / "shipped")
    assert find_profile(folders, KEY, ignore, step_tokens=256) == PROFILE


def test_a_quick_one_of_other_software_is_measured_anew(tmp_path: Path) -> None:
    now, before = versions("1234abcd"), versions("an older build")
    quick = dataclasses.replace(PROFILE, kind=QUICK, versions=before)
    quick.save(tmp_path)
    assert find_profile([tmp_path], KEY, ignore, versions=before) == quick
    assert find_profile([tmp_path], KEY, ignore, versions=now) is None
    measured = dataclasses.replace(quick, kind=MEASURED, versions={**now, "python": "3.10"})
    measured.save(tmp_path)
    assert find_profile([tmp_path], KEY, ignore, versions=now) == measured, "asked for by a person"


def test_a_measured_one_of_other_compiled_kernels_is_named_and_not_used(tmp_path: Path) -> None:
    """Its prices may be wrong by factors, and a quick one takes seconds."""
    PROFILE.save(tmp_path)
    told: list[str] = []
    assert find_profile([tmp_path], KEY, told.append, versions=versions("1234abcd")) is None
    assert len(told) == 1 and "other kernels; `bros profile` measures again" in told[0]
    key = dataclasses.replace(KEY, kernels="triton")
    triton = dataclasses.replace(PROFILE, key=key)
    triton.save(tmp_path)
    assert find_profile([tmp_path], key, ignore, versions=versions("1234abcd")) == triton


def test_measured_goes_before_quick_in_one_folder(tmp_path: Path) -> None:
    quick = dataclasses.replace(PROFILE, kind=QUICK)
    quick.save(tmp_path).rename(tmp_path / KEY.device / "a.json")
    PROFILE.save(tmp_path)
    assert find_profile([tmp_path], KEY, ignore) == PROFILE


def test_a_broken_file_is_reported_and_does_not_hide_others(tmp_path: Path) -> None:
    PROFILE.save(tmp_path)
    (tmp_path / KEY.device / "a.json").write_text("{")
    told: list[str] = []
    assert find_profile([tmp_path], KEY, told.append) == PROFILE
    assert len(told) == 1 and "a.json cannot be used: it is not valid JSON" in told[0]


def test_a_device_is_named_so_that_it_can_be_a_folder() -> None:
    assert device_slug("NVIDIA H200 (SXM)", 16) == "nvidia-h200-sxm"
    here = device_slug("cpu", 3)
    assert here.endswith("-3-threads") and len(here) > len("-3-threads")
    assert here == "".join(c for c in here.lower() if c.isascii() and (c.isalnum() or c == "-"))
    assert here == device_slug("cpu", 3)


def test_cores_are_those_this_process_may_use() -> None:
    assert available_cores() == len(os.sched_getaffinity(0))


def test_dates_are_utc_and_from_the_clock() -> None:
    assert iso_date(ManualClock(epoch_s=1_700_000_000.7)) == "2023-11-14T22:13:20+00:00"


def test_versions_name_what_times_depend_on() -> None:
    found = versions("1234abcd")
    assert found.keys() == {"bros", "compiled", "torch", "python"}
    assert found["bros"] == bros.__version__ and found["compiled"] == "1234abcd"


def test_the_users_folder_is_asked_before_what_comes_with_bros(tmp_path: Path) -> None:
    shipped = checkout_profiles()
    assert shipped is not None and shipped.name == "profiles"
    assert profile_folders(tmp_path) == (tmp_path / "profiles", shipped)
