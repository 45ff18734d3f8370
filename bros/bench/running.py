"""Runs cases on one server, one after the other, and measures them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple, Self

import aiohttp

from bros.bench.client import AiohttpHttp, Client, Outcome, Record, Render
from bros.bench.dialects import Endpoint, Wording, dialect_of
from bros.bench.load import PREPARE_AHEAD_S, LoadResult, OfferedLoad, OnProgress, drive
from bros.bench.metrics import ClassMetrics, RunMetrics, Window, measure
from bros.bench.plan import Planned
from bros.bench.planning import Case, Plan, RequestedLoad, make_plan, text_seed
from bros.bench.prompts import Prompts
from bros.bench.results import Command, ScenarioResult, ServerSample
from bros.core.clock import Clock, process_cpu_s
from bros.core.errors import BrosError, ConfigError
from bros.core.request import ServiceClass
from bros.scheduler.profiles import available_cores
from bros.text.tokenizer import Tokenizer

# ---- Best-effort work as a batch job instead of requests that are kept in flight.
#
# The server decides how many rows run at a time, and in which order. From outside only sums are
# seen:
# the counts and the usage of the batch, asked for once a second.
#
# ```
#  tokens ^            ______ what the batch had used, at each look
#         |       ____/
#         |   ___/   throughput = (at the end of the window - at its beginning) / its length
#         |__/   |   |
#         +------[---]--------> s
# ```


MAX_ROWS = 50_000
_ROWS_PER_S = 16
"""Rows for so much throughput are submitted; a batch that ends before the run is an error."""

_LEAST_ROWS = 500
_LOOK_S = 1.0
_TIMEOUT_S = 120.0
_RUNNING = ("validating", "in_progress")
_OPEN = (*_RUNNING, "cancelling", "finalizing")
_NOT_FOR_ROWS = ("stream", "stream_options", "service_tier", "slo", "priority")


class BatchJobError(BrosError):
    """The server does not take the batch, or the batch came to an end before the run did."""


class Look(NamedTuple):
    """The batch at a time after the start of the run. Rows and tokens add up."""

    at_s: float
    completed: float
    failed: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class JobSums:
    """What was seen of a batch in a run, in order."""

    looks: tuple[Look, ...]

    def within(self, window: Window) -> Look:
        """What was added in the window; at_s is its length."""
        begin, end = self._at(window.start_s), self._at(window.end_s)
        return Look(*(late - early for early, late in zip(begin, end, strict=True)))

    def _at(self, at_s: float) -> Look:
        """On the line between the looks before and after."""
        before = max((x for x in self.looks if x.at_s <= at_s), default=self.looks[0])
        after = min((x for x in self.looks if x.at_s >= at_s), default=self.looks[-1])
        span_s = after.at_s - before.at_s
        part = (at_s - before.at_s) / span_s if span_s > 0 else 0.0
        between = (a + part * (b - a) for a, b in zip(before[1:], after[1:], strict=True))
        return Look(at_s, *between)


class BatchJob:
    """One batch on one server, while a run lasts."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, batch_id: str) -> None:
        self._session = session
        self._base = base_url
        self.id = batch_id
        self._looks: list[Look] = []

    @property
    def sums(self) -> JobSums:
        return JobSums(tuple(self._looks))

    async def watch(self, now: Callable[[], float]) -> None:
        """Until cancelled. now: seconds since the start of the run."""
        while True:
            await self.look(now)
            await asyncio.sleep(_LOOK_S)

    async def look(self, now: Callable[[], float]) -> None:
        """Raises BatchJobError if the batch has ended."""
        batch = await _ask(self._session, "GET", f"{self._base}/v1/batches/{self.id}")
        if batch["status"] not in _RUNNING:
            raise BatchJobError(f"the batch is {batch['status']} before the run is over")
        counts, usage = batch["request_counts"], batch["usage"]
        self._looks.append(
            Look(
                now(),
                counts["completed"],
                counts["failed"],
                usage["input_tokens"],
                usage["output_tokens"],
                usage["input_tokens_details"]["cached_tokens"],
            )
        )

    async def cancel(self) -> None:
        """Returns when nothing of it runs any more, which may be so already."""
        url = f"{self._base}/v1/batches/{self.id}"
        while (batch := await _ask(self._session, "GET", url))["status"] in _OPEN:
            if batch["status"] in _RUNNING:
                with contextlib.suppress(BatchJobError):  # it has ended just now
                    await _ask(self._session, "POST", f"{url}/cancel")
            await asyncio.sleep(_LOOK_S / 5)


