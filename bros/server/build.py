"""The composition root: builds a server, a local chat or a local batch run from its options."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import random
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bros.batch.background import BackgroundRunner
from bros.batch.runner import BatchRunner, RunnerSettings
from bros.batch.store import Store, default_data_dir, open_store
from bros.core.clock import SystemClock
from bros.core.collector import Collector
from bros.core.config import Config, EngineConfig, ServerConfig
from bros.core.errors import ConfigError, EngineDeadError
from bros.core.fair import FairGate, FairThreads
from bros.core.files import expand_user
from bros.core.interfaces import EngineClient, EngineInfo
from bros.core.request import CHAT_SAMPLING, IdGenerator, ServiceClass
from bros.core.tenants import TenantAccounts
from bros.executor.model_store import ModelFiles, cache_dir_of, resolve_model
from bros.profiling.profiles import profile_folders
from bros.router.client import RouterClient
from bros.router.elastic import ElasticReplicas
from bros.semantic.service.live import SessionSettings
from bros.semantic.service.service import SessionService
from bros.semantic.transforms.process import TransformProcesses
from bros.server.app import create_app
from bros.server.batches.rows import EngineRowHandler, RowRunner
from bros.server.browsers import BrowserRules
from bros.server.connections import raise_descriptor_limit
from bros.server.limits import disk_bytes, memory_bytes, server_limits
from bros.server.operations.loop_lag import LagWatch
from bros.server.operations.metrics import ServerMetrics
from bros.server.replicas import (
    ClusterReplicas,
    LocalReplicas,
    connect_cluster,
    describe_replicas,
    is_elastic,
    local_elastic_replicas,
    replica_bounds,
)
from bros.server.responses.background import EngineResponseHandler
from bros.server.responses.running import RunningResponses
from bros.server.serve import HttpServer, bind, load_tls, run
from bros.server.state import STORE_THREADS, STORE_THREADS_PER_TENANT, Jobs, ServerState
from bros.server.tenants import (
    LiveTenants,
    Tenants,
    load_tenants,
    public_prefixes,
    public_texts,
)
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator
from bros.text.grammar_check import GrammarChecker
from bros.text.tokenizer import Tokenizer
from bros.transport.engine_start import EngineProcess
from bros.transport.process_client import ProcessEngineClient

logger = logging.getLogger("bros.server")

_SWITCH_INTERVAL_S = 0.001

_MAX_DRAIN_S = 15.0
"""Of a server under torchrun, which kills its ranks 30 s after it was told to end."""


def serve(config: Config, *, is_rank: bool = False, first: EngineProcess | None = None) -> int:
    """Run a server until it is stopped. Returns the exit status: 0 after SIGINT, SIGTERM or
    SIGHUP, 1 if the engine died and may not restart.

    is_rank: torchrun has started this process as rank 0, and the other ranks beside it.
    first: the process of the engine, started early; only for one engine without ranks.

    Raises ConfigError, ModelError or EngineDeadError if the server cannot start.
    """
    set_up_logging(config.server.log_level)
    if is_rank and config.server.replicas > 1:
        raise ConfigError("--replicas: torchrun starts the ranks of one engine; use --tp instead")
    if is_rank and (config.server.cluster is not None or is_elastic(config.server)):
        raise ConfigError("--cluster, --max-replicas: torchrun starts the ranks of one engine")
    if is_rank:
        drain_s = min(config.server.drain_timeout, _MAX_DRAIN_S)
        server = dataclasses.replace(config.server, drain_timeout=drain_s)
        config = dataclasses.replace(config, server=server)
    replica_bounds(config.server)  # raises ConfigError
    tenants = load_tenants(config.server)
    config = dataclasses.replace(config, engine=tenants.with_numbers(config.engine))
    tls = load_tls(config.server)
    BrowserRules.of(config.server, socket.gethostname())  # raises ConfigError
    public_texts(config.server)  # raises ConfigError
    raise_descriptor_limit()
    bound = bind(config.server.host, config.server.port)
    with bound, contextlib.closing(_open_store(config.server)) as store:
        files = resolve_model(config.engine.model, cache_dir_of(config.server.data_dir), _print)
        return run(_serve(config, files, bound, store, tenants, tls, is_rank, first))


def set_up_logging(level: str) -> None:
    """Log to stderr from this level on."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # It has a line for each malformed form, which would let clients fill a disk.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


