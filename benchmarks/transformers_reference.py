"""The same weights in transformers, as a reference for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bros.executor.model_store import ModelFiles
from bros.executor.weights import WeightSource


def load_in_transformers(files: ModelFiles) -> Any:
    """A transformers causal language model in fp32, in eval mode.

    Works also for converted GGUF folders, whose quantization groups transformers cannot read.
    Raises ModelError if a weight is missing.
    """
    config = AutoConfig.from_pretrained(files.folder)
    factory: Any = AutoModelForCausalLM  # its methods have no types
    model = factory.from_config(config, dtype=torch.float32)
    with torch.inference_mode(), WeightSource(files.folder) as source:
        for name, parameter in model.named_parameters():  # a tied head is listed once
            parameter.copy_(source.dense(name, tuple(parameter.shape)))
    return model.eval()