def rows_of(
    backlog: Iterator[Planned], body: Callable[[Planned], bytes], path: str, duration_s: float
) -> Iterator[bytes]:
    """Lines of an input file, enough for a run."""
    count = min(max(_LEAST_ROWS, round(_ROWS_PER_S * duration_s)), MAX_ROWS)
    for planned in islice(backlog, count):
        fields = json.loads(body(planned))
        for name in _NOT_FOR_ROWS:
            fields.pop(name, None)
        row = {"custom_id": planned.name, "method": "POST", "url": path, "body": fields}
        yield json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n"


@asynccontextmanager
async def batch_job(
    base_url: str, api_key: str | None, path: str, lines: Sequence[bytes]
) -> AsyncIterator[BatchJob]:
    """A batch of these lines that has been checked and runs; it is cancelled with the block.

    Raises BatchJobError.
    """
    base = base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"".join(lines), filename="load.jsonl")
        file = await _ask(session, "POST", f"{base}/v1/files", data=form)
        wanted = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        batch = await _ask(session, "POST", f"{base}/v1/batches", json=wanted)
        job = BatchJob(session, base, batch["id"])
        try:
            while batch["status"] == "validating":
                await asyncio.sleep(_LOOK_S / 5)
                batch = await _ask(session, "GET", f"{base}/v1/batches/{job.id}")
            if batch["status"] == "failed":
                raise BatchJobError(f"the batch is {batch['status']}: {batch['errors']}")
            yield job
        finally:
            await job.cancel()


def as_metrics(seen: JobSums, window: Window, like: ClassMetrics) -> ClassMetrics:
    """Throughput of a batch in the place of that of requests. like: that of no requests."""
    added = seen.within(window)
    completed, failed = round(added.completed), round(added.failed)
    outcomes = {**like.outcomes, Outcome.COMPLETED: completed, Outcome.FAILED: failed}
    return replace(
        like,
        requests=completed + failed,
        outcomes=outcomes,
        reasons={"rows in the error file": failed} if failed else {},
        requests_per_s=added.completed / window.seconds,
        prompt_tokens_per_s=added.prompt_tokens / window.seconds,
        output_tokens_per_s=added.output_tokens / window.seconds,
        prompt_tokens=round(added.prompt_tokens),
        output_tokens=round(added.output_tokens),
        cached_tokens=round(added.cached_tokens),
    )


async def _ask(session: aiohttp.ClientSession, method: str, url: str, **body: Any) -> Any:
    try:
        async with session.request(method, url, **body) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise BatchJobError(f"{url} answers with status {answer.status}: {text[:300]}")
            return json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BatchJobError(f"{url} gives no answer: {error!r}") from error


# ---- What a bros server says about itself: a few of its metrics, sampled while it is measured.


SAMPLED = {
    'bros_requests_running{class="rt"}': "rt_running",
    'bros_requests_running{class="be"}': "be_running",
    'bros_requests_waiting{class="rt"}': "rt_waiting",
    'bros_requests_waiting{class="be"}': "be_waiting",
    'bros_kv_usage_ratio{class="rt"}': "rt_kv",
    'bros_kv_usage_ratio{class="be"}': "be_kv",
    'bros_preemptions_total{class="rt"}': "rt_preemptions",
    'bros_preemptions_total{class="be"}': "be_preemptions",
    'bros_token_slack_seconds_sum{class="rt"}': "slack_sum_s",
    'bros_token_slack_seconds_count{class="rt"}': "slack_count",
    "bros_batch_size": "batch_size",
    "bros_safety_factor": "safety_factor",
    "bros_engine_steps_total": "steps",
    "bros_engine_step_seconds_total": "step_seconds",
    "bros_engine_step_predicted_seconds_total": "predicted_seconds",
    "bros_engine_steps_abandoned_total": "abandoned_steps",
    "bros_be_tax_seconds_total": "be_tax_seconds",
}
"""Prometheus sample -> short name."""

