"""Runs programs of many calls on simulated engines, in sessions or call by call.

    programs, chats -> ServiceEnd -> SessionService, TextGenerator
                                     -> RouterClient -> virtual engine, virtual engine, ...

Sessions, router, schedulers and KV memory are those of the server. Only the executor is simulated:
it advances the virtual loop by the predicted time of each step, and samples pseudorandom letters.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import re
import struct
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import BrosError, ConfigError
from bros.core.interfaces import EngineClient, EngineStats
from bros.core.plan import Chunk
from bros.core.request import IdGenerator, SamplingParams, Slo
from bros.router.client import RouterClient
from bros.router.fleet import make_fleet
from bros.router.state import RouterSettings
from bros.scheduler.build import build_scheduler
from bros.semantic.service.live import SessionSettings
from bros.semantic.service.service import SessionService
from bros.simulator.programs import (
    ChatRecord,
    Program,
    Run,
    ServiceEnd,
    fixed_length,
    programs_of,
    run_by_calls,
    run_in_session,
)
from bros.simulator.simulation import BLOCK_SIZE, Device, Disturbance, engine_info
from bros.simulator.virtual_loop import (
    START_S,
    LoopClock,
    VirtualEngineClient,
    run_virtual,
    virtual_engine,
)
from bros.text.generation import TextGenerator
from bros.text.tokenizer import ChatTemplates, Tokenizer
from bros.workload.arrivals import RtLoad, generator, poisson_times
from bros.workload.attainment import Attainment, Summary

WAYS = ("session", "calls")
"""How a program is run: submitted to a session, or call by call."""

# ---- Text without a model.


_SPECIAL = {"bos_token": "<|start|>", "eos_token": "<|end|>"}
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer with one token per byte, so that any text has the same tokens in any context."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*_SPECIAL.values(), *alphabet]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL.values()))
    templates = ChatTemplates({"default": _CHAT_TEMPLATE}, _SPECIAL, ManualClock())
    return Tokenizer(backend, _SPECIAL, templates)


class Answers:
    """The tokens that simulated engines sample: pseudorandom by request and position."""

    def __init__(self, tokenizer: Tokenizer, pattern: str = "[a-z]") -> None:
        """pattern: of the texts of the tokens to choose from. Each must be one token in any
        context, so that sessions and calls have equal prompts."""
        texts = ((i, tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
        self._tokens = [i for i, text in texts if re.fullmatch(pattern, text)]

    def choose(self, chunk: Chunk) -> int:
        """The token after a chunk."""
        place = zlib.crc32(f"{chunk.request_id} {chunk.start}".encode())
        return self._tokens[place % len(self._tokens)]


# ---- A server on a virtual loop.


@dataclass(frozen=True, slots=True)
class ProgramServer:
    """A server on a virtual loop.

    end: what clients call.
    engine: its engine, or a router over several.
    """

    end: ServiceEnd
    engine: EngineClient

    def reasons(self) -> Mapping[str, int]:
        """Reason of a decision of the router -> requests; empty without a router."""
        found: Counter[str] = Counter()
        if isinstance(self.engine, RouterClient):
            for status in self.engine.replicas():
                found.update(status.routed)
        return dict(sorted(found.items()))


@contextlib.asynccontextmanager
async def program_server(
    config: EngineConfig,
    device: Device,
    tokenizer: Tokenizer,
    answers: Answers,
    *,
    replicas: int = 1,
    router: str = "e2",
    grouped: bool = True,
    reread: float = 0.0,
    disturbance: Disturbance | None = None,
    seed: int = 0,
) -> AsyncIterator[ProgramServer]:
    """A server with so many engines on the running virtual loop; a router if there are several.

    grouped, reread: see virtual_engine.
    Raises ConfigError.
    """
    engines = [
        virtual_engine(
            config,
            device,
            vocab_size=tokenizer.vocab_size,
            choose=answers.choose,
            grouped=grouped,
            reread=reread,
            disturbance=disturbance,
            seed=seed + number,
        )
        for number in range(replicas)
    ]
    clock, ids = LoopClock(), IdGenerator(random.Random(seed))
    engine = engines[0] if replicas == 1 else _routed(engines, router, seed)
    generator = TextGenerator(engine, tokenizer, clock, ids)
    # Programs of a simulation may wait for as long as the simulation lasts.
    settings = SessionSettings(ttl_s=86_400.0, max_wait_s=1e6)
    service = SessionService(
        generator,
        engine,
        tokenizer,
        clock,
        ids,
        settings,
        router=engine if isinstance(engine, RouterClient) else None,
    )
    sweep = asyncio.create_task(service.run())
    try:
        yield ProgramServer(ServiceEnd(service, generator, tokenizer, clock), engine)
    finally:
        sweep.cancel()
        await asyncio.gather(sweep, return_exceptions=True)
        await engine.close()


def _routed(engines: Sequence[VirtualEngineClient], router: str, seed: int) -> EngineClient:
    fleet = make_fleet(router, RouterSettings(), block_size=BLOCK_SIZE)
    client = RouterClient(fleet, LoopClock(), random.Random(seed))
    for engine in engines:
        client.add(engine)
    return client


# ---- A run, and its metrics.
#
#     programs    arrive as a Poisson process; latency: first request of the client to last value
#     chats       arrive for count / rate seconds; real-time requests without common prefixes


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramScenario:
    """Everything that determines a run: runs of equal scenarios are bit-identical.

    program: a key of programs.PROGRAMS.
    way: one of WAYS.
    router: policy of the router; without effect with one replica.
    rate: programs per second over all replicas.
    count: programs.
    chats: chats beside the programs.
    delay_s: network latency before each request of a client.
    """

    program: str
    way: str
    config: EngineConfig
    device: Device
    replicas: int
    router: str
    rate: float
    count: int
    chats: RtLoad
    seed: int
    delay_s: float = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramReport:
    """Metrics of one run.

    end_s: when the last program or chat ended.
    latency_s: of programs, from the client's first request to the last value.
    chat_ttft_s, chat_tpot_s: of chats, without network latency.
    chats_met: chats that met both objectives.
    prompt_tokens_per_s, output_tokens_per_s: of programs and chats; cached tokens included.
    cached: share of all prompt tokens that were cached when their request began.
    reasons: reason of a decision of the router -> requests.
    digest: of all latencies and chats.
    """

    programs: int
    chats: int
    end_s: float
    latency_s: Summary
    chat_ttft_s: Summary
    chat_tpot_s: Summary
    chats_met: Attainment
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    cached_tokens: int
    cached: float
    preemptions: int
    reasons: Mapping[str, int]
    digest: str


def check_program_scenario(scenario: ProgramScenario) -> None:
    """Raise ConfigError if options contradict each other."""
    info = engine_info(scenario.config, scenario.device)
    build_scheduler(scenario.config, info, scenario.device.steps)


def run_programs(
    scenario: ProgramScenario, progress: Callable[[float], None] | None = None
) -> ProgramReport:
    """Simulate one scenario. Raises ConfigError if it cannot be run."""
    check_program_scenario(scenario)
    try:
        return run_virtual(lambda: _Simulation(scenario, progress or _ignore).run())
    except ConfigError:
        raise
    except BrosError as error:
        raise ConfigError(f"--programs: {scenario.program} cannot be served: {error}") from error


def _ignore(share: float) -> None:
    """The default of `progress`."""


class _Simulation:
    """One run on a virtual loop."""

    def __init__(self, scenario: ProgramScenario, progress: Callable[[float], None]) -> None:
        self._scenario = scenario
        self._progress = progress
        self._tokenizer = byte_tokenizer()
        self._num_ended = 0

    async def run(self) -> ProgramReport:
        scenario = self._scenario
        programs = programs_of(scenario.program, scenario.count, self._tokenizer, scenario.seed)
        times_s = program_times(scenario.rate, len(programs), scenario.seed)
        arrivals = scenario.chats.arrivals(scenario.count / scenario.rate, scenario.seed)
        prompts = generator(scenario.seed, "chat prompts")
        async with program_server(
            scenario.config,
            scenario.device,
            self._tokenizer,
            Answers(self._tokenizer),
            replicas=scenario.replicas,
            router=scenario.router,
            seed=scenario.seed,
        ) as server:
            runs, chats = await asyncio.gather(
                asyncio.gather(
                    *(
                        self._program(server.end, time_s, program)
                        for time_s, program in zip(times_s, programs, strict=True)
                    )
                ),
                asyncio.gather(
                    *(
                        chat_at(
                            server.end,
                            arrival.time_s,
                            random_prompt(prompts, self._tokenizer, arrival.size.prompt_tokens),
                            arrival.size.output_tokens,
                        )
                        for arrival in arrivals
                    )
                ),
            )
            end_s = LoopClock().now() - START_S
            stats, reasons = await server.engine.stats(), server.reasons()
        return program_report(runs, chats, stats, reasons, end_s, scenario.config.default_slo)

    async def _program(self, end: ServiceEnd, time_s: float, program: Program) -> Run:
        await asyncio.sleep(time_s)
        run = await run_program(end, program, self._scenario.way, self._scenario.delay_s)
        self._num_ended += 1
        self._progress(self._num_ended / self._scenario.count)
        return run


async def run_program(end: ServiceEnd, program: Program, way: str, delay_s: float) -> Run:
    """Run a program in one of WAYS, now."""
    if way == "session":
        return await run_in_session(end, program, LoopClock(), delay_s=delay_s)
    return await run_by_calls(end, program, LoopClock(), delay_s=delay_s)


async def chat_at(
    end: ServiceEnd, time_s: float, prompt: Sequence[int], output_tokens: int
) -> ChatRecord:
    """A real-time request that arrives time_s seconds from now."""
    await asyncio.sleep(time_s)
    return await end.complete(prompt, SamplingParams(**fixed_length(output_tokens)))


def random_prompt(rng: random.Random, tokenizer: Tokenizer, num_tokens: int) -> Sequence[int]:
    """Random tokens that are not special."""
    return [rng.randrange(len(_SPECIAL), tokenizer.vocab_size) for _ in range(num_tokens)]


def program_times(rate: float, count: int, seed: int) -> Sequence[float]:
    """When programs arrive, in seconds from the start; the first one arrives at once.

    Another rate only stretches the gaps.
    """
    later = poisson_times(rate, generator(seed, "program gaps"))
    return [0.0, *islice(later, count - 1)]


def program_report(
    runs: Sequence[Run],
    chats: Sequence[ChatRecord],
    stats: EngineStats,
    reasons: Mapping[str, int],
    end_s: float,
    slo: Slo,
) -> ProgramReport:
    """slo: objectives of chats."""
    classes = stats.by_class.values()
    cached = sum(values.prefix_tokens for values in classes)
    prompt = sum(values.prompt_tokens for values in classes)
    return ProgramReport(
        programs=len(runs),
        chats=len(chats),
        end_s=end_s,
        latency_s=Summary.of([run.seconds for run in runs]),
        chat_ttft_s=Summary.of([chat.ttft_s for chat in chats]),
        chat_tpot_s=Summary.of([chat.tpot_s for chat in chats if chat.tpot_s is not None]),
        chats_met=Attainment.of([chat.met(slo) for chat in chats]),
        prompt_tokens_per_s=prompt / end_s,
        output_tokens_per_s=sum(values.output_tokens for values in classes) / end_s,
        cached_tokens=cached,
        cached=cached / prompt if prompt else 0.0,
        preemptions=sum(values.preemptions for values in classes),
        reasons=reasons,
        digest=_digest(runs, chats),
    )


def _digest(runs: Sequence[Run], chats: Sequence[ChatRecord]) -> str:
    hashed = hashlib.sha256()
    for run in runs:
        hashed.update(struct.pack("<d", run.seconds))
        hashed.update("".join(run.values[name] for name in sorted(run.values)).encode())
    for chat in chats:
        hashed.update(struct.pack("<dddq", chat.asked_s, chat.first_s, chat.last_s, chat.tokens))
    return hashed.hexdigest()
