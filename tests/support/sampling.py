"""Every row sampler that can be tried here, and how tests sample with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bros.core.plan import SampleSpec
from bros.core.request import TokenLogprobs
from bros.executor.sampler import HostStepSampler, NumpySampler, RowSampler, SampleRequest
from support.kernel_cases import tested_levels


@dataclass(slots=True)
class IndexedSpec(SampleSpec):
    """How to sample one certain token. index: its index in the output."""

    index: int = 0


def ask(name: str, spec: IndexedSpec) -> SampleRequest:
    return name, spec, spec.index


ROW_SAMPLERS = ("numpy", *tested_levels())


def row_sampler(name: str) -> RowSampler:
    """name: one of ROW_SAMPLERS."""
    if name == "numpy":
        return NumpySampler()
    # Late, because the compiled kernels may not have been built.
    from bros.executor.native_sampler import NativeSampler
    from bros.kernels.cpu_ops import CpuKernels

    return NativeSampler(CpuKernels(name))


def sample_rows(
    sampler: RowSampler, logits: Tensor, specs: Sequence[IndexedSpec]
) -> list[tuple[int, TokenLogprobs | None]]:
    """One token per row. Raises ValueError if one could not be sampled."""
    requests = [ask(str(row), spec) for row, spec in enumerate(specs)]
    sampled = HostStepSampler(sampler)(logits, requests)
    for token in sampled:
        if token.error is not None:
            raise ValueError(token.error)
    assert [token.request_id for token in sampled] == [name for name, _, _ in requests]
    return [(token.token_id, token.logprobs) for token in sampled]


def sample_on_host(
    logits: Tensor, specs: Sequence[IndexedSpec]
) -> list[tuple[int, TokenLogprobs | None]]:
    """By the sampler that defines the results."""
    return sample_rows(NumpySampler(), logits, specs)
