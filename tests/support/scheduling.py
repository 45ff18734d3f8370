"""Schedulers and requests for tests that need no model."""

from __future__ import annotations

from collections.abc import Sequence

from bros.core.config import EngineConfig
from bros.core.interfaces import EmbeddingInfo, EngineInfo
from bros.core.request import (
    NO_HINTS,
    EngineRequest,
    Hints,
    Pooling,
    SamplingParams,
    ServiceClass,
    Slo,
)
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.scheduler import Scheduler
from support.toy_model import VOCAB

EOS = 0
MODEL = CostModel(
    constant_s=0.020, token_s=0.001, sample_s=0.0002, pair_s=4e-7, context_s=2e-6
)  # fmt: skip
"""Roughly the embedded model on two cores: a token a millisecond, twenty for the step."""

READING = CostModel(
    constant_s=0.020, token_s=0.0, sample_s=0.0, pair_s=0.0, context_s=0.0, hinges=((100, 0.001),)
)  # fmt: skip
"""As on a GPU: weights can be multiplied with 100 tokens in the time that reading them takes."""


def engine_info(
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_model_len: int | None = None,
    policy: str = "bros",
    host_blocks: int = 0,
    whole_prompts: bool = False,
) -> EngineInfo:
    return EngineInfo(
        model="toy",
        weights="fp32",
        kernels="reference",
        kv_dtype="fp32",
        device="cpu",
        max_model_len=max_model_len or blocks * block_size,
        vocab_size=VOCAB,
        block_size=block_size,
        num_kv_blocks=blocks,
        num_host_kv_blocks=host_blocks,
        policy=policy,
        eos_token_ids=(EOS,),
        embedding=EmbeddingInfo(pooling=Pooling.LAST, normalized=True, size=1),
        whole_prompts=whole_prompts,
    )


def make_scheduler(
    policy: str = "bros",
    *,
    blocks: int = 64,
    block_size: int = 4,
    max_model_len: int | None = None,
    host_blocks: int = 0,
    model: CostModel = MODEL,
    depth: int = 1,
    whole_prompts: bool = False,
    **options: object,
) -> Scheduler:
    """options: fields of EngineConfig. Prompts share nothing unless told to: most begin alike."""
    bounds = {
        "max_num_seqs": 8,
        "max_batch_tokens": 32,
        "max_queue": 100,
        "prefix_cache": "off",
        **options,
    }
    config = EngineConfig(policy=policy, **bounds)  # type: ignore[arg-type]
    info = engine_info(
        blocks=blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        policy=policy,
        host_blocks=host_blocks,
        whole_prompts=whole_prompts,
    )
    return build_scheduler(config, info, model, depth=depth)


def request(
    name: str,
    prompt: int | Sequence[int],
    service_class: ServiceClass = ServiceClass.RT,
    *,
    arrival_s: float = 0.0,
    slo: Slo | None = None,
    hints: Hints = NO_HINTS,
    **params: object,
) -> EngineRequest:
    """prompt: token ids, or how many. params: fields of SamplingParams."""
    ids = list(range(1, prompt + 1)) if isinstance(prompt, int) else list(prompt)
    sampling = SamplingParams(**{"max_tokens": 4, **params})  # type: ignore[arg-type]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=ids,
        sampling=sampling,
        service_class=service_class,
        arrival_s=arrival_s,
        slo=slo or Slo(),
        hints=hints,
    )
