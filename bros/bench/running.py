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

from bros.bench.client import AiohttpTransport, Client, Now, Outcome, Record, Render, described
from bros.bench.dialects import Endpoint, RequestFormat, dialect_of
from bros.bench.load import PREPARE_AHEAD_S, LoadResult, OfferedLoad, OnProgress, drive
from bros.bench.metrics import ClassMetrics, RunMetrics, Window, measure, measure_tenants
from bros.bench.plan import BenchTenants, Planned
from bros.bench.planning import Case, Plan, RequestedLoad, make_plan, text_seed
from bros.bench.prompts import Prompts
from bros.bench.results import Command, ScenarioResult, ServerSample
from bros.core.clock import Clock, process_cpu_s
from bros.core.errors import BrosError, ConfigError
from bros.core.machine import available_cores
from bros.core.request import ServiceClass
from bros.text.tokenizer import Tokenizer

# ---- Best-effort load as a batch job instead of requests in flight (--be-as batch).
#
# The server decides how many rows run at a time and in which order. The client polls the row
# counts and the usage of the batch once a second and interpolates between the samples:
#
#  tokens ^            ______ usage of the batch
#         |       ____/
#         |   ___/   throughput = (usage at the end of the window - at its start) / its length
#         |__/   |   |
#         +------[---]--------> s


MAX_ROWS = 50_000
_ROWS_PER_S = 16
"""The batch has enough rows for this throughput; one that ends before the run is an error."""

_MIN_ROWS = 500
_BATCH_POLL_S = 1.0
_TIMEOUT_S = 120.0
_NO_ROW_ENDED = "no row of the batch ended in the measured time; tokens count when their row ends"
_RUNNING = ("validating", "in_progress")
_OPEN = (*_RUNNING, "cancelling", "finalizing")
_FIELDS_NOT_IN_ROWS = ("stream", "stream_options", "service_tier", "slo", "priority")


class BatchJobError(BrosError):
    """The server refused the batch, or the batch ended before the run."""


class BatchSample(NamedTuple):
    """Cumulative rows and tokens of the batch.

    at_s: seconds after the start of the run.
    """

    at_s: float
    completed: float
    failed: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class BatchSamples:
    """The samples of a batch during a run, in order of time."""

    samples: tuple[BatchSample, ...]

    def within(self, window: Window) -> BatchSample:
        """The increase over the window; at_s is its length."""
        begin, end = self._at(window.start_s), self._at(window.end_s)
        return BatchSample(*(late - early for early, late in zip(begin, end, strict=True)))

    def _at(self, at_s: float) -> BatchSample:
        """Linearly interpolated."""
        before = max((x for x in self.samples if x.at_s <= at_s), default=self.samples[0])
        after = min((x for x in self.samples if x.at_s >= at_s), default=self.samples[-1])
        span_s = after.at_s - before.at_s
        part = (at_s - before.at_s) / span_s if span_s > 0 else 0.0
        between = (a + part * (b - a) for a, b in zip(before[1:], after[1:], strict=True))
        return BatchSample(at_s, *between)


