"""Profiles worked out from data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest

from bros.scheduler.analytic import (
    LLAMA_3_70B,
    OPT_13B,
    OPT_30B,
    a100s,
    analytic_profile,
    analytic_profiles,
    h200s,
)
from bros.scheduler.cost_model import StepLoad
from bros.scheduler.profiles import Profile, load_profile

FOLDER = Path(__file__).parents[2] / "profiles"


@pytest.mark.parametrize("profile", analytic_profiles(), ids=lambda profile: profile.key.model)
def test_what_is_committed_is_what_is_generated(profile: Profile) -> None:
    assert load_profile(FOLDER / profile.file_name) == profile


def test_parameters_come_out_as_the_models_are_called() -> None:
    assert OPT_13B.parameters == pytest.approx(13e9, rel=0.02)
    assert OPT_30B.parameters == pytest.approx(30e9, rel=0.02)
    assert LLAMA_3_70B.parameters == pytest.approx(70.6e9, rel=0.01)


def test_decoding_reads_the_weights_and_long_prompts_are_bound_by_flops() -> None:
    gpus = a100s(2, 40)
    model = analytic_profile(OPT_13B, gpus).model
    reading_s = 2 * OPT_13B.parameters / (2 * gpus.bandwidth)
    one_row = StepLoad()
    one_row.add(1, 100, True)
    assert reading_s < model.seconds(one_row) < reading_s + 20e-3
    multiplying_s = 2 * OPT_13B.layer_parameters * 2000 / (2 * gpus.flops)
    assert multiplying_s < model.prefill_seconds(2000) < 2.5 * multiplying_s


def test_the_maximum_is_met_at_its_two_ends() -> None:
    """Just below the knot tokens are almost free, above it they cost their FLOPs."""
    model = analytic_profile(OPT_13B, h200s(1)).model
    ((knot, slope),) = model.hinges
    assert model.token_s == 0.0  # one GPU talks to nobody
    assert slope * knot == pytest.approx(model.constant_s - 10e-3, rel=0.01)


def test_more_gpus_are_faster_and_hold_more() -> None:
    two, eight = analytic_profile(OPT_30B, a100s(2, 80)), analytic_profile(OPT_30B, a100s(8, 80))
    assert eight.model.prefill_seconds(1000) < two.model.prefill_seconds(1000) / 2
    assert two.kv_capacity_tokens is not None and eight.kv_capacity_tokens is not None
    assert eight.kv_capacity_tokens > 4 * two.kv_capacity_tokens


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="llama-3-70b does not fit 2x-a100-40g"):
        analytic_profile(LLAMA_3_70B, a100s(2, 40))