async def _serve(
    config: Config,
    files: ModelFiles,
    bound: socket.socket,
    store: Store,
    tenants: Tenants,
    tls: ssl.SSLContext | None,
    is_rank: bool,
    first: EngineProcess | None,
) -> int:
    servers: list[HttpServer] = []
    deaths: list[str] = []

    def on_final_death(reason: str) -> None:
        deaths.append(reason)
        for server in servers:
            server.stop()

    engine = _engine(config, files, is_rank, on_final_death, first)
    copies = f" {config.server.replicas} times" if isinstance(engine, RouterClient) else ""
    _print(f"Loading {files.name}{copies} ...")
    try:
        _, tokenizer = await asyncio.gather(
            engine.start(), asyncio.to_thread(Tokenizer.load, files.folder)
        )
        ids = IdGenerator(random.SystemRandom())
        disk = disk_bytes(_store_folder(config.server))
        live = LiveTenants(
            tenants,
            config.server,
            max_queue=most_queued(engine.info, config.server),
            server_limits=server_limits(config.server, memory_bytes(), disk),
        )
        accounts = live.accounts
        public = public_prefixes(config.server, tokenizer)
        generator = TextGenerator(engine, tokenizer, SystemClock(), ids, accounts, public)
        state = _state(config.server, files, engine, tokenizer, generator, ids, store, accounts)
        server = HttpServer(
            create_app(state, live),
            bound,
            on_listening=lambda url: _print(_banner(url, state, config.engine)),
            log_level=config.server.log_level,
            tls=tls,
        )
        servers.append(server)
        if warning := small_context(engine.info, config.engine):
            logger.warning("%s", warning)
        # Threads that validate batches must hand the GIL back to the streams quickly.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        if not deaths:
            with Collector() as collector:
                async with _running(state, collector, live):
                    await server.run()
    finally:
        await engine.close()
    if deaths:
        logger.error("the server stops because its engine died: %s", deaths[0])
    return 1 if deaths else 0


def _engine(
    config: Config,
    files: ModelFiles,
    is_rank: bool,
    on_final_death: Callable[[str], None],
    first: EngineProcess | None,
) -> ProcessEngineClient | LocalReplicas | ElasticReplicas:
    def make(
        number: int | None, engine: EngineConfig, on_death: Callable[[str], None]
    ) -> ProcessEngineClient:
        return ProcessEngineClient(
            engine,
            files,
            profiles=profile_folders(cache_dir_of(config.server.data_dir)),
            log_level=config.server.log_level,
            restart=config.server.on_engine_death == "restart",
            is_rank=is_rank,
            replica=number,
            on_final_death=on_death,
            first=first if number is None else None,
        )

    if config.server.cluster is not None:
        return ClusterReplicas(config, connect_cluster(config.server.cluster), on_final_death)
    if is_elastic(config.server):
        return local_elastic_replicas(config, make, on_final_death)
    if config.server.replicas == 1:
        return make(None, config.engine, on_final_death)
    return LocalReplicas(config, make, on_final_death)


def _state(
    config: ServerConfig,
    files: ModelFiles,
    engine: EngineClient,
    tokenizer: Tokenizer,
    generator: TextGenerator,
    ids: IdGenerator,
    store: Store,
    accounts: TenantAccounts,
) -> ServerState:
    clock = SystemClock()
    metrics = ServerMetrics(clock)
    state = ServerState(
        engine=engine,
        tokenizer=tokenizer,
        chat_format=ChatFormat(tokenizer, config.tool_format, config.reasoning_format),
        generator=generator,
        model_name=config.served_model_name or files.name,
        created=int(clock.unix_time()),
        config=config,
        clock=clock,
        ids=ids,
        metrics=metrics,
        replicas=engine if isinstance(engine, RouterClient) else None,
        accounts=accounts,
        threads=FairThreads(accounts),
        grammars=grammar_checker(files, engine.info, accounts, metrics)
        if os.name == "posix"
        else None,
    )
    return with_sessions(with_jobs(state, store))


def grammar_checker(
    files: ModelFiles, info: EngineInfo, accounts: TenantAccounts, metrics: ServerMetrics
) -> GrammarChecker:
    """For the grammars of requests to an engine that has loaded `files`."""
    on_hung = partial(metrics.worker_hung, "grammars")
    return GrammarChecker(files.folder, info.vocab_size, info.eos_token_ids, accounts, on_hung)


def with_sessions(state: ServerState) -> ServerState:
    """The state with a SessionService."""
    config = state.config
    service = SessionService(
        state.generator,
        state.engine,
        state.tokenizer,
        state.clock,
        state.ids,
        SessionSettings(
            ttl_s=config.session_ttl,
            max_sessions=config.max_sessions,
            max_calls=config.session_max_calls,
        ),
        router=state.replicas,
        threads=state.threads,
        transforms=_transforms(state) if os.name == "posix" else None,
        accounts=state.accounts,
        chat=state.chat_format,
    )
    return dataclasses.replace(state, sessions=service)