class BatchJob:
    """One batch on one server during a run."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, batch_id: str) -> None:
        self._session = session
        self._base = base_url
        self.id = batch_id
        self._samples: list[BatchSample] = []

    @property
    def samples(self) -> BatchSamples:
        return BatchSamples(tuple(self._samples))

    async def watch(self, now: Callable[[], float]) -> None:
        """Sample until cancelled. now: returns the seconds since the start of the run."""
        while True:
            await self.sample(now)
            await asyncio.sleep(_BATCH_POLL_S)

    async def sample(self, now: Callable[[], float]) -> None:
        """Raises BatchJobError if the batch has ended."""
        batch = await _request_json(self._session, "GET", f"{self._base}/v1/batches/{self.id}")
        if batch["status"] not in _RUNNING:
            raise BatchJobError(f"the batch is {batch['status']} before the run is over")
        counts, usage = batch["request_counts"], _usage_of(batch)
        self._samples.append(
            BatchSample(
                now(),
                counts["completed"],
                counts["failed"],
                usage["input_tokens"],
                usage["output_tokens"],
                (usage.get("input_tokens_details") or {}).get("cached_tokens", 0),
            )
        )

    async def cancel(self) -> Mapping[str, Any]:
        """Cancel the batch unless it has ended, and wait until no row is running; returns it."""
        url = f"{self._base}/v1/batches/{self.id}"
        while (batch := await _request_json(self._session, "GET", url))["status"] in _OPEN:
            if batch["status"] in _RUNNING:
                with contextlib.suppress(BatchJobError):  # it may have just ended
                    await _request_json(self._session, "POST", f"{url}/cancel")
            await asyncio.sleep(_BATCH_POLL_S / 5)
        return batch  # type: ignore[no-any-return]

    async def end(self) -> None:
        """Cancel the batch, and delete its files, which a server would keep for weeks."""
        batch = await self.cancel()
        for name in ("input_file_id", "output_file_id", "error_file_id"):
            if batch.get(name):
                await _delete_file(self._session, self._base, batch[name])


def batch_input_lines(
    backlog: Iterator[Planned],
    body: Callable[[Planned], bytes],
    path: str,
    duration_s: float,
) -> Iterator[bytes]:
    """The lines of an input file with enough rows for a run."""
    count = min(max(_MIN_ROWS, round(_ROWS_PER_S * duration_s)), MAX_ROWS)
    for planned in islice(backlog, count):
        fields = json.loads(body(planned))
        for name in _FIELDS_NOT_IN_ROWS:
            fields.pop(name, None)
        row = {"custom_id": planned.name, "method": "POST", "url": path, "body": fields}
        yield json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n"


@asynccontextmanager
async def batch_job(
    base_url: str, api_key: str | None, path: str, lines: Sequence[bytes]
) -> AsyncIterator[BatchJob]:
    """Submit a batch and wait until it is validated; leaving the block cancels it, and deletes its
    files.

    Raises BatchJobError.
    """
    base = base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"".join(lines), filename="load.jsonl")
        file = await _request_json(session, "POST", f"{base}/v1/files", data=form)
        wanted = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        try:
            batch = await _request_json(session, "POST", f"{base}/v1/batches", json=wanted)
        except BatchJobError:
            await _delete_file(session, base, file["id"])
            raise
        job = BatchJob(session, base, batch["id"])
        try:
            while batch["status"] == "validating":
                await asyncio.sleep(_BATCH_POLL_S / 5)
                batch = await _request_json(session, "GET", f"{base}/v1/batches/{job.id}")
            if batch["status"] == "failed":
                raise BatchJobError(f"the batch is {batch['status']}: {batch['errors']}")
            _usage_of(batch)
            yield job
        finally:
            await job.end()


def batch_metrics(
    seen: BatchSamples, num_rows: int, window: Window, like: ClassMetrics
) -> ClassMetrics:
    """Metrics with the counts and the throughput of a batch of `num_rows`, of which those count as
    requests that have ended in the window. like: metrics without requests.
    """
    added = seen.within(window)
    completed, failed = round(added.completed), round(added.failed)
    outcomes = {**like.outcomes, Outcome.COMPLETED: completed, Outcome.FAILED: failed}
    return replace(
        like,
        requests=completed + failed,
        outside=num_rows - completed - failed,
        outcomes=outcomes,
        reasons={"rows in the error file": failed} if failed else {},
        requests_per_s=added.completed / window.seconds,
        prompt_tokens_per_s=added.prompt_tokens / window.seconds,
        output_tokens_per_s=added.output_tokens / window.seconds,
        prompt_tokens=round(added.prompt_tokens),
        output_tokens=round(added.output_tokens),
        cached_tokens=round(added.cached_tokens),
    )


def _usage_of(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raises BatchJobError if there is none while the batch runs: then nothing can be measured."""
    usage: Mapping[str, Any] | None = batch.get("usage")
    if usage is None:
        raise BatchJobError(
            "the server's batches have no `usage` while they run, which --be-as batch measures; "
            "use --be-as requests"
        )
    return usage


async def _delete_file(session: aiohttp.ClientSession, base_url: str, file_id: str) -> None:
    """Delete a file if that is possible: what was measured counts all the same."""
    with contextlib.suppress(BatchJobError):
        await _request_json(session, "DELETE", f"{base_url}/v1/files/{file_id}")


