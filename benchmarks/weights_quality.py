"""What the formats of weights cost in quality: log-probabilities of a text, against fp32.

    python benchmarks/weights_quality.py [--model MODEL] [--dense] [--text FILE] [--tokens 448]
        [--weights bf16,int8,int4] [--kv-dtype auto] [--json FILE] [--quick]

The text is by default a page of this project's documentation. The whole distribution of every next
token is compared with that of fp32 weights and an fp32 KV cache:

    loss          nats per token of the text; perplexity is its exponential
    difference    mean difference of log-probabilities: of all tokens, and of fp32's best
    divergence    mean Kullback-Leibler divergence from fp32
    same best     how often the best token is that of fp32

The embedded model is stored in 4 bits, which int4 and int8 do not round again, so that only
activations are rounded. `--dense` exports its values first: then all formats round weights as they
would those of a model in 16 bits. (Values on a grid of 16 steps are the best case of int4, whose
groups have these steps again, and no easier than others for int8.)
"""

from __future__ import annotations

import math
import sys
import tempfile
from array import array
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from harness import benchmark_parser, existing_file, save, table_of
from rich.console import Console
from torch import Tensor
from transformers import AutoTokenizer

from bros.core.config import EngineConfig
from bros.core.plan import Chunk, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model

sys.path.append(str(Path(__file__).resolve().parent / "peers"))

import export_model

TEXT = Path(__file__).resolve().parents[1] / "docs" / "scheduling.md"
_BLOCK_SIZE = 16
_ROWS = 32
_GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0)


class Quality(NamedTuple):
    """Means over the tokens of a text; see the head of this file."""

    loss: float
    difference: float
    best_difference: float
    divergence: float
    same_best: float


def log_probabilities(files: ModelFiles, weights: str, kv_dtype: str, tokens: list[int]) -> Tensor:
    """fp64 [len(tokens) - 1, vocab]: of each token but the first, given those before it."""
    blocks = -(-len(tokens) // _BLOCK_SIZE)
    config = EngineConfig(
        weights=weights, kv_dtype=kv_dtype, kv_blocks=blocks, max_model_len=blocks * _BLOCK_SIZE
    )
    runner, _ = load_executor(config, files)
    runner.logits(StepPlan(0, (_chunk(0, tokens[:-1]),)))
    # A row has the same bits in any batch: each token is read again as if the text ended there.
    rows = [_chunk(position, [token]) for position, token in enumerate(tokens[:-1])]
    plans = [
        StepPlan(first, tuple(rows[first : first + _ROWS])) for first in range(0, len(rows), _ROWS)
    ]
    return torch.cat([runner.logits(plan).clone() for plan in plans]).double().log_softmax(dim=1)


def _chunk(start: int, tokens: list[int]) -> Chunk:
    """Of the one text, which begins with the first slot."""
    segments = array("i")
    for first in range(0, start, _BLOCK_SIZE):
        segments.extend((first // _BLOCK_SIZE, 0, min(_BLOCK_SIZE, start - first)))
    slots = array("i", range(start, start + len(tokens)))
    return Chunk(str(start), start, tokens, segments, slots, _GREEDY)


def quality(found: Tensor, exact: Tensor, tokens: list[int]) -> Quality:
    """found, exact: as log_probabilities gives them."""
    best = exact.argmax(dim=1, keepdim=True)
    difference = (found - exact).abs()
    following = torch.tensor(tokens[1:])[:, None]
    return Quality(
        loss=-found.gather(1, following).mean().item(),
        difference=difference.mean().item(),
        best_difference=difference.gather(1, best).mean().item(),
        divergence=(exact.exp() * (exact - found)).sum(dim=1).mean().item(),
        same_best=(found.argmax(dim=1, keepdim=True) == best).double().mean().item(),
    )


def compare(
    files: ModelFiles, formats: list[str], tokens: list[int], kv_dtype: str = "auto"
) -> dict[str, Quality]:
    """The quality of fp32 and of each format. kv_dtype: of the formats."""
    exact = log_probabilities(files, "fp32", "fp32", tokens)
    found = {"fp32": quality(exact, exact, tokens)}
    for weights in formats:
        found[weights] = quality(log_probabilities(files, weights, kv_dtype, tokens), exact, tokens)
    return found


def main() -> None:
    parser = benchmark_parser(__doc__, tokens=20, weights="int4")
    parser.add_argument("--model", help="as of bros serve; default: the embedded one")
    parser.add_argument("--dense", action="store_true", help="round the exported fp32 values")
    parser.add_argument("--text", type=existing_file, default=TEXT)
    parser.add_argument("--tokens", type=int, default=448)
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--kv-dtype", default="auto", help="of all formats but the exact fp32")
    args = parser.parse_args()
    with ExitStack() as stack:
        model = args.model
        if args.dense:
            model = stack.enter_context(tempfile.TemporaryDirectory())
            export_model.main(Path(model))
        files = resolve_model(model, default_cache_dir())
        text = args.text.read_text("utf-8")
        tokens = AutoTokenizer.from_pretrained(files.folder).encode(text)[: args.tokens]
        found = compare(files, args.weights.split(","), tokens, args.kv_dtype)
    rows = [
        (
            weights,
            f"{each.loss:.4f}",
            f"{math.exp(each.loss):.2f}",
            f"{each.difference:.3f}",
            f"{each.best_difference:.3f}",
            f"{each.divergence:.4f}",
            f"{each.same_best:.1%}",
        )
        for weights, each in found.items()
    ]
    headings = ("", "loss", "perplexity", "difference", "of the best", "divergence", "same best")
    Console().print(table_of(f"{len(tokens)} tokens of {args.text.name}", headings, rows))
    results = {weights: each._asdict() for weights, each in found.items()}
    save(args.json, {"dense": args.dense, "tokens": len(tokens), "quality": results})


if __name__ == "__main__":
    main()