def _transforms(state: ServerState) -> TransformProcesses:
    on_hung = partial(state.metrics.worker_hung, "transforms")
    return TransformProcesses(state.accounts, on_hung=on_hung)


def most_queued(info: EngineInfo, config: ServerConfig) -> int:
    """Requests of a class that may wait in the queues of as many replicas as there may be. info: of
    the replicas that the server begins with."""
    _, most = replica_bounds(config)
    return info.max_queue // config.replicas * most


def with_jobs(state: ServerState, store: Store) -> ServerState:
    """The state with files, batches and responses, and what runs them."""
    rows = RowRunner(state)
    runner = BatchRunner(
        store.batches,
        store.files,
        EngineRowHandler(rows),
        state.engine.stats,
        state.clock,
        state.ids,
        RunnerSettings(
            model=state.model_name,
            group_prefixes=state.config.batch_order == "prefix",
            max_rows=max(1, most_queued(state.engine.info, state.config) // 2),
            lease_s=state.config.batch_lease,
        ),
        state.accounts.limits,
        state.accounts.server_limits,
        state.accounts.note_refusal,
    )
    if isinstance(state.engine, ElasticReplicas):
        state.engine.set_backlog(runner.backlog)
    running = RunningResponses()
    handler = EngineResponseHandler(rows, store.responses, running, state.accounts.count_tokens)
    jobs = Jobs(
        files=store.files,
        batches=store.batches,
        responses=store.responses,
        runner=runner,
        background=BackgroundRunner(runner.context, store.responses, handler),
        running=running,
        threads=_store_threads(state, "store"),
        readers=_store_threads(state, "store-reads"),
    )
    return dataclasses.replace(state, jobs=jobs)


def _store_threads(state: ServerState, name: str) -> FairGate:
    return FairGate(
        STORE_THREADS, STORE_THREADS_PER_TENANT, state.accounts, limited=False, name=name
    )


_STORE_END_S = 5.0
"""For so long a server that stops waits for what its requests still do in the store, to close it
after that."""


@contextlib.asynccontextmanager
async def _running(
    state: ServerState, collector: Collector | None = None, tenants: LiveTenants | None = None
) -> AsyncIterator[None]:
    """Run the tasks of batches and sessions during the block.

    collector: of a server: makes its full collections while no user waits, and its event loop is
        watched. None: without clients nothing depends on when the loop runs.
    tenants: of a server.
    """
    assert state.jobs is not None and state.sessions is not None

    async def is_idle() -> bool:
        try:
            stats = await state.engine.stats()
        except EngineDeadError:
            return True
        real_time = stats.by_class.get(ServiceClass.RT)
        return real_time is None or not (real_time.running or real_time.waiting)

    tasks = [
        asyncio.create_task(state.jobs.run(), name="batches"),
        asyncio.create_task(state.sessions.run(), name="sessions"),
    ]
    if tenants is not None:
        tasks.append(asyncio.create_task(tenants.run(), name="API keys"))
    if collector is not None:
        watch = LagWatch(state.clock, state.metrics.loop_lag)
        tasks.append(asyncio.create_task(watch.run(), name="loop lag"))
        tasks.append(asyncio.create_task(collector.run(is_idle), name="garbage collector"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gates = state.jobs.threads, state.jobs.readers
        await asyncio.gather(*(gate.end(_STORE_END_S) for gate in gates))
        if state.grammars is not None:
            state.grammars.close()


_SMALL_CONTEXT = 256
"""Contexts of fewer tokens get a warning: a chat template and a question take about 40, and clients
that set no limit expect some sentences as an answer."""


def small_context(info: EngineInfo, config: EngineConfig) -> str | None:
    """A warning if few requests fit the context; None if it is large enough or cannot be larger."""
    length = info.max_model_len
    if length >= _SMALL_CONTEXT or info.whole_prompts:
        return None
    if config.max_model_len is not None and config.max_model_len <= length:
        change = "give --max-model-len more, or leave it out"
    elif info.num_kv_blocks * info.block_size < length + info.block_size:
        given = "--kv-blocks" if config.kv_blocks is not None else "--kv-memory"
        change = f"give {given} more"
    else:
        return None
    return (
        f"prompts and answers may have only {length} tokens together, so most requests will be "
        f"refused or cut short; {change}"
    )


def _banner(url: str, state: ServerState, config: EngineConfig) -> str:
    info = state.engine.info
    rows, tokens = config.step_bounds(info.device)
    shown_url = url.replace("//0.0.0.0:", "//localhost:").replace("//[::]:", "//localhost:")
    question = {"role": "user", "content": "What is the capital of France?"}
    path, body = "chat/completions", {"messages": [question], "temperature": 0}
    if not info.generates:
        scores = info.embedding is not None and info.embedding.scores
        path, body = "embeddings", {"input": "Rivers of France"}
        if scores:
            path, body = "rerank", {"query": "Rivers", "documents": ["The Loire", "A cat"]}
    has_keys = state.config.api_key or state.config.api_keys
    key = " -H 'Authorization: Bearer YOUR_KEY'" if has_keys else ""
    kv_tokens = info.num_kv_blocks * info.block_size
    kv = "" if info.whole_prompts else f"; KV cache {kv_tokens} tokens in {info.kv_dtype}"
    ranks = f", {info.tp} ranks" if info.tp > 1 else ""
    if state.replicas is not None:
        ranks += f"; {describe_replicas(state.config)}, router {state.config.router}"
    return (
        f"\n  bros is ready at {shown_url}\n"
        f"  model    {state.model_name} ({info.weights} weights, {info.kernels} kernels{ranks})\n"
        f"  context  {info.max_model_len} tokens{kv}\n"
        f"  policy   {info.policy}; up to {rows} requests and {tokens} tokens in one step\n\n"
        f"  curl {shown_url}/v1/{path} -H 'Content-Type: application/json'{key} \\\n"
        f"    -d '{json.dumps(body)}'\n"
    )


_OTHER_POSTGRES = re.compile(r"^postgres(ql)?:|\b(host|hostaddr|dbname|user|password|service)\s*=")
"""Other ways in which PostgreSQL's programs name a database; bros would take them for a folder."""


def _open_store(config: ServerConfig) -> Store:
    folder = _store_folder(config)
    given = config.store or ""
    if "://" not in given and _OTHER_POSTGRES.search(given):
        raise ConfigError("--store: give a folder, or a URL such as postgresql://user@host/name")
    if config.store is None or "://" in config.store:
        return open_store(folder, config.store)
    return open_store(folder, option="--store")


def _store_folder(config: ServerConfig) -> Path:
    """The folder of the store's files."""
    if config.store is not None and "://" not in config.store:
        return expand_user(config.store)
    return expand_user(config.data_dir) if config.data_dir else default_data_dir()


def _print(line: str) -> None:
    print(line, flush=True)


class LocalChat:
    """Chat completions from an engine in this process."""

    def __init__(self, tokenizer: Tokenizer, generator: TextGenerator) -> None:
        self._tokenizer = tokenizer
        self._generator = generator

    async def stream(self, messages: Sequence[Mapping[str, Any]]) -> AsyncIterator[str]:
        """Yield the answer in pieces; closing the iterator aborts the request.

        Raises InvalidRequestError, for example if the conversation is too long.
        """
        prompt = self._tokenizer.apply_chat_template(messages)
        async with await self._generator.start([prompt], CHAT_SAMPLING) as generation:
            async for delta in generation:
                if delta.text:
                    yield delta.text


def served_name(config: Config) -> str:
    """The model's name in the API. Raises ModelError."""
    files = resolve_model(config.engine.model, cache_dir_of(config.server.data_dir), report=_print)
    return config.server.served_model_name or files.name


@contextlib.asynccontextmanager
async def local_jobs(config: Config, store: Store) -> AsyncIterator[ServerState]:
    """Run the batches of a store without a server; the engine is closed at the end of the block.

    Raises ConfigError or ModelError if the model cannot be loaded.
    """
    from bros.transport.local import open_local  # imports torch, which the server must not load

    # There is one engine, whatever the options of a server say.
    server = dataclasses.replace(config.server, replicas=1, min_replicas=None, max_replicas=None)
    async with open_local(config.engine, cache_dir_of(config.server.data_dir), _print) as local:
        state = _state(
            server,
            local.files,
            local.client,
            local.tokenizer,
            local.generator,
            local.ids,
            store,
            Tenants({}).accounts(server, max_queue=local.client.info.max_queue),
        )
        async with _running(state):
            yield state


@contextlib.asynccontextmanager
async def local_chat(config: Config) -> AsyncIterator[LocalChat]:
    """A chat without a server; the engine is closed at the end of the block.

    Raises ConfigError or ModelError if the model cannot be loaded.
    """
    from bros.transport.local import open_local  # imports torch, which the server must not load

    async with open_local(config.engine, cache_dir_of(config.server.data_dir), _print) as local:
        yield LocalChat(local.tokenizer, local.generator)
