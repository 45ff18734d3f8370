"""Chooses the next token of every row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bros.core.plan import SampleSpec
from bros.core.request import TokenLogprobs


class Sampler:
    """Stateless: a row's token depends on its logits and its spec alone."""

    def sample(
        self, logits: Tensor, specs: Sequence[SampleSpec]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """logits: fp32 [rows, vocab], unchanged; one spec per row."""
        tokens: list[int] = torch.argmax(logits, dim=1).tolist()
        return [(token, None) for token in tokens]
