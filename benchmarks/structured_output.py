"""What grammars cost and save, and whether outputs are valid, with the embedded model.

    python benchmarks/structured_output.py [--only PARTS] [--rows N] [--schemas N] [--model NAME]
                                           [--ways WAYS] [--quick] [--json FILE]

    valid     rows over generated schemas, in both classes, greedy and drawn, some with n = 3, with
              memory for a fifth of them, so that best-effort rows are preempted: how many whole
              outputs are not valid by their schema (jsonschema), how many were cut by max_tokens.
              With `--model tiny` by a random model of two layers with the same tokenizer, which
              writes anything: harder for the grammar, and a hundred times faster. Ways: `steps`,
              one after the other; `ahead`, with asynchronous scheduling, where the executor
              computes a step when its result is asked for; `replicas`, over HTTP to a server with
              two replicas
    step      32 rows with a grammar beside 32 without, and 64 without: median time of a step in
              which each row decodes one token. Both run at once in turns of some steps, so that
              what else the machine does is in both.
    forced    32 rows of a schema with many properties, with and without forced tokens: seconds
              until all are complete
    hostile   seconds until a hostile schema, pattern or grammar is refused; for those that are
              accepted, as their automaton is built only as far as an output goes, the longest step
              of 60 and the longest without them

Wall times, except of `valid`: run it on an idle machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jsonschema
from harness import benchmark_parser, chosen, save

from bros.core import grammars
from bros.core.clock import ManualClock, SystemClock
from bros.core.config import EngineConfig
from bros.core.errors import InvalidRequestError
from bros.core.interfaces import EngineInfo, Executor, GrammarState, StopRule, TokenConstraint
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Grammar,
    IdGenerator,
    SamplingParams,
    ServiceClass,
    expanded,
)
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.engine.grammars import Grammars
from bros.engine.group import Group
from bros.engine.thread_client import ThreadEngineClient
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model
from bros.profiling.profiles import profile_folders
from bros.scheduler.build import build_scheduler
from bros.text.generation import TextGenerator, collect
from bros.text.grammar_check import GrammarChecker
from bros.text.tokenizer import Tokenizer
from bros.transport.local import LocalEngine, open_local

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.json_schemas import schemas
from support.late_executor import LateExecutor
from support.server_process import running_server
from support.tiny_models import save_tiny_llama

MAX_TOKENS = 96
IN_FLIGHT = {ServiceClass.RT: 12, ServiceClass.BE: 40}
SMALL = EngineConfig(kv_blocks=72, max_model_len=256, max_num_seqs=64)
"""With memory for some ten rows."""


# ---- Whether outputs are valid.


def tiny_model(folder: Path) -> str:
    """A random model with the embedded one's tokenizer."""
    files = resolve_model(None, default_cache_dir())
    for path in files.folder.glob("*token*"):
        shutil.copy(path, folder)
    shutil.copy(files.folder / "chat_template.jinja", folder)
    vocab_size = Tokenizer.load(files.folder).vocab_size
    save_tiny_llama(folder, vocab_size=vocab_size)
    settings = json.loads((folder / "config.json").read_text())
    eos = json.loads((files.folder / "generation_config.json").read_text())["eos_token_id"]
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": eos}))
    return str(folder)


@dataclass(frozen=True, slots=True)
class Row:
    """What a row asks for."""

    number: int
    schema: Any

    @property
    def service_class(self) -> ServiceClass:
        return ServiceClass.RT if self.number % 4 < 2 else ServiceClass.BE

    @property
    def messages(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"Write some JSON. Number {self.number}."}]

    @property
    def params(self) -> dict[str, Any]:
        return {
            "temperature": float(self.number % 2),
            "seed": self.number,
            "n": 3 if self.number % 10 == 0 else 1,
            "max_tokens": MAX_TOKENS,
        }


Answers = Callable[[Row], Awaitable[Sequence[tuple[str, str]]]]
"""The finish_reason and the text of each choice."""