_GAUGES = ("rt_running", "be_running", "rt_waiting", "be_waiting", "batch_size", "rt_kv", "be_kv")
_LINE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """Those of SAMPLED that a page of metrics has, by their short names."""
    found = {}
    for name, value in _LINE.findall(text):
        short = SAMPLED.get(name)
        if short is not None:
            found[short] = float(value)
    return found


def is_idle(sample: Mapping[str, float]) -> bool:
    """Whether the server has nothing to do; a sample without these figures says nothing."""
    names = [f"{cls}_{state}" for cls in ("rt", "be") for state in ("running", "waiting")]
    return all(sample.get(name, 1.0) == 0.0 for name in names)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """A sample for a timeline: gauges as they are, and means of what happened in between.

    busy_s: time that went into steps. step_ms: mean time of a step; slack_ms: mean time that
    tokens had left; both only if there was one.
    """
    found = {name: after[name] for name in _GAUGES if name in after}
    if "step_seconds" in after and "step_seconds" in before:
        found["busy_s"] = after["step_seconds"] - before["step_seconds"]
    ratios = (("step_ms", "step_seconds", "steps"), ("slack_ms", "slack_sum_s", "slack_count"))
    for name, total, count in ratios:
        events = after.get(count, 0.0) - before.get(count, 0.0)
        if events > 0:
            found[name] = 1e3 * (after.get(total, 0.0) - before.get(total, 0.0)) / events
    return found


# ---- Questions to a server besides the load: what it serves, how it is, whether it is idle.


_PROBE_TIMEOUT_S = 10.0
_POLL_S = 0.2


class NoServerError(BrosError):
    """Nothing that speaks OpenAI's API answers at the address."""


class Model(NamedTuple):
    """context_tokens: most tokens of prompt and answer; None if the server does not say."""

    name: str
    context_tokens: int | None