async def _request_json(session: aiohttp.ClientSession, method: str, url: str, **body: Any) -> Any:
    try:
        async with session.request(method, url, **body) as response:
            text = await response.text()
            if response.status >= 400:
                raise BatchJobError(f"{url} answers with status {response.status}: {text[:300]}")
            return json.loads(text)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BatchJobError(f"{url} does not respond: {described(error)}") from error
    except ValueError as error:
        raise BatchJobError(f"{url} answers without JSON: {text[:300]!r}") from error


# ---- The Prometheus metrics of a bros server that are sampled during a run.


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
    'bros_stream_slowdown_sum{class="rt"}': "slowdown_sum",
    'bros_stream_slowdown_count{class="rt"}': "streams",
    "bros_batch_size": "batch_size",
    "bros_safety_factor": "safety_factor",
    "bros_rare_factor": "rare_factor",
    "bros_engine_steps_total": "steps",
    "bros_engine_step_seconds_total": "step_seconds",
    "bros_engine_step_predicted_seconds_total": "predicted_seconds",
    "bros_engine_steps_aborted_total": "aborted_steps",
    "bros_engine_steps_suspended_total": "suspended_steps",
    "bros_be_added_seconds_total": "be_added_seconds",
}
"""Prometheus sample -> short name."""

_GAUGES = ("rt_running", "be_running", "rt_waiting", "be_waiting", "batch_size", "rt_kv", "be_kv")
_LINE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """Short name -> value of the metrics in SAMPLED, from a Prometheus page."""
    found = {}
    for name, value in _LINE.findall(text):
        short = SAMPLED.get(name)
        if short is not None:
            found[short] = float(value)
    return found


def is_idle(sample: Mapping[str, float]) -> bool:
    """Whether the server has no requests; False if the sample lacks the metrics."""
    names = [f"{cls}_{state}" for cls in ("rt", "be") for state in ("running", "waiting")]
    return all(sample.get(name, 1.0) == 0.0 for name in names)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """A sample of the timeline: the gauges of `after`, and what happened since `before`.

    busy_s: time spent in steps.
    step_ms, slack_ms: mean step time and mean slack of tokens, if there were any.
    streams, slowdown_sum: finished real-time streams, and the sum of their slowdowns.
    """
    found = {name: after[name] for name in _GAUGES if name in after}
    if "step_seconds" in after and "step_seconds" in before:
        found["busy_s"] = after["step_seconds"] - before["step_seconds"]
    if "streams" in after and "streams" in before:
        found |= {name: after[name] - before[name] for name in ("streams", "slowdown_sum")}
    ratios = (("step_ms", "step_seconds", "steps"), ("slack_ms", "slack_sum_s", "slack_count"))
    for name, total, count in ratios:
        events = after.get(count, 0.0) - before.get(count, 0.0)
        if events > 0:
            found[name] = 1e3 * (after.get(total, 0.0) - before.get(total, 0.0)) / events
    return found


# ---- Requests to the server besides the load: its model, version and metrics.


_PROBE_TIMEOUT_S = 10.0
_POLL_S = 0.2


class NoServerError(BrosError):
    """No server with OpenAI's API responds at the address."""


class Model(NamedTuple):
    """context_tokens: maximum of prompt and output together; None if the server does not say."""

    name: str
    context_tokens: int | None


