"""What tests of the connection between client and engine send to and fro."""

from __future__ import annotations

from bros.core.interfaces import EngineInfo
from bros.core.request import EngineRequest, SamplingParams

INFO = EngineInfo(
    model="m", weights="w", kernels="k", kv_dtype="d", device="none", max_model_len=10,
    vocab_size=10, block_size=16, num_kv_blocks=10, policy="bros",
)  # fmt: skip
ASK = EngineRequest(request_id="r", prompt_token_ids=[1], sampling=SamplingParams(temperature=0))
