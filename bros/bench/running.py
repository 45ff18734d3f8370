"""Runs cases on one server, one after the other, and measures them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from bros.bench.batch_job import (
    BatchJob,
    BatchJobError,
    JobSums,
    as_metrics,
    batch_job,
    rows_of,
)
from bros.bench.cases import Case
from bros.bench.client import Client, Render
from bros.bench.dialects import Endpoint, Wording, dialect_of
from bros.bench.http import AiohttpHttp
from bros.bench.load import PREPARE_AHEAD_S, Load, LoadResult, OnProgress, drive
from bros.bench.metrics import RunMetrics, Window, measure
from bros.bench.plan import Planned
from bros.bench.planning import Plan, Wanted, make_plan, text_seed
from bros.bench.probe import Probe
from bros.bench.prompts import Prompts
from bros.bench.records import Record
from bros.bench.results import Command, Sample, ScenarioResult
from bros.bench.scrape import difference
from bros.core.clock import Clock, process_cpu_s
from bros.core.errors import ConfigError
from bros.core.request import ServiceClass
from bros.engine.tokenizer import Tokenizer
from bros.scheduler.profiles import available_cores

_SETTLE_S = 60.0
"""How long a server may take to finish what was left of the run before."""

_SAMPLE_S = 1.0
_PROGRESS_S = 1.0
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A running server. name: for people, unlike those of other servers compared with it."""

    url: str
    name: str
    dialect: str
    policy: str | None = None
    model: str | None = None
    api_key: str | None = None


class BeAs(StrEnum):
    """Best-effort work: requests that are kept in flight, or the rows of a batch."""

    REQUESTS = "requests"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """How runs are measured. command: says by which objectives. warm_up_s: not counted.

    context: most tokens of prompt and answer; None asks the server. be_as: how best-effort work
    gets to the server.
    """

    command: Command
    warm_up_s: float
    endpoint: Endpoint = Endpoint.COMPLETIONS
    context: int | None = None
    ignore_eos: bool = False
    be_as: BeAs = BeAs.REQUESTS


class Run(NamedTuple):
    """What came of a case. notes: about its plan, for people."""

    result: ScenarioResult
    records: Sequence[Record]
    window: Window
    notes: Sequence[str]


View = Callable[[str], AbstractContextManager[OnProgress]]
"""A way to watch a run: a title in, something to be told out."""


