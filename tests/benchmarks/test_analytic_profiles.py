"""Profiles worked out from data sheets."""

from __future__ import annotations

from pathlib import Path

import pytest
from analytic_profiles import (
    LLAMA_3_70B,
    OPT_13B,
    OPT_30B,
    a100s,
    analytic_profile,
    analytic_profiles,
    h200s,
    published_profiles,
)

from bros.profiling.profiles import Profile, load_profile
from bros.scheduler.cost_model import StepLoad

FOLDER = Path(__file__).parents[2] / "profiles"


@pytest.mark.parametrize(
    "profile",
    [*analytic_profiles(), *published_profiles()],
    ids=lambda profile: f"{profile.key.model} on {profile.key.device}",
)
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
    assert model.token_s == 0.0  # one GPU does not communicate
    assert slope * knot == pytest.approx(model.constant_s - 10e-3, rel=0.01)


def test_more_gpus_are_faster_and_hold_more() -> None:
    two, eight = analytic_profile(OPT_30B, a100s(2, 80)), analytic_profile(OPT_30B, a100s(8, 80))
    assert eight.model.prefill_seconds(1000) < two.model.prefill_seconds(1000) / 2
    assert two.kv_capacity_tokens is not None and eight.kv_capacity_tokens is not None
    assert eight.kv_capacity_tokens > 4 * two.kv_capacity_tokens


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="llama-3-70b does not fit 2x-a100-40g"):
        analytic_profile(LLAMA_3_70B, a100s(2, 40))


def test_published_step_times_are_those_of_the_formulas() -> None:
    """Preble's, in milliseconds; Mistral's are divided by 0.9."""
    mistral, llama = (profile.model for profile in published_profiles())
    for tokens in (384, 512, 1024):
        products_ms = (4.21 + 0.1084 * tokens + 0.159) / 0.9
        pairs_ms = 1e3 * mistral.pair_s * tokens * (tokens + 1) / 2
        assert 1e3 * mistral.prefill_seconds(tokens) == pytest.approx(
            products_ms + pairs_ms, rel=1e-3
        )
    # A chunk of 512 tokens after a long context.
    context, chunk = 16_384, 512
    more_ms = 1.86e-4 * context + 1.75e-3 * context + 2.19e-6 * chunk * context
    whole_ms = (4.21 + 0.1084 * chunk + 0.159 + more_ms) / 0.9
    assert 1e3 * mistral.prefill_seconds(chunk, context) == pytest.approx(whole_ms, rel=0.02)
    row = StepLoad()
    row.add(1, 9_999, True)
    assert 1e3 * mistral.seconds(row) == pytest.approx((22 + 0.159 + 1.86) / 0.9, rel=1e-3)
    context, chunk = 8192, 1024
    whole_ms = 28.9 + 0.182 * chunk + 4.0e-3 * context + 2.55e-6 * chunk * context
    assert 1e3 * llama.prefill_seconds(chunk, context) == pytest.approx(whole_ms, rel=0.02)