async def valid(numbers: range, count: int, model: str | None, way: str) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": len(numbers), "schemas": count}
    found |= dict.fromkeys(("outputs", "whole", "cut", "invalid"), 0)
    wrong: list[str] = []
    asked = schemas(count, seed=18)
    places = {cls: asyncio.Semaphore(most) for cls, most in IN_FLIGHT.items()}
    began_s = time.perf_counter()

    async def run(row: Row, answers: Answers) -> None:
        async with places[row.service_class]:
            asked_s = time.perf_counter()
            choices = await answers(row)
            if row.service_class is ServiceClass.RT:  # best-effort rows get its memory meanwhile
                await asyncio.sleep(time.perf_counter() - asked_s)
        for reason, text in choices:
            found["outputs"] += 1
            if reason == "length":
                found["cut"] += 1
                continue
            found["whole"] += 1
            try:
                jsonschema.validate(json.loads(text), row.schema)
            except (ValueError, jsonschema.ValidationError) as error:
                found["invalid"] += 1
                wrong.append(f"{text!r} by {row.schema}: {error}"[:500])
        if row.number % 100 == 99:
            seconds = time.perf_counter() - began_s
            print(f"row {row.number + 1}, {seconds:.0f} s, {len(wrong)} invalid", flush=True)

    async with WAYS[way](model) as (answers, figures):
        began_s = time.perf_counter()
        await asyncio.gather(*(run(Row(n, asked[n % count]), answers) for n in numbers))
        seconds = time.perf_counter() - began_s
        return {**found, "wrong": wrong[:10], "seconds": seconds, **await figures()}


Way = tuple[Answers, Callable[[], Awaitable[dict[str, Any]]]]
"""How rows are answered, and the figures afterwards."""


@contextlib.asynccontextmanager
async def _on_one_engine(
    model: str | None, opened: Callable[..., Any] = open_local, ahead: str = "off"
) -> AsyncIterator[Way]:
    config = dataclasses.replace(SMALL, model=model, async_scheduling=ahead)
    async with opened(config, default_cache_dir()) as local:

        async def answers(row: Row) -> Sequence[tuple[str, str]]:
            grammar = grammars.json_schema(row.schema)
            generation = await local.generator.start(
                [local.tokenizer.apply_chat_template(row.messages)],
                SamplingParams(grammar=grammar, **row.params),
                service_class=row.service_class,
            )
            return [
                (choice.finish_reason.value, choice.text) for choice in await collect(generation)
            ]

        async def figures() -> dict[str, Any]:
            stats = await local.client.stats()
            return {
                "preemptions": sum(each.preemptions for each in stats.by_class.values()),
                "output_tokens": sum(each.output_tokens for each in stats.by_class.values()),
                "forced_tokens": stats.forced_tokens,
                "mask_wait_s": stats.mask_wait_s,
                "step_s": stats.step_s,
            }

        yield answers, figures


class LateGroup(Group):
    """One rank, whose executor launches steps and computes them late."""

    def lead(self, files: ModelFiles) -> tuple[Executor, EngineInfo]:
        executor, info = super().lead(files)
        return LateExecutor(executor, ManualClock()), info


@contextlib.asynccontextmanager
async def _open_late(config: EngineConfig, cache_dir: Path) -> AsyncIterator[LocalEngine]:
    files, clock = resolve_model(config.model, cache_dir), SystemClock()
    folders = profile_folders(cache_dir)
    group = LateGroup(config)
    build = partial(build_engine, config, files, clock, profiles=folders, group=group)
    client = ThreadEngineClient(build)
    await client.wait_ready()
    try:
        tokenizer, ids = Tokenizer.load(files.folder), IdGenerator(random.Random(0))
        generator = TextGenerator(client, tokenizer, clock, ids)
        yield LocalEngine(files, client, tokenizer, generator, ids)
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _ahead(model: str | None) -> AsyncIterator[Way]:
    async with _on_one_engine(model, _open_late, ahead="on") as found:
        yield found


