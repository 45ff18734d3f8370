"""How much GPU memory is left for the KV cache once the model and its largest step have theirs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch

from bros.core.errors import ConfigError
from bros.core.plan import Chunk, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.runner import ModelRunner

_GIB = 2**30
_MOST_CONTEXT_BLOCKS = 2**16
"""In the step that is measured, over all rows; reading them takes no memory, listing them does."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes. total: of the device; elsewhere: other processes, and what CUDA keeps for itself;
    peak: the most that this process needs beside the KV cache, weights included.

    Recorded steps take some hundred MiB more, out of what `utilization` leaves.
    """

    total: int
    elsewhere: int
    peak: int

    def room(self, utilization: float) -> int:
        """What is left of `utilization` of the device; less than nothing if it is overdrawn."""
        return int(self.total * utilization) - self.elsewhere - self.peak

    def explain(self, utilization: float) -> ConfigError:
        """For a room in which not even one block fits."""
        return ConfigError(
            f"--gpu-memory-utilization: {utilization:g} of {self.total / _GIB:.1f} GiB leave no "
            f"room for a KV cache; the model and its largest step take {self.peak / _GIB:.1f} GiB "
            f"and others {self.elsewhere / _GIB:.1f} GiB. Raise it, or lower --max-batch-tokens or "
            "--max-num-seqs"
        )


def measure_use(runner: ModelRunner, plan: StepPlan, device: torch.device, later: int) -> MemoryUse:
    """Run the plan once and see what it took. CUDA only.

    later: bytes of buffers that are not there yet.
    """
    torch.cuda.empty_cache()  # of what loading left
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return MemoryUse(total, elsewhere, peak + later)


def largest_step(rows: int, tokens: int, max_length: int, block_size: int) -> StepPlan:
    """A step of `tokens` tokens in `rows` rows, all sampled, with as much context as there may be.

    All of it lies in block 0. Its numbers mean nothing; what it takes is what counts.
    """
    rows = min(rows, tokens)
    lengths = [min(tokens // rows + (row < tokens % rows), max_length) for row in range(rows)]
    spec = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9, top_k=50), seed=0, output_index=0)
    chunks = []
    for row, length in enumerate(lengths):
        context = min((max_length - length) // block_size, _MOST_CONTEXT_BLOCKS // rows)
        chunks.append(chunk_in_block_0(str(row), length, context, block_size, spec))
    return StepPlan(0, tuple(chunks))


def chunk_in_block_0(
    request_id: str, size: int, context: int, block_size: int, sample: SampleSpec
) -> Chunk:
    """`size` tokens after `context` blocks: what running it takes counts, not what comes of it."""
    return Chunk(
        request_id=request_id,
        start=context * block_size,
        token_ids=[0] * size,
        segments=array("i", (0, 0, block_size) * context),
        slots=array("i", [0] * size),
        sample=sample,
    )
