"""What is run before serving covers what serving may launch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from bros.core.plan import SampleSpec
from bros.executor.inputs import build_inputs
from bros.executor.loader import warm_up, warm_up_plans
from bros.executor.target import CPU
from bros.kernels.interface import HeadLayout
from support import device_runners
from support.device_runners import BLOCK, assemble, draw
from support.kernel_cases import needs_triton


@given(length=st.integers(1, 9000))
def test_no_step_is_longer_than_a_request_may_be(length: int) -> None:
    for plan in warm_up_plans(length, BLOCK):
        assert build_inputs(plan).positions.max() < length


@needs_triton
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 16, 40, 200])
def test_every_size_of_a_tile_comes_up(group: int) -> None:
    """Sizes as the device code is compiled for them."""
    # Late, because Triton need not be installed.
    from bros.kernels.triton.ops import TritonKernels

    kernels, layout = TritonKernels(CPU), HeadLayout(group, 1, 8)
    found = set()
    for plan in warm_up_plans(9000, BLOCK):
        prepared = kernels.prepare(build_inputs(plan).attention, layout, CPU)
        found.add(prepared.tile_rows)  # type: ignore[attr-defined]
        assert prepared.work.capacity.merge_tokens  # type: ignore[attr-defined]
    assert found == {size for size in (16, 32, 64, 128) if size >= 2 * group or size == 128}


def test_it_runs_and_both_draws_and_takes_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    def counted(logits: Tensor, specs: Sequence[SampleSpec], indexes: Sequence[int]) -> Tensor:
        drawn.append(len(specs))
        return draw(logits, specs, indexes)

    monkeypatch.setattr(device_runners, "draw", counted)
    warm_up(assemble(kv_blocks=1, groups=True).runner, device_runners.MAX_LEN, BLOCK)
    assert drawn == [2, 1, 1, 1, 1, 1, 1]