@contextlib.asynccontextmanager
async def _on_two_replicas(model: str | None) -> AsyncIterator[Way]:
    options = ["--replicas", "2", "--threads", "1", "--max-model-len", str(SMALL.max_model_len)]
    options += ["--kv-blocks", str(SMALL.kv_blocks), "--max-num-seqs", str(SMALL.max_num_seqs)]
    with running_server(*([model] if model else []), *options) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=1800) as client:

            async def answers(row: Row) -> Sequence[tuple[str, str]]:
                form = {"type": "json_schema", "json_schema": {"name": "it", "schema": row.schema}}
                tier = "flex" if row.service_class is ServiceClass.BE else "default"
                reply = await client.post(
                    "/v1/chat/completions",
                    json={
                        **row.params,
                        "messages": row.messages,
                        "response_format": form,
                        "service_tier": tier,
                    },
                )
                if reply.status_code != 200:
                    raise RuntimeError(reply.text)
                choices = reply.json()["choices"]
                return [(each["finish_reason"], each["message"]["content"]) for each in choices]

            async def figures() -> dict[str, Any]:
                text = (await client.get("/metrics")).text

                def total(name: str) -> int:
                    values = re.findall(
                        rf"^bros_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE
                    )
                    return int(sum(map(float, values)))

                names = ("preemptions", "output_tokens", "forced_tokens")
                return {name: total(name) for name in names}

            yield answers, figures


WAYS = {"steps": _on_one_engine, "ahead": _ahead, "replicas": _on_two_replicas}


# ---- What a step costs, and what forced tokens save: an engine without transport.


class WithoutForcing(Grammars):
    """Grammars that leave forced tokens to the sampler."""

    def state(self, grammar: Grammar, stops: StopRule, tenant: str = "") -> GrammarState:
        return _Sampled(super().state(grammar, stops, tenant))


class _Sampled:
    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def advance(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        return self._state.advance(token_ids, 0)

    def constraint(self, ahead: int = 0) -> TokenConstraint:
        return self._state.constraint(ahead)


class Bench:
    """Engines that share the weights and run in turns."""

    def __init__(self) -> None:
        self.config = EngineConfig(
            weights="fp32", policy="fcfs", max_num_seqs=64, max_batch_tokens=2048
        )
        self.files = resolve_model(None, default_cache_dir())
        self.executor, self.info = load_executor(self.config, self.files)
        self.tokenizer = Tokenizer.load(self.files.folder)

    def engine(self, kind: type[Grammars] = Grammars) -> Engine:
        """A new engine. Only one may have requests at a time: they share the KV memory."""
        clock = SystemClock()
        found = kind(self.files.folder, self.info, clock)
        scheduler = build_scheduler(self.config, self.info, None)
        return Engine(scheduler, self.executor, clock, self.info, grammars=found)

    def request(self, number: int, grammar: Grammar | None, **params: Any) -> EngineRequest:
        messages = [{"role": "user", "content": f"Write a list of long sentences. {number}"}]
        sampling = SamplingParams(grammar=grammar, seed=number, **params)
        prompt = self.tokenizer.apply_chat_template(messages)
        return EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)