class Probe:
    """Asks one server for its state. An asynchronous context manager."""

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
        """The model named `wanted`, or the first one. Raises NoServerError.

        A server with an empty list may load models on demand: it is assumed to have `wanted`.
        """
        status, text = await self._get("/v1/models")
        if status != 200:
            raise NoServerError(f"{self._base}/v1/models answers with status {status}")
        try:
            models = [_model(entry) for entry in json.loads(text)["data"]]
        except (ValueError, KeyError, TypeError):
            raise NoServerError(f"{self._base}/v1/models is not a list of models") from None
        for model in models:
            if wanted is None or model.name == wanted:
                return model
        if wanted is not None and not models:
            return Model(wanted, None)
        names = ", ".join(model.name for model in models) or "nothing"
        asked = "any model" if wanted is None else repr(wanted)
        raise NoServerError(f"{self._base} does not serve {asked}; it serves {names}")

    async def version(self) -> str | None:
        """The version at `/version`, as bros and vLLM report it; None if there is none."""
        try:
            status, text = await self._get("/version")
            version = json.loads(text)["version"] if status == 200 else None
        except (NoServerError, ValueError, KeyError, TypeError):
            return None
        return version if isinstance(version, str) else None

    async def metrics(self) -> dict[str, float]:
        """The metrics in SAMPLED; empty if the server has none or does not respond."""
        try:
            status, text = await self._get("/metrics")
        except NoServerError:
            return {}
        return parse_metrics(text) if status == 200 else {}

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until the server is idle; False if unknown or after timeout_s."""
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
            message = f"{self._base} does not answer: {described(error)}"
            raise NoServerError(message) from None


def _model(entry: dict[str, Any]) -> Model:
    context = entry.get("max_model_len")
    return Model(str(entry["id"]), context if isinstance(context, int) else None)


_SETTLE_S = 60.0
"""How long the runner waits for the requests of the previous run to finish."""

_SAMPLE_S = 1.0
_PROGRESS_S = 1.0
_DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchTarget:
    """A running server.

    name: unique in a comparison.
    policy: of bros' scheduler or for the report; None if unknown.
    model: name in requests; None: the first one that the server has.
    """

    url: str
    name: str
    dialect: str
    policy: str | None = None
    model: str | None = None
    api_key: str | None = None
    tenants: BenchTenants | None = None


class BeAs(StrEnum):
    """How best-effort load is sent: as requests in flight, or as rows of a batch."""

    REQUESTS = "requests"
    BATCH = "batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How runs are made and measured.

    command: holds the objectives.
    warm_up_s: start of the run that is not measured.
    context: maximum tokens of prompt and output; None: ask the server.
    ignore_eos: see RequestFormat.
    """

    command: Command
    warm_up_s: float
    endpoint: Endpoint = Endpoint.COMPLETIONS
    context: int | None = None
    ignore_eos: bool = False
    be_as: BeAs = BeAs.REQUESTS


class MeasuredRun(NamedTuple):
    """The outcome of a case."""

    result: ScenarioResult
    records: Sequence[Record]
    window: Window


View = Callable[[str], AbstractContextManager[OnProgress]]
"""Opens a progress display with a title."""


