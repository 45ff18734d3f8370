"""Outputs that have to match generated schemas, from a random model: all valid, or cut by length.

A tiny random Llama writes anything, so all that is valid is the grammar's work.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from bros.core import grammars
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.interfaces import StopRule
from bros.core.request import FinishReason, Grammar, SamplingParams, ServiceClass
from bros.engine.grammars import Grammars
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.text.generation import ChoiceResult, collect
from bros.transport.local import LocalEngine, open_local
from support.json_schemas import schemas
from support.tier import by_tier, seed
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import save_tokenizer

OPEN = [
    grammars.regex("(?s:.*)"),
    grammars.regex("(?s:[^zZ]*)"),
    grammars.lark("start: (WORD | /[^a-zA-Z]/)*\nWORD: /[a-zA-Z]+/"),
]
"""Grammars that allow nearly everything, and so force nothing."""
SCHEMAS, ROWS = by_tier(fast=10, long=100), by_tier(fast=2, long=4)
MAX_TOKENS = by_tier(fast=60, long=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, vocab_size=440)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    save_tokenizer(folder)
    return folder


def serve(folder: Path, work: Any, **options: Any) -> Any:
    """`work` of a LocalEngine."""

    async def run() -> Any:
        config = EngineConfig(
            model=str(folder),
            kernels="reference",
            threads=1,
            weights="fp32",
            max_queue=3 * SCHEMAS * ROWS,
            **options,
        )
        async with open_local(config, folder / "cache") as local:
            return await work(local)

    return asyncio.run(run())


def check(schema: Any, choice: ChoiceResult) -> bool:
    """Whether the output is whole; raises if it is whole and wrong."""
    if choice.finish_reason is FinishReason.LENGTH:
        return False
    assert choice.finish_reason is FinishReason.STOP, choice
    jsonschema.validate(json.loads(choice.text), schema)
    return True


@pytest.mark.parametrize(
    ("kv_blocks", "logprobs"),
    by_tier(fast=[(9, 0), (400, None)], long=[(9, None), (9, 0), (400, None)]),
)
def test_every_whole_output_is_valid_by_its_schema(
    folder: Path, kv_blocks: int, logprobs: int | None
) -> None:
    """In both classes, greedy and drawn, with n = 3, and with memory for two or three of them."""
    rng = random.Random(seed(3))
    asked = schemas(SCHEMAS, seed(kv_blocks))

    async def work(local: LocalEngine) -> list[tuple[Any, list[ChoiceResult]]]:
        async def row(schema: Any, number: int) -> tuple[Any, list[ChoiceResult]]:
            sampling = SamplingParams(
                temperature=float(number % 2),
                seed=number,
                n=3 if number % 3 == 0 else 1,
                max_tokens=MAX_TOKENS,
                min_tokens=rng.choice([0, 5]),
                ignore_eos=rng.random() < 0.2,
                presence_penalty=rng.choice([0.0, 0.0, 0.5]),
                logprobs=logprobs,
                grammar=grammars.json_schema(schema),
            )
            generation = await local.generator.start(
                [[rng.randrange(5, 300) for _ in range(rng.randint(1, 40))]],
                sampling,
                service_class=rng.choice(list(ServiceClass)),
            )
            return schema, await collect(generation)

        rows = [row(schema, n * ROWS + k) for n, schema in enumerate(asked) for k in range(ROWS)]
        found = await asyncio.gather(*rows)
        stats = await local.client.stats()
        preempted = sum(each.preemptions for each in stats.by_class.values())
        assert (preempted > 0) == (kv_blocks == 9)
        assert (stats.forced_tokens > 0) == (logprobs is None)
        return found

    whole = 0
    for schema, choices in serve(
        folder,
        work,
        kv_blocks=by_tier(fast=kv_blocks, long=kv_blocks + 4),
        max_model_len=by_tier(fast=112, long=176),
    ):
        whole += sum(check(schema, choice) for choice in choices)
    assert whole > SCHEMAS, "nearly all were cut"


@pytest.fixture(params=["tiny", pytest.param("embedded", marks=pytest.mark.long)])
def any_folder(request: pytest.FixtureRequest, folder: Path) -> Path:
    if request.param == "embedded":
        return resolve_model(None, default_cache_dir()).folder
    return folder


@pytest.mark.parametrize("kv_blocks", [16, 400])
def test_with_the_same_seed_a_grammar_changes_nothing_up_to_a_token_that_it_forbids(
    any_folder: Path, kv_blocks: int
) -> None:
    """In both classes, greedy and drawn, with n = 3, with and without memory for all rows."""
    rng = random.Random(seed(19))
    numbers = range(by_tier(fast=12, long=60))

    async def work(local: LocalEngine) -> tuple[int, int]:
        tokenizer, info = local.tokenizer, local.client.info
        # A random model writes what is no text, which no grammar allows.
        texts = {i: tokenizer.decode([i]) for i in range(min(440, info.vocab_size))}
        words = [i for i, text in texts.items() if text.isascii() and text[:1] not in ("", "<")]
        no_text = texts.keys() - {*words, *info.eos_token_ids}
        bias = dict.fromkeys(no_text, -100.0) if info.vocab_size == 440 else {}

        async def row(number: int, grammar: Grammar | None) -> list[ChoiceResult]:
            sampling = SamplingParams(
                temperature=(0.0, 0.7, 1.0)[number % 3],
                top_p=(1.0, 0.9)[number % 2],
                seed=number,
                n=3 if number % 4 == 0 else 1,
                max_tokens=40,
                logit_bias=bias,
                grammar=grammar,
            )
            generation = await local.generator.start(
                [tokenizer.encode(f"There were {number} dogs and")],
                sampling,
                service_class=rng.choice(list(ServiceClass)),
            )
            return await collect(generation)

        async def rows(grammar: Grammar | None) -> list[ChoiceResult]:
            return sum(await asyncio.gather(*(row(number, grammar) for number in numbers)), [])

        compiler = Grammars(local.files.folder, info, SystemClock())
        same, free = 0, await rows(None)
        for grammar in OPEN:
            for one, other in zip(free, await rows(grammar), strict=True):
                count = num_allowed(compiler, grammar, one.token_ids, info.eos_token_ids)
                assert other.token_ids[:count] == one.token_ids[:count]
                if count == len(one.token_ids):
                    assert (other.text, other.finish_reason) == (one.text, one.finish_reason)
                same += count
        return same, len(OPEN) * sum(len(one.token_ids) for one in free)

    same, total = serve(any_folder, work, kv_blocks=kv_blocks, max_model_len=112)
    assert same > total / 2, f"{same} of {total} tokens"


def num_allowed(
    compiler: Grammars, grammar: Grammar, token_ids: Sequence[int], ends: Sequence[int]
) -> int:
    """How many tokens the grammar allows, up to the first that it does not. ends: stop tokens."""
    state = compiler.state(grammar, StopRule(frozenset(ends), 0, ends[0]))
    for count, token_id in enumerate(token_ids):
        if not state.constraint().allows(token_id):
            return count
        if token_id not in ends:
            state.advance([token_id], 0)
    return len(token_ids)