def step(bench: Bench, turns: int, steps: int) -> dict[str, Any]:
    """Free text with and without a grammar: strings of a list, of which a model writes nearly every
    token as it would anyway."""
    text = grammars.json_schema(
        {"type": "array", "items": {"type": "string"}, "minItems": 50}, whitespace="[ \\n]{0,3}"
    )
    times: dict[str, list[float]] = {"mixed": [], "free": []}
    waits_s = 0.0
    for turn in range(turns):
        for kind in ("mixed", "free") if turn % 2 else ("free", "mixed"):
            engine = bench.engine()
            for number in range(64):
                grammar = text if kind == "mixed" and number % 2 else None
                engine.submit(
                    bench.request(
                        number, grammar, temperature=0.7, max_tokens=steps + 4, ignore_eos=True
                    )
                )
            while engine.has_work:
                began_s = time.perf_counter()
                outputs = engine.step()
                seconds = time.perf_counter() - began_s
                tokens = sum(len(output.token_ids) for output in map(expanded, outputs))
                if len(outputs) == tokens == 64:
                    times[kind].append(seconds)
            waits_s += engine.stats().mask_wait_s
    mixed, free = (statistics.median(times[kind][2:]) for kind in ("mixed", "free"))
    return {
        "mixed_ms": 1e3 * mixed,
        "free_ms": 1e3 * free,
        "longer": mixed / free - 1,
        "steps": {kind: len(found) for kind, found in times.items()},
        "mask_wait_ms_per_step": 1e3 * waits_s / len(times["mixed"]),
    }


_PERSON = {
    "type": "object",
    "properties": {
        name: {"enum": values} if isinstance(values, list) else values
        for name, values in {
            "customer_identifier": {"type": "integer", "minimum": 0, "maximum": 99999},
            "subscription_status": ["active", "suspended", "cancelled"],
            "preferred_language": ["English", "German", "French", "Spanish"],
            "marketing_consent_given": {"type": "boolean"},
            "number_of_open_tickets": {"type": "integer", "minimum": 0, "maximum": 20},
            "account_manager_assigned": {"type": "boolean"},
            "most_recent_payment_method": ["credit_card", "bank_transfer", "invoice"],
            "sentiment_of_the_message": ["positive", "neutral", "negative"],
        }.items()
    },
    "additionalProperties": False,
}
PERSON = {**_PERSON, "required": list(_PERSON["properties"])}


def forced(bench: Bench, turns: int) -> dict[str, Any]:
    grammar = grammars.json_schema(PERSON)
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    tokens: dict[str, int] = {}
    share = 0.0
    for turn in range(turns):
        kinds = {"with": Grammars, "without": WithoutForcing}
        for kind in kinds if turn % 2 else reversed(kinds):
            engine = bench.engine(kinds[kind])
            for number in range(32):
                engine.submit(bench.request(number, grammar, temperature=0.7, max_tokens=200))
            began_s, count = time.perf_counter(), 0
            while engine.has_work:
                for output in map(expanded, engine.step()):
                    count += len(output.token_ids)
                    assert output.finish_reason in (None, FinishReason.STOP)
            seconds[kind].append(time.perf_counter() - began_s)
            tokens[kind] = count
            if kind == "with":
                share = engine.stats().forced_tokens / count
    fast, slow = (statistics.median(seconds[kind]) for kind in ("with", "without"))
    return {
        "with_s": fast,
        "without_s": slow,
        "times_faster": slow / fast,
        "tokens": tokens,
        "forced_share": share,
    }


# ---- Hostile grammars.


def _wide() -> Grammar:
    fields = {f"p{number}": {"type": "string"} for number in range(4000)}
    return grammars.json_schema({"type": "object", "properties": fields})


def _product() -> Grammar:
    options = [{"anyOf": [{"properties": {f"a{n}_{i}": {}}} for i in range(4)]} for n in range(8)]
    return grammars.json_schema({"type": "object", "allOf": options})


def _chain() -> Grammar:
    rules = "\n".join(f'a{i}: "x" a{i + 1}' for i in range(14_000))
    return grammars.lark(f'start: a0\n{rules}\na14000: "y"')


HOSTILE: dict[str, Callable[[], Grammar]] = {
    "schema, product of choices": _product,
    "schema, 4,000 optional properties": _wide,
    "regex, 100,000 brackets": lambda: grammars.regex("(" * 50_000 + "a" + ")" * 50_000),
    "grammar, 25,000 alternatives": lambda: grammars.lark(
        "start: " + " | ".join(f'"w{i}"' for i in range(25_000))
    ),
    "grammar, chain of 14,000 rules": _chain,
    "grammar, a megabyte": lambda: grammars.lark("start: " + "x" * 1_000_000),
}


