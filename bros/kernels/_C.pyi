"""The compiled kernels (csrc/module.cpp). Pointers are data_ptr() integers, 0 for none."""

from array import array
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]

def levels() -> tuple[tuple[str, bool, bool], ...]: ...
def rms_norm(
    level: int,
    out: int,
    residual: int,
    x: int,
    weight: int,
    tokens: int,
    size: int,
    eps: float,
    threads: int,
    /,
) -> None: ...
def rope_and_cache(
    level: int,
    qkv: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: int,
    slots: int,
    cos_sin: int,
    max_positions: int,
    rotary_dim: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_blocks: int,
    block_size: int,
    q_norm: int,
    k_norm: int,
    eps: float,
    threads: int,
    /,
) -> None: ...
def order_segments(
    positions: int,
    num_blocks: int,
    block_size: int,
    start: int,
    rows: int,
    segments: int,
    out_start: int,
    out: int,
    /,
) -> int: ...
def attention(
    level: int,
    out: int,
    qkv: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_blocks: int,
    block_size: int,
    query_start: int,
    segment_start: int,
    segments: int,
    rows: int,
    num_segments: int,
    shared_row_start: int,
    shared_rows: int,
    shared_segment_start: int,
    shared_segments: int,
    num_parts: int,
    num_shared_rows: int,
    num_shared_segments: int,
    scale: float,
    threads: int,
    /,
) -> None: ...
def silu_and_mul(
    level: int, out: int, gate_up: int, tokens: int, size: int, threads: int, /
) -> None: ...
def linear(
    level: int,
    out: int,
    x: int,
    weights: int,
    bias: int,
    format: int,
    rows: int,
    inputs: int,
    outputs: int,
    threads: int,
    /,
) -> None: ...
def run_layers(
    level: int,
    weights: bytes,
    kv: array[int],
    first: int,
    end: int,
    residual: int,
    delta: int,
    new_delta: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    positions: int,
    slots: int,
    cos_sin: int,
    max_positions: int,
    rotary_dim: int,
    k_cache: int,
    v_cache: int,
    kv_type: int,
    num_blocks: int,
    block_size: int,
    query_start: int,
    segment_start: int,
    segments: int,
    rows: int,
    num_segments: int,
    shared_row_start: int,
    shared_rows: int,
    shared_segment_start: int,
    shared_segments: int,
    num_parts: int,
    num_shared_rows: int,
    num_shared_segments: int,
    scale: float,
    keeps_all: bool,
    kept_rows: int,
    num_kept_rows: int,
    residual_of_rows: int,
    eps: float,
    threads: int,
    before_layer: Callable[[int], bool] | None,
    /,
) -> int: ...
def sample(
    level: int,
    sampled: NDArray[np.void],
    tops: NDArray[np.void],
    top: int,
    logits: int,
    num_rows: int,
    vocab: int,
    draws: bytes,
    edit_tokens: Numbers,
    edit_values: NDArray[np.float32],
    history: Numbers,
    masks: bytes,
    threads: int,
    /,
) -> None: ...
def panel_outputs(level: int, /) -> int: ...
def tile_product(
    level: int, c: int, a: int, b: int, rows: int, columns: int, depth: int, product: int, /
) -> None: ...
def segment_changes(
    before_starts: Numbers,
    before: Numbers,
    previous_rows: Numbers,
    starts: Numbers,
    numbers: Numbers,
    /,
) -> bytes: ...
def changed_segments(
    before_starts: Numbers,
    before: Numbers,
    previous_rows: Numbers,
    starts: Numbers,
    changes: Numbers,
    /,
) -> bytearray: ...
