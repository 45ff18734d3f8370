"""Time per output token of the engine by the number of batched tokens (Parrot paper, figure 10).

    python benchmarks/batched_tokens.py [--rounds 5]
        [--json benchmarks/results/batched_tokens_cpu.json]

Rows of equal context decode in the embedded model in fp32, without a common prefix. A step gives
each row one token, so its time is the time per output token. Batched tokens are the context of all
rows together: the capacity that the paper limits to keep that time low. Cases alternate, so that a
slow minute of the machine affects all of them; figures are medians. Run nothing else on the
machine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from harness import benchmark_parser, finish, greedy_request, random_tokens, save, table_of
from rich.console import Console

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.request import expanded
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.executor.model_store import default_cache_dir, resolve_model

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 256, 768, 1536)
MOST_TOKENS = 12_288
"""Batched tokens of the largest case: the largest capacity of the paper's figure."""
MAX_BATCH_TOKENS = 1024
BLOCK_SIZE = 16

Case = tuple[int, int]


def cases_of(rows: Sequence[int], contexts: Sequence[int]) -> list[Case]:
    """(rows, context) of all cases with at most MOST_TOKENS batched tokens."""
    return [(n, context) for context in contexts for n in rows if n * context <= MOST_TOKENS]


def make(cases: Sequence[Case], steps: int) -> Engine:
    """An engine that has room for each of the cases."""
    most_rows = max(n for n, _ in cases)
    # What idle prompts keep cached does not matter, but all rows of a case must be resident.
    tokens = max(n * (context + _outputs(n, context, steps)) for n, context in cases)
    config = EngineConfig(
        device="cpu",
        weights="fp32",
        kv_dtype="fp32",
        policy="fcfs",
        prefix_cache="off",
        max_num_seqs=most_rows,
        max_batch_tokens=MAX_BATCH_TOKENS,
        max_model_len=4096,
        kv_blocks=max(tokens, 4096) // BLOCK_SIZE + 2 * most_rows,
    )
    return build_engine(config, resolve_model(None, default_cache_dir()), SystemClock())


def _outputs(rows: int, context: int, steps: int) -> int:
    """Tokens that the first row generates: it decodes while the others are prefilled."""
    return steps + rows + rows * context // MAX_BATCH_TOKENS + 2


def measure(engine: Engine, case: Case, steps: int, seed: int) -> tuple[list[float], float]:
    """Milliseconds of each step in which all rows decode, and the mean batched tokens of these."""
    rows, context = case
    rng = random.Random(f"{seed} {case}")
    for row in range(rows):
        prompt = random_tokens(rng, context, engine.info.vocab_size)
        engine.submit(greedy_request(str(row), prompt, _outputs(rows, context, steps)))
    generated = dict.fromkeys(map(str, range(rows)), 0)

    def step() -> None:
        for output in map(expanded, engine.step()):
            generated[output.request_id] += len(output.token_ids)

    while not all(generated.values()):
        step()
    before = rows * context + sum(generated.values())
    clock, times = SystemClock(), []
    for _ in range(steps):
        began = clock.now()
        step()
        times.append((clock.now() - began) * 1e3)
    after = rows * context + sum(generated.values())
    for name in generated:
        engine.abort(name)
    finish(engine)
    assert after - before == rows * steps, "each step gives each row one token"
    return times, (before + after) / 2


def main() -> None:
    parser = benchmark_parser(__doc__, rows=[1, 4], contexts=[16, 64], rounds=1, steps=2)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="steps of each case and round")
    args = parser.parse_args()
    cases = cases_of(args.rows, args.contexts)
    engine = make(cases, args.steps)
    times: dict[Case, list[float]] = {case: [] for case in cases}
    batched: dict[Case, float] = {}
    for round_number in range(args.rounds):
        for case in cases:
            found, batched[case] = measure(engine, case, args.steps, round_number)
            times[case] += found
    engine.close()
    rows = [
        {
            "rows": case[0],
            "context": case[1],
            "batched_tokens": round(batched[case]),
            "ms": statistics.median(found),
        }
        for case, found in times.items()
    ]
    cells = [
        (row["rows"], row["context"], row["batched_tokens"], f"{row['ms']:.1f}") for row in rows
    ]
    headings = ("rows", "context", "batched tokens", "ms per output token")
    Console().print(table_of("", headings, cells))
    save(args.json, {"rounds": args.rounds, "decode": rows})


if __name__ == "__main__":
    main()