class BenchRunner:
    """Runs cases on one target."""

    def __init__(
        self,
        target: BenchTarget,
        wanted: RequestedLoad,
        options: RunOptions,
        tokenizer: Tokenizer,
        clock: Clock,
        view: View,
    ) -> None:
        self._target = target
        self._wanted = wanted
        self._options = options
        self._tokenizer = tokenizer
        self._clock = clock
        self._view = view
        self._prompts = Prompts(tokenizer, wanted.seed)
        # Tokens that the server adds to a prompt also count toward the context.
        chat = options.endpoint is Endpoint.CHAT
        self._added_tokens = self._prompts.added_tokens(chat=chat)

    async def run(self, case: Case) -> MeasuredRun:
        """Raises NoServerError if the server does not respond at first; ConfigError."""
        target, options = self._target, self._options
        async with (
            Probe(target.url, self._clock, target.api_key) as probe,
            AiohttpTransport() as http,
        ):
            model = await probe.model(target.model)
            version = await probe.version()
            plan = self._plan(case, options.context or model.context_tokens)
            request_format = RequestFormat(
                dialect=dialect_of(target.dialect),
                model=model.name,
                endpoint=options.endpoint,
                classes=case.sends_classes,
                ignore_eos=options.ignore_eos,
                seed=self._wanted.seed,
            )
            render = self._render(plan, text_seed(self._wanted.seed, case))
            client = Client(
                http,
                target.url,
                request_format,
                render,
                api_key=target.api_key,
                tenants=target.tenants,
            )
            await probe.wait_idle(_SETTLE_S)
            samples = None
            if plan.in_flight and options.be_as is BeAs.BATCH:
                longest_s = self._wanted.duration_s + self._wanted.drain_s
                lines = list(_rows(plan, request_format, render, longest_s))
                async with batch_job(target.url, target.api_key, request_format.path, lines) as job:
                    driven, timeline = await self._drive(case, plan, client, probe, job)
                    samples = job.samples
            else:
                driven, timeline = await self._drive(case, plan, client, probe)
        window = Window(options.warm_up_s, self._wanted.duration_s, driven.elapsed_s)
        result = self._result(case, plan, driven, window)
        if samples is not None:
            metrics = _with_batch_metrics(result.metrics, samples, len(lines))
            notes = (*result.notes, *batch_notes(metrics.by_class[ServiceClass.BE]))
            load = f"{result.be_load}, as a batch"
            result = replace(result, metrics=metrics, be_load=load, notes=notes)
        result = replace(result, server_version=version, timeline=timeline)
        return MeasuredRun(result, driven.records, window)

    def _plan(self, case: Case, context: int | None) -> Plan:
        usable = (context or _DEFAULT_CONTEXT) - self._added_tokens
        plan = make_plan(self._wanted, case, usable, self._tokenizer)
        if not plan.sessions and not plan.in_flight:
            why = "; ".join(plan.notes) or "neither a rate nor requests in flight"
            raise ConfigError(f"there is nothing to send: {why}")
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
            drain_s=self._wanted.drain_s,
            sessions=plan.sessions,
            backlog=plan.backlog,
            in_flight=0 if job is not None else plan.in_flight,
        )
        samples: list[ServerSample] = []
        start_s = self._clock.now() + PREPARE_AHEAD_S

        def since_start() -> float:
            return self._clock.now() - start_s

        sampling = asyncio.create_task(_sample(probe, samples, since_start))
        watching = asyncio.create_task(job.watch(since_start)) if job is not None else None
        try:
            with self._view(_run_title(self._target, case)) as on_progress:
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
                await job.sample(since_start)
        finally:
            await _cancel_tasks(sampling, watching)
        return driven, tuple(samples)

    def _result(self, case: Case, plan: Plan, driven: LoadResult, window: Window) -> ScenarioResult:
        slo, tenants = self._options.command.slo, self._target.tenants
        return ScenarioResult(
            command=self._options.command,
            scenario=case.scenario,
            target=self._target.name,
            dialect=self._target.dialect,
            policy=self._target.policy,
            rt_rate=plan.rate,
            rt_load=plan.rt_label,
            be_load=plan.be_label,
            rt_digest=plan.rt_digest,
            be_digest=plan.be_digest,
            metrics=measure(driven.records, slo, window),
            client=driven.health,
            notes=plan.notes,
            tenants=()
            if tenants is None
            else measure_tenants(driven.records, slo, window, tenants),
        )


async def _sample(probe: Probe, samples: list[ServerSample], now: Now) -> None:
    """Sample the server's metrics once a second, if it has any."""
    before = await probe.metrics()
    while before:
        await asyncio.sleep(_SAMPLE_S)
        after = await probe.metrics()
        if after:
            samples.append(ServerSample(now(), difference(before, after)))
            before = after


def _rows(
    plan: Plan, request_format: RequestFormat, render: Render, duration_s: float
) -> Iterator[bytes]:
    def body(planned: Planned) -> bytes:
        return request_format.body(planned, *render(planned))

    return batch_input_lines(plan.backlog, body, request_format.path, duration_s)


def batch_notes(batch: ClassMetrics) -> tuple[str, ...]:
    """Why the metrics of a batch are 0. Rows that have failed have ended, too."""
    return () if batch.requests or batch.tokens_per_s else (_NO_ROW_ENDED,)


def _with_batch_metrics(metrics: RunMetrics, samples: BatchSamples, num_rows: int) -> RunMetrics:
    alone = metrics.by_class[ServiceClass.BE]
    batch = batch_metrics(samples, num_rows, metrics.window, alone)
    return replace(metrics, by_class={**metrics.by_class, ServiceClass.BE: batch})


async def _cancel_tasks(*tasks: asyncio.Task[None] | None) -> None:
    for task in filter(None, tasks):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, BatchJobError):
            await task


def _run_title(target: BenchTarget, case: Case) -> str:
    policy = f" {target.policy}" if target.policy else ""
    rate = f", {case.rate:g} req/s" if case.rate is not None else ""
    return f"{target.name}{policy}: {case.scenario} {case.scenario.label}{rate}"