LARGE: dict[str, Grammar] = {
    "regex, nested repetitions": grammars.regex("(a{1,1000}){1,1000}"),
    "regex, repetitions thrice": grammars.regex("((a{1,100}){1,100}){1,100}"),
    "regex, exponential automaton": grammars.regex(".*a.{400}"),
    "regex, several of these": grammars.regex("(.*a.{12}){10}"),
    "regex, repeated words": grammars.regex(r"(\w+\s?){1,1000}z"),
    "grammar, ambiguous": grammars.lark('start: x* "q"\nx: "a" | "a" x | x x'),
}


async def hostile(bench: Bench) -> dict[str, float]:
    """Seconds until each is refused, and the longest step with each that is accepted."""
    checker = GrammarChecker(bench.files.folder, bench.info.vocab_size, bench.info.eos_token_ids)
    found: dict[str, float] = {}
    await checker.check("", grammars.regex("warm"))
    for name, make in HOSTILE.items():
        began_s = time.perf_counter()
        try:
            await checker.check("", make())
        except InvalidRequestError:
            found[name] = time.perf_counter() - began_s
        else:
            found[name] = float("inf")
    for grammar in LARGE.values():
        await checker.check("", grammar)
    checker.close()
    longest = {name: _longest_step_s(bench, grammar) for name, grammar in LARGE.items()}
    return found | longest | {"no grammar": _longest_step_s(bench, None)}


def _longest_step_s(bench: Bench, grammar: Grammar | None) -> float:
    """The longest step after the prefill, of a row with the grammar beside a free one."""
    engine = bench.engine()
    for number, asked in enumerate((grammar, None)):
        engine.submit(bench.request(number, asked, max_tokens=60, ignore_eos=True))
    longest_s, steps = 0.0, 0
    while engine.has_work:
        began_s = time.perf_counter()
        engine.step()
        steps += 1
        if steps > 2:
            longest_s = max(longest_s, time.perf_counter() - began_s)
    return longest_s


def main() -> None:
    parser = benchmark_parser(__doc__, only="hostile", rows=40, schemas=20)
    known = ("valid", "step", "forced", "hostile")
    parser.add_argument("--only", default=",".join(known))
    parser.add_argument("--model", choices=["embedded", "tiny"], default="embedded")
    parser.add_argument("--ways", default=",".join(WAYS), help="of `valid`")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--schemas", type=int, default=500)
    given = parser.parse_args()
    parts, found = chosen(parser, "--only", given.only, known), {}
    ways = chosen(parser, "--ways", given.ways, WAYS)
    bench = Bench() if set(parts) & {"step", "forced", "hostile"} else None
    if "step" in parts and bench is not None:
        found["step"] = step(bench, turns=6, steps=40)
        print(json.dumps(found["step"], indent=1), flush=True)
    if "forced" in parts and bench is not None:
        found["forced"] = forced(bench, turns=4)
        print(json.dumps(found["forced"], indent=1), flush=True)
    if "hostile" in parts and bench is not None:
        found["hostile"] = asyncio.run(hostile(bench))
        print(json.dumps(found["hostile"], indent=1), flush=True)
    if "valid" in parts:
        with tempfile.TemporaryDirectory() as folder:
            model = tiny_model(Path(folder)) if given.model == "tiny" else None
            for way in ways:
                name = f"valid, {given.model}, {way}"
                first = list(WAYS).index(way) * given.rows  # each way has rows of its own
                numbers = range(first, first + given.rows)
                found[name] = asyncio.run(valid(numbers, given.schemas, model, way))
                print(name, json.dumps(found[name], indent=1), flush=True)
    save(given.json, found)


if __name__ == "__main__":
    main()
