"""Runs batches on one engine, for compare_engines.py, in the environment that has the engine.

    PYTHON engine_worker.py ENGINE MODEL PRECISION TOKENS

ENGINE: bros, transformers, vllm, openvino or llama.cpp. MODEL: a folder in Hugging Face's format, a
GGUF file for openvino and llama.cpp. TOKENS: the longest prompt.

The first line of standard output is the version of the engine's package, once it is ready. Each
line of standard input is "ROWS TOKENS OUTPUTS": so many prompts of so many random tokens, each with
exactly so many output tokens, greedy, at once. The answer is one line: the seconds. Nothing is
taken from a prefix cache. Imports only what the engine's own environment has.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], object]
"""Generates so many tokens for each prompt."""

MOST_ROWS = 32
OUTPUTS = 128  # at least as many as any line asks for
FIRST_TOKEN, LAST_TOKEN = 1000, 40_000  # neither special nor outside of the vocabulary


def bros(model: str, precision: str, tokens: int) -> Generate:
    from bros import LLM, SamplingParams

    llm = LLM(
        model,
        device="cpu",
        weights=precision,
        max_batch_tokens=max(tokens, 4096),
        max_model_len=tokens + OUTPUTS,
        prefix_cache="off",
    )

    def generate(prompts: Prompts, outputs: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        llm.generate(prompts, sampling, progress=False)

    return generate


def transformers(model: str, precision: str, tokens: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)

    @torch.inference_mode()
    def generate(prompts: Prompts, outputs: int) -> None:
        out = decoder(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        for _ in range(outputs - 1):
            ids = out.logits[:, -1:].argmax(-1)
            out = decoder(ids, past_key_values=out.past_key_values, use_cache=True)

    return generate


def vllm(model: str, precision: str, tokens: int) -> Generate:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(
        model=model,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[precision],
        max_model_len=tokens + OUTPUTS,
        max_num_seqs=2 * MOST_ROWS,
        max_num_batched_tokens=max(tokens, 4096),
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, outputs: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    return generate


def openvino(model: str, precision: str, tokens: int) -> Generate:
    """precision: int4, the GGUF file's; it chooses the type of the activations."""
    import numpy as np
    import openvino as ov  # type: ignore[import-not-found, unused-ignore]
    import openvino_genai as genai  # type: ignore[import-not-found, unused-ignore]

    assert precision == "int4"
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_batched_tokens = max(tokens, 4096)
    scheduler.max_num_seqs = 2 * MOST_ROWS
    scheduler.enable_prefix_caching = False
    pipeline = genai.ContinuousBatchingPipeline(model, scheduler, "CPU")

    def generate(prompts: Prompts, outputs: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = outputs, True, False
        inputs = [ov.Tensor(np.array([ids], dtype=np.int64)) for ids in prompts]
        pipeline.generate(inputs, [config] * len(inputs))

    return generate


def llama_cpp(model: str, precision: str, tokens: int) -> Generate:
    """precision: the GGUF file's own."""
    import llama_cpp as lib  # type: ignore[import-not-found, unused-ignore]
    import numpy as np

    lib.llama_backend_init()
    options = lib.llama_model_default_params()
    # Its kernels for AMX end in a segmentation fault (llama-cpp-python 0.3.36). Those for repacked
    # weights are left out with them.
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "amx_tile" in cpu.read_text():
        options.use_extra_bufts = False
    weights = lib.llama_model_load_from_file(model.encode(), options)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(weights))
    contexts: dict[tuple[int, int], Any] = {}
    threads = len(os.sched_getaffinity(0))

    def context_of(rows: int, length: int) -> Any:
        if (rows, length) not in contexts:
            options = lib.llama_context_default_params()
            options.n_ctx, options.n_seq_max = rows * length, rows
            options.n_batch = max(rows * length, 512)
            options.n_threads = options.n_threads_batch = threads
            contexts[rows, length] = lib.llama_init_from_model(weights, options)
        return contexts[rows, length]

    def run(context: Any, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """rows: (token, position, sequence, whether logits are wanted)."""
        batch = lib.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for at, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[at], batch.pos[at] = token, position
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
            batch.logits[at] = wanted
        assert lib.llama_decode(context, batch) == 0
        lib.llama_batch_free(batch)

    def best(context: Any, at: int) -> int:
        logits = lib.llama_get_logits_ith(context, at)
        return int(np.ctypeslib.as_array(logits, shape=(vocab,)).argmax())

    def generate(prompts: Prompts, outputs: int) -> None:
        length = max(map(len, prompts))
        context = context_of(len(prompts), length + OUTPUTS)
        lib.llama_memory_clear(lib.llama_get_memory(context), True)
        rows = [
            (token, position, sequence, position == len(ids) - 1)
            for sequence, ids in enumerate(prompts)
            for position, token in enumerate(ids)
        ]
        run(context, rows)
        last = [at for at, (*_, wanted) in enumerate(rows) if wanted]
        found = [best(context, at) for at in last]
        for step in range(outputs - 1):
            run(context, [(token, length + step, row, True) for row, token in enumerate(found)])
            found = [best(context, at) for at in range(len(found))]

    return generate


ENGINES = {
    "bros": bros,
    "transformers": transformers,
    "vllm": vllm,
    "openvino": openvino,
    "llama.cpp": llama_cpp,
}
PACKAGES = {"openvino": "openvino-genai", "llama.cpp": "llama-cpp-python"}
"""Where the package has another name than the engine."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("precision")
    parser.add_argument("tokens", type=int)
    arguments = parser.parse_args()
    # Engines print to standard output, and so do their processes: answers have a descriptor of
    # their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = ENGINES[arguments.engine](arguments.model, arguments.precision, arguments.tokens)
    rng = random.Random(5)
    print(_version(arguments.engine), file=answers)
    for line in sys.stdin:
        rows, tokens, outputs = map(int, line.split())
        prompts = [rng.choices(range(FIRST_TOKEN, LAST_TOKEN), k=tokens) for _ in range(rows)]
        began = time.perf_counter()
        generate(prompts, outputs)
        print(time.perf_counter() - began, file=answers)


def _version(engine: str) -> str:
    try:
        return version(PACKAGES.get(engine, engine))
    except PackageNotFoundError:
        return "not installed as a package"


if __name__ == "__main__":
    main()