class Runner:
    """Runs cases on one target."""

    def __init__(
        self,
        target: Target,
        wanted: Wanted,
        measuring: Measuring,
        tokenizer: Tokenizer,
        clock: Clock,
        view: View,
    ) -> None:
        self._target = target
        self._wanted = wanted
        self._measuring = measuring
        self._tokenizer = tokenizer
        self._clock = clock
        self._view = view
        # Of the tokens around a prompt, which the context has to hold as well.
        chat = measuring.endpoint is Endpoint.CHAT
        self._added_tokens = Prompts(tokenizer, wanted.seed).added_tokens(chat=chat)

    async def run(self, case: Case) -> Run:
        """Raises NoServerError if the server does not answer when the run begins, ConfigError."""
        target, measuring = self._target, self._measuring
        async with Probe(target.url, self._clock, target.api_key) as probe, AiohttpHttp() as http:
            model = await probe.model(target.model)
            version = await probe.version()
            plan = self._plan(case, measuring.context or model.context_tokens)
            wording = Wording(
                dialect=dialect_of(target.dialect),
                model=model.name,
                endpoint=measuring.endpoint,
                classes=case.tells_classes,
                ignore_eos=measuring.ignore_eos,
                seed=self._wanted.seed,
            )
            render = self._render(plan, text_seed(self._wanted.seed, case))
            client = Client(http, target.url, wording, render, api_key=target.api_key)
            await probe.wait_idle(_SETTLE_S)
            sums = None
            if plan.in_flight and measuring.be_as is BeAs.BATCH:
                lines = list(_rows(plan, wording, render, self._wanted.duration_s))
                async with batch_job(target.url, target.api_key, wording.path, lines) as job:
                    driven, timeline = await self._drive(case, plan, client, probe, job)
                    sums = job.sums
            else:
                driven, timeline = await self._drive(case, plan, client, probe)
        window = Window(measuring.warm_up_s, self._wanted.duration_s, driven.elapsed_s)
        result = self._result(case, plan, driven, window)
        if sums is not None:
            metrics = _with_batch(result.metrics, sums)
            result = replace(result, metrics=metrics, be_load=f"{result.be_load}, as a batch")
        result = replace(result, server_version=version, timeline=timeline)
        return Run(result, driven.records, window, plan.notes)

    def _plan(self, case: Case, context: int | None) -> Plan:
        usable = (context or _DEFAULT_CONTEXT) - self._added_tokens
        plan = make_plan(self._wanted, case, usable, self._tokenizer)
        if not plan.sessions and not plan.in_flight:
            raise ConfigError("there is nothing to send: neither a rate nor requests in flight")
        return plan

    def _render(self, plan: Plan, seed: int) -> Render:
        prompts = Prompts(self._tokenizer, seed, plan.texts)

        def render(planned: Planned) -> tuple[Sequence[int], str]:
            prompt = prompts.render(planned.prompt)
            return prompt.token_ids, prompt.text

        return render

    async def _drive(
        self, case: Case, plan: Plan, client: Client, probe: Probe, job: BatchJob | None = None
    ) -> tuple[LoadResult, tuple[Sample, ...]]:
        load = Load(
            duration_s=self._wanted.duration_s,
            sessions=plan.sessions,
            backlog=plan.backlog,
            in_flight=0 if job is not None else plan.in_flight,
        )
        samples: list[Sample] = []
        sampling = asyncio.create_task(self._sample(probe, samples))
        start_s = self._clock.now() + PREPARE_AHEAD_S

        def since_start() -> float:
            return self._clock.now() - start_s

        watching = asyncio.create_task(job.watch(since_start)) if job is not None else None
        try:
            with self._view(_title(self._target, case)) as on_progress:
                driven = await drive(
                    load,
                    client,
                    self._clock,
                    cpu_s=process_cpu_s,
                    cores=available_cores(),
                    on_progress=on_progress,
                    progress_s=_PROGRESS_S,
                )
            if watching is not None and job is not None:
                if watching.done():
                    watching.result()
                await job.look(since_start)
        finally:
            await _ended(sampling, watching)
        return driven, tuple(samples)

    async def _sample(self, probe: Probe, samples: list[Sample]) -> None:
        """The server's own figures once a second, if it is one that has them."""
        start_s = self._clock.now()
        before = await probe.metrics()
        while before:
            await asyncio.sleep(_SAMPLE_S)
            after = await probe.metrics()
            if after:
                samples.append(Sample(self._clock.now() - start_s, difference(before, after)))
                before = after

    def _result(self, case: Case, plan: Plan, driven: LoadResult, window: Window) -> ScenarioResult:
        return ScenarioResult(
            command=self._measuring.command,
            scenario=case.scenario,
            target=self._target.name,
            dialect=self._target.dialect,
            policy=self._target.policy,
            rt_rate=plan.rate,
            rt_load=plan.rt_label,
            be_load=plan.be_label,
            rt_digest=plan.rt_digest,
            be_digest=plan.be_digest,
            metrics=measure(driven.records, self._measuring.command.slo, window),
            client=driven.health,
        )


def _rows(plan: Plan, wording: Wording, render: Render, duration_s: float) -> Iterator[bytes]:
    def body(planned: Planned) -> bytes:
        return wording.body(planned, *render(planned))

    return rows_of(plan.backlog, body, wording.path, duration_s)


def _with_batch(metrics: RunMetrics, sums: JobSums) -> RunMetrics:
    alone = metrics.by_class[ServiceClass.BE]
    batch = as_metrics(sums, metrics.window, alone)
    return replace(metrics, by_class={**metrics.by_class, ServiceClass.BE: batch})


async def _ended(*tasks: asyncio.Task[None] | None) -> None:
    for task in filter(None, tasks):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BatchJobError):
            await task


def _title(target: Target, case: Case) -> str:
    policy = f" {target.policy}" if target.policy else ""
    rate = f", {case.rate:g} req/s" if case.rate is not None else ""
    return f"{target.name}{policy}: {case.scenario} {case.scenario.label}{rate}"


@contextlib.contextmanager
def unseen(title: str) -> Iterator[OnProgress]:
    """A View for nobody."""
    yield lambda elapsed_s, records: None
