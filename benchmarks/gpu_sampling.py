"""Sampling on the device, by Triton; for gpu_speed.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gpu_bench import VARIANTS, Bench
from gpu_timing import Line, timed_line

from bros.core.errors import ConfigError
from bros.kernels.dispatch import select_kernels

SPREAD = 3.0  # of logits: 5,000 of 128,256 tokens hold 0.9 of the mass, a hard case for top_p
TOP_K, TOP_P = 50, 0.9
WAYS = {
    "greedy": (0.0, 0, 1.0),
    "top_k": (1.0, TOP_K, 1.0),
    "top_p": (1.0, 0, TOP_P),
    "top_k and top_p": (1.0, TOP_K, TOP_P),
}
"""Temperature, top_k and top_p; 0 and 1.0 are off."""


def sampling(bench: Bench) -> Iterator[Line]:
    """Sample one token per row. The floor is reading the logits once."""
    device, vocab = bench.model.device, bench.model.spec.vocab_size
    try:
        select_kernels("triton", device)
    except ConfigError as error:
        yield Line("sampling", "by Triton", skipped=str(error))
        return
    # Lazy: it needs Triton.
    from bros.kernels.triton.sampling import SamplingTensors, sample_tokens

    for rows in bench.model.sizes.sampled:
        logits = [torch.randn(rows, vocab, device=device) * SPREAD for _ in range(VARIANTS)]
        starts = torch.randint(2**62, (rows,), device=device)
        for name, (temperature, top_k, top_p) in WAYS.items():
            params = SamplingTensors(
                torch.full((rows,), temperature, device=device),
                torch.zeros(rows, device=device),
                torch.full((rows,), top_k, dtype=torch.int32, device=device),
                torch.full((rows,), top_p, dtype=torch.float64, device=device),
                starts,
            )
            [timing] = bench.kernels(
                [lambda i, given=logits, params=params: sample_tokens(given[i % VARIANTS], params)]
            )
            yield timed_line(
                "sampling",
                f"{name}, {rows} rows",
                timing,
                bench.ceilings.floor_s(logits[0].nbytes),
            )
