"""Other implementations on the same device and shapes; for gpu_speed.py. All are optional."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpu_model import Bench, Model, Sizes
from gpu_timing import Ceilings, Line, Timer, timed_line
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, bool], Tensor]
"""Q [rows, heads, queries, dim], K and V [rows, kv_heads, keys, dim], causal or not."""

_SETS = 3
_PAGE = 256  # tokens, as transformers has it
_NEW_TOKENS = (8, 40)


def attention(bench: Bench) -> Iterator[Line]:
    """Attention of one layer over contiguous K and V."""
    model = bench.model
    rows, context = model.sizes.attention
    tokens = max(model.sizes.contexts)
    for name, found in (("SDPA", _sdpa), ("FlexAttention", _flex), ("xformers", _xformers)):
        attend = found(bench.timer)
        if isinstance(attend, str):
            yield Line("peers", f"{name}, attention", skipped=attend)
            continue
        floor = model.attention_bytes([context] * rows) / bench.ceilings.copy
        yield from _timed(
            bench,
            f"{name}, attention, {rows} x {context}",
            attend,
            _inputs(model, rows, 1, context),
            floor,
        )
        flops = 2 * tokens * tokens * model.layout.q_size
        yield from _timed(
            bench,
            f"{name}, attention, chunk of {tokens} after 0",
            attend,
            _inputs(model, 1, tokens, tokens),
            bench.ceilings.floor_s(0, flops),
        )


def _timed(
    bench: Bench, name: str, attend: Attend, inputs: list[tuple[Tensor, ...]], floor_s: float
) -> Iterator[Line]:
    causal = inputs[0][0].shape[2] > 1
    try:
        timing = bench.timer.on_device(lambda i: attend(*inputs[i % _SETS], causal))
    except Exception as error:  # libraries raise various errors
        yield Line("peers", name, skipped=_error_text(error))
        return
    yield timed_line("peers", name, timing, floor_s)


def _inputs(model: Model, rows: int, queries: int, keys: int) -> list[tuple[Tensor, ...]]:
    layout, random = model.layout, {"device": model.device, "dtype": model.dtype}
    return [
        (
            torch.randn(rows, layout.num_heads, queries, layout.head_dim, **random),
            torch.randn(rows, layout.num_kv_heads, keys, layout.head_dim, **random),
            torch.randn(rows, layout.num_kv_heads, keys, layout.head_dim, **random),
        )
        for _ in range(_SETS)
    ]


def _sdpa(timer: Timer) -> Attend | str:
    return lambda q, k, v, causal: F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=True
    )


def _flex(timer: Timer) -> Attend | str:
    if not timer.on_cuda:
        return "only with CUDA"
    # Lazy: slow to import, and it compiles.
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, object] = {}

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        size = q.shape[2]
        if causal and size not in masks:
            masks[size] = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, size, size, device=str(q.device)
            )
        return compiled(q, k, v, block_mask=masks[size] if causal else None, enable_gqa=True)

    return attend


def _xformers(timer: Timer) -> Attend | str:
    if importlib.util.find_spec("xformers") is None:
        return "not installed"
    if not timer.on_cuda:
        return "only with CUDA"
    # Optional.
    from xformers.ops import LowerTriangularMask, memory_efficient_attention_forward

    def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        rows, heads, queries, dim = q.shape
        groups = k.shape[1]
        shape = (rows, -1, groups, heads // groups, dim)
        wide = [each.transpose(1, 2).unsqueeze(3).expand(shape) for each in (k, v)]
        bias = LowerTriangularMask() if causal else None
        return memory_efficient_attention_forward(q.transpose(1, 2).reshape(shape), *wide, bias)

    return attend


def continuous_batching(sizes: Sizes, timer: Timer, ceilings: Ceilings) -> Iterator[Line]:
    """transformers' own engine: time per decode step, derived from two output lengths."""
    if importlib.util.find_spec("transformers") is None:
        yield Line("peers", "transformers, continuous batching", skipped="not installed")
        return
    model = _transformers_model(sizes, timer.device)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)  # it warns on each call
    for rows, context in ((1, sizes.contexts[0]), sizes.beside):
        name = f"transformers, continuous batching, step {rows} x {context}"
        try:
            with torch.inference_mode(False):  # another thread changes its buffers
                seconds = _step_seconds(model, sizes, rows, context)
        except Exception as error:  # as above
            yield Line("peers", name, skipped=_error_text(error))
            continue
        finally:
            # It sizes its memory for its first requests.
            if hasattr(model, "destroy_cached_continuous_batching_manager"):
                model.destroy_cached_continuous_batching_manager()
        yield Line("peers", name, measured=seconds * 1e3)


def _transformers_model(sizes: Sizes, device: torch.device) -> torch.nn.Module:
    # Optional, and slow to import.
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {name: value for name, value in sizes.model.items() if name != "architectures"}
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.inference_mode(False), torch.device(device):
        model = LlamaForCausalLM._from_config(LlamaConfig(**shape), dtype=dtype)
    return model.eval()


def _step_seconds(model: torch.nn.Module, sizes: Sizes, rows: int, context: int) -> float:
    # Optional, and slow to import.
    from transformers import GenerationConfig

    batching = _batching(sizes, rows * (context + _NEW_TOKENS[1]), rows)
    vocab = int(str(sizes.model["vocab_size"]))
    prompts = [[(31 * row + 7 * i) % vocab for i in range(context)] for row in range(rows)]
    taken = []
    for new_tokens in (_NEW_TOKENS[0], *_NEW_TOKENS):  # the first time warms up
        config = GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        began = time.perf_counter()
        outputs = model.generate_batch(inputs=prompts, generation_config=config, **batching)
        taken.append(time.perf_counter() - began)
        counts = {len(output.generated_tokens) for output in outputs.values()}
        assert counts == {new_tokens} and len(outputs) == rows, f"{counts} tokens"
    return (taken[2] - taken[1]) / (_NEW_TOKENS[1] - _NEW_TOKENS[0])


def _batching(sizes: Sizes, tokens: int, rows: int) -> dict[str, object]:
    """Options for the required memory, if the installed version has them. One engine serves all
    calls, because each new one would capture its graphs again."""
    try:
        from transformers import ContinuousBatchingConfig
    except ImportError:
        return {}
    known = inspect.signature(ContinuousBatchingConfig).parameters
    wanted = {
        "page_size" if "page_size" in known else "block_size": _PAGE,
        "num_blocks": 2 * (tokens // _PAGE + 2 * rows),
        "max_batch_tokens": max(sizes.prompts),
    }
    if not wanted.keys() <= known.keys():
        return {}
    return {
        "continuous_batching_config": ContinuousBatchingConfig(**wanted),
        "persistent_manager": True,
    }


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()}"[:300]