class Probe:
    """One server. An asynchronous context manager; usable inside it."""

    def __init__(self, base_url: str, clock: Clock, api_key: str | None = None) -> None:
        self._base = base_url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(total=_PROBE_TIMEOUT_S)
        self._session = aiohttp.ClientSession(timeout=timeout, headers=self._headers)
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def model(self, wanted: str | None = None) -> Model:
        """The model that is called `wanted`, or the first one. Raises NoServerError.

        A server with an empty list (one that loads models when they are asked for) is believed
        to have the wanted one.
        """
        status, text = await self._get("/v1/models")
        if status != 200:
            raise NoServerError(f"{self._base}/v1/models answers with status {status}")
        try:
            models = [_model(entry) for entry in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError):
            raise NoServerError(f"{self._base}/v1/models is no list of models") from None
        for model in models:
            if wanted is None or model.name == wanted:
                return model
        if wanted is not None and not models:
            return Model(wanted, None)
        names = ", ".join(model.name for model in models) or "nothing"
        asked = "any model" if wanted is None else repr(wanted)
        raise NoServerError(f"{self._base} does not serve {asked}; it serves {names}")

    async def version(self) -> str | None:
        """What `/version` says, as bros and vLLM have it; None where that is not known."""
        try:
            status, text = await self._get("/version")
            version = json.loads(text)["version"] if status == 200 else None
        except (NoServerError, ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) else None

    async def metrics(self) -> dict[str, float]:
        """Those of scrape.SAMPLED that it has; empty if it has none or does not answer."""
        try:
            status, text = await self._get("/metrics")
        except NoServerError:
            return {}
        return parse_metrics(text) if status == 200 else {}

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until it has nothing left to do; False if it cannot be told, or is not in time."""
        end_s = self._clock.now() + timeout_s
        while self._clock.now() < end_s:
            sample = await self.metrics()
            if not sample:
                return False
            if is_idle(sample):
                return True
            await asyncio.sleep(_POLL_S)
        return False

    async def _get(self, path: str) -> tuple[int, str]:
        assert self._session is not None, "not entered"
        try:
            async with self._session.get(self._base + path) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise NoServerError(f"{self._base} does not answer: {reason}") from None


def _model(entry: dict[str, Any]) -> Model:
    context = entry.get("max_model_len")
    return Model(str(entry["id"]), context if isinstance(context, int) else None)


_SETTLE_S = 60.0
"""How long a server may take to finish what was left of the run before."""

_SAMPLE_S = 1.0
_PROGRESS_S = 1.0
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """A running server.

    name: for people, unlike those of other servers compared with it.
    """

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
    """How runs are measured.

    command: says by which objectives.
    warm_up_s: not counted.

    context: most tokens of prompt and answer; None asks the server.
    be_as: how best-effort work gets to the server.
    """

    command: Command
    warm_up_s: float
    endpoint: Endpoint = Endpoint.COMPLETIONS
    context: int | None = None
    ignore_eos: bool = False
    be_as: BeAs = BeAs.REQUESTS


class MeasuredRun(NamedTuple):
    """What came of a case.

    notes: about its plan, for people.
    """

    result: ScenarioResult
    records: Sequence[Record]
    window: Window
    notes: Sequence[str]


View = Callable[[str], AbstractContextManager[OnProgress]]
"""A way to watch a run: a title in, something to be told out."""


class BenchRunner:
    """Runs cases on one target."""

    def __init__(
        self,
        target: BenchTarget,
        wanted: RequestedLoad,
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
        self._prompts = Prompts(tokenizer, wanted.seed)
        # Those around a prompt, which the context has to hold as well.
        chat = measuring.endpoint is Endpoint.CHAT
        self._added_tokens = self._prompts.added_tokens(chat=chat)

    async def run(self, case: Case) -> MeasuredRun:
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
        return MeasuredRun(result, driven.records, window, plan.notes)

    def _plan(self, case: Case, context: int | None) -> Plan:
        usable = (context or _DEFAULT_CONTEXT) - self._added_tokens
        plan = make_plan(self._wanted, case, usable, self._tokenizer)
        if not plan.sessions and not plan.in_flight:
            raise ConfigError("there is nothing to send: neither a rate nor requests in flight")
        return plan

    def _render(self, plan: Plan, seed: int) -> Render:
        prompts = self._prompts.reseeded(seed, plan.texts)

        def render(planned: Planned) -> tuple[Sequence[int], str]:
            prompt = prompts.render(planned.prompt)
            return prompt.token_ids, prompt.text

        return render

    async def _drive(
        self, case: Case, plan: Plan, client: Client, probe: Probe, job: BatchJob | None = None
    ) -> tuple[LoadResult, tuple[ServerSample, ...]]:
        load = OfferedLoad(
            duration_s=self._wanted.duration_s,
            sessions=plan.sessions,
            backlog=plan.backlog,
            in_flight=0 if job is not None else plan.in_flight,
        )
        samples: list[ServerSample] = []
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

    async def _sample(self, probe: Probe, samples: list[ServerSample]) -> None:
        """The server's own figures once a second, if it is one that has them."""
        start_s = self._clock.now()
        before = await probe.metrics()
        while before:
            await asyncio.sleep(_SAMPLE_S)
            after = await probe.metrics()
            if after:
                samples.append(ServerSample(self._clock.now() - start_s, difference(before, after)))
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


def _title(target: BenchTarget, case: Case) -> str:
    policy = f" {target.policy}" if target.policy else ""
    rate = f", {case.rate:g} req/s" if case.rate is not None else ""
    return f"{target.name}{policy}: {case.scenario} {case.scenario.label}{rate}"


@contextlib.contextmanager
def unseen(title: str) -> Iterator[OnProgress]:
    """A View that shows nothing."""
    yield lambda elapsed_s, records: None
