"""A whole server around a scripted engine: everything is real but the model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import random
import ssl
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import httpx
import tokenizers
from starlette.applications import Starlette
from tokenizers import decoders, models, pre_tokenizers

from bros.batch.store import Store
from bros.core.clock import ManualClock
from bros.core.config import ServerConfig
from bros.core.errors import EngineDeadError, QueueFullError
from bros.core.fair import FairThreads
from bros.core.interfaces import EmbeddingInfo, EngineInfo, EngineStats, RequestTrace
from bros.core.request import (
    EngineRequest,
    FinishReason,
    IdGenerator,
    PooledTokens,
    Pooling,
    RequestOutput,
    ServiceClass,
    Slo,
    TokenLogprobs,
)
from bros.engine.client import OutputStream
from bros.scheduler.admission import Limits
from bros.server.app import create_app
from bros.server.build import with_jobs, with_sessions
from bros.server.limits import server_limits
from bros.server.operations.metrics import ServerMetrics
from bros.server.serve import HttpServer, bind
from bros.server.state import ServerState
from bros.server.tenants import LiveTenants, load_tenants, public_prefixes
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator
from bros.text.grammar_check import GrammarChecker
from bros.text.tokenizer import ChatTemplates, Tokenizer
from support.played_stream import PlayedStream

EOS_TEXT = "<|im_end|>"
CHATML = (
    "{% if silent %}{% else %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% endif %}"
)
MAX_MODEL_LEN = 500
NO_TOKENS: Mapping[str, bool] = MappingProxyType({})
JSON = {"content-type": "application/json"}


def make_tokenizer(template: str = CHATML, added: Mapping[str, bool] = NO_TOKENS) -> Tokenizer:
    """One token per byte, and the tokens of ChatML. added: further tokens -> whether special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", EOS_TEXT])
    for text, is_special in added.items():
        backend.add_tokens([tokenizers.AddedToken(text, special=is_special, normalized=False)])
    special = {"eos_token": EOS_TEXT}
    return Tokenizer(backend, special, ChatTemplates({"default": template}, special, ManualClock()))


EMBEDDING_SIZE = 8


class ScriptedEngine:
    """An EngineClient that answers with a text, token by token, and EOS.

    Tests set: `text`; `texts`, of one request after the other; `script`, tokens instead; `refusal`,
    raised on submission; `refuses`, the end of ids that find the queue full; `hold_after`, tokens
    after which a request waits for `go_on`; `die_after`, tokens after which the engine dies of
    `death`; `fail_after`, after which requests whose id ends with `fails` end with an error, one
    that may be tried again after `retry_after_s` if that is not None, or whose cause is the field
    `to_blame` if that is not None; `relegates`, the end of ids that are served as best-effort;
    `step_s`, by which each token moves the clock; `pause_s`, real seconds after each token;
    `cached_tokens`; `figures`, its statistics; `traces` by request id; `alive`; `num_lost`,
    `num_hung`.
    ended: ids of what was answered in full.
    """

    def __init__(self, tokenizer: Tokenizer, clock: ManualClock) -> None:
        self.tokenizer = tokenizer
        self.clock = clock
        self.texts: Sequence[str] = ()
        self.script: Sequence[int] = ()
        self.step_s = 0.0
        self.pause_s = 0.0
        self.text = "Hello world"
        self.refusal: Exception | None = None
        self.refuses: str | None = None
        self.hold_after: int | None = None
        self.die_after: int | None = None
        self.death: Exception = EngineDeadError("The engine died.")
        self.fail_after: int | None = None
        self.fails = ""
        self.retry_after_s: float | None = None
        self.to_blame: str | None = None
        self.relegates: str | None = None
        self.figures = EngineStats()
        self.traces: dict[str, RequestTrace] = {}
        self.cached_tokens = 0
        self.alive = True
        self.num_lost = self.num_hung = 0
        self.hung = False
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []
        self.promoted: list[tuple[str, Slo]] = []
        self.released: list[str] = []
        self._streams: dict[str, PlayedStream] = {}
        self.holding = asyncio.Event()
        self.go_on = asyncio.Event()
        self.abort_seen = asyncio.Event()
        assert tokenizer.eos_token_id is not None
        self.eos = tokenizer.eos_token_id
        self.info = EngineInfo(
            model="org/scripted",
            weights="fp32",
            kernels="reference",
            kv_dtype="fp32",
            device="none",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            block_size=16,
            num_kv_blocks=100,
            policy="fcfs",
            eos_token_ids=(self.eos,),
            embedding=EmbeddingInfo(pooling=Pooling.MEAN, normalized=True, size=EMBEDDING_SIZE),
        )
        self._limits = Limits(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            max_num_seqs=8,
            max_queue=8,
        )

    def set_context(self, max_model_len: int) -> None:
        """Before the first request."""
        self.info = dataclasses.replace(self.info, max_model_len=max_model_len)
        self._limits = dataclasses.replace(self._limits, max_model_len=max_model_len)

    async def submit(self, request: EngineRequest) -> OutputStream:
        if not self.alive:
            raise EngineDeadError("The engine is not running.")
        self._limits.check(request)
        if self.refusal is not None:
            raise self.refusal
        if self.refuses is not None and request.request_id.endswith(self.refuses):
            raise QueueFullError(5, 1.0)
        self.submitted.append(request)
        relegated = self.relegates is not None and request.request_id.endswith(self.relegates)
        service_class = ServiceClass.BE if relegated else request.service_class
        stream = PlayedStream(service_class, self._run(request))
        self._streams[request.request_id] = stream
        return stream

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.abort_seen.set()
        if request_id in self._streams:
            self._streams[request_id].stop()

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        self.promoted.append((request_id, slo))

    async def release(self, request_id: str) -> None:
        self.released.append(request_id)

    async def stats(self) -> EngineStats:
        if not self.alive:
            raise EngineDeadError("The engine is not running.")
        return self.figures

    async def trace(self, request_id: str) -> RequestTrace | None:
        if not self.alive:
            raise EngineDeadError("The engine is not running.")
        return self.traces.get(request_id)

    async def close(self) -> None:
        pass

    async def _run(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        if request.pooling is not None:
            await self._misbehave(0)
            yield self._embedding(request)
            self.ended.append(request.request_id)
            return
        turn = next(i for i, each in enumerate(self.submitted) if each is request)
        text = self.texts[turn % len(self.texts)] if self.texts else self.text
        script = self.script or [*self.tokenizer.encode(text), self.eos]
        limit = request.sampling.max_tokens or self.info.max_model_len
        for count, token_id in enumerate(script[:limit], start=1):
            await self._misbehave(count - 1)
            if count - 1 == self.fail_after and request.request_id.endswith(self.fails):
                yield RequestOutput(
                    request_id=request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error="The numbers overflowed.",
                    retry_after_s=self.retry_after_s,
                    param=self.to_blame,
                )
                return
            yield self._output(request, count, token_id, limit)
            await asyncio.sleep(self.pause_s)
        self.ended.append(request.request_id)

    @staticmethod
    def _embedding(request: EngineRequest) -> RequestOutput:
        """Numbers that depend on the text: how many of its tokens leave which remainder."""
        ids = request.prompt_token_ids
        counts = [sum(i % EMBEDDING_SIZE == r for i in ids) for r in range(EMBEDDING_SIZE)]
        values = array("f", map(float, counts)).tobytes()
        return RequestOutput(
            request_id=request.request_id,
            pooled=(PooledTokens(len(ids), len(ids), values),),
            finish_reason=FinishReason.LENGTH,
        )

    async def _misbehave(self, produced: int) -> None:
        self.clock.advance(self.step_s)
        if produced == self.hold_after:
            self.holding.set()
            await self.go_on.wait()
        if produced == self.die_after:
            raise self.death

    def _output(
        self, request: EngineRequest, count: int, token_id: int, limit: int
    ) -> RequestOutput:
        finish = None
        if token_id == self.eos:
            finish = FinishReason.STOP
        elif count == limit:
            finish = FinishReason.LENGTH
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.logprobs is not None:
            best = ((token_id, -0.5), (token_id ^ 1, -1.5))
            logprobs = (TokenLogprobs(token_id, -0.5, best[: request.sampling.logprobs]),)
        return RequestOutput(
            request_id=request.request_id,
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=finish,
            cached_tokens=self.cached_tokens,
        )


class HeldBody:
    """The body of a request whose client has sent the beginning when `begun` is set, and sends the
    end after `go_on` is."""

    def __init__(self, begin: bytes, end: bytes) -> None:
        self._begin, self._end = begin, end
        self.begun, self.go_on = asyncio.Event(), asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._begin
        self.begun.set()
        await self.go_on.wait()
        yield self._end


class Server:
    """An app, what is behind it, and a client that talks to it in this process.

    jobs_in: where it keeps files and batches; it has none without. seed: of its ids, which must
    differ from those of others with the same store. template, tokens: of the tokenizer.
    """

    def __init__(
        self,
        *,
        jobs_in: Store | None = None,
        engine: type[ScriptedEngine] = ScriptedEngine,
        clock: ManualClock | None = None,
        seed: int = 0,
        template: str = CHATML,
        tokens: Mapping[str, bool] = NO_TOKENS,
        max_model_len: int | None = None,
        grammars: GrammarChecker | None = None,
        **config: Any,
    ) -> None:
        self.clock = clock or ManualClock()
        self.tokenizer = make_tokenizer(template, tokens)
        self.engine = engine(self.tokenizer, self.clock)
        if max_model_len is not None:
            self.engine.set_context(max_model_len)
        ids = IdGenerator(random.Random(seed))
        options = ServerConfig(**config)
        self.tenants = LiveTenants(
            load_tenants(options),
            options,
            max_queue=self.engine.info.max_queue,
            server_limits=server_limits(options, memory_bytes=2**34, disk_bytes=2**40),
            clock=self.clock,
        )
        self.accounts = self.tenants.accounts
        state = ServerState(
            engine=self.engine,
            tokenizer=self.tokenizer,
            chat_format=ChatFormat(self.tokenizer, options.tool_format, options.reasoning_format),
            generator=TextGenerator(
                self.engine,
                self.tokenizer,
                self.clock,
                ids,
                self.accounts,
                public_prefixes(options, self.tokenizer),
            ),
            model_name="scripted",
            created=1_700_000_000,
            config=options,
            clock=self.clock,
            ids=ids,
            metrics=ServerMetrics(self.clock),
            threads=FairThreads(self.accounts),
            accounts=self.accounts,
            grammars=grammars,
        )
        state = with_sessions(state)
        self.state = state if jobs_in is None else with_jobs(state, jobs_in)
        self.app: Starlette = create_app(self.state, self.tenants)
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "scripted", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "scripted", "prompt": "Hi", "max_tokens": 100, **fields}
        return await self.http.post("/v1/completions", json=body)

    def last(self) -> EngineRequest:
        """The request the engine was given last."""
        return self.engine.submitted[-1]


@contextlib.asynccontextmanager
async def live_server(
    *, tls: ssl.SSLContext | None = None, **options: Any
) -> AsyncIterator[LiveServer]:
    """A Server on a real socket, in this event loop. options: of Server."""
    server = Server(**{"drain_timeout": 0.1, **options})
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    http = HttpServer(
        server.app,
        bind("127.0.0.1", 0),
        on_listening=listening.set_result,
        tls=tls,
    )
    running = asyncio.create_task(http.run())
    try:
        yield LiveServer(server, http, await listening, running)
    finally:
        http.stop()
        await running
        await server.http.aclose()


@dataclass(frozen=True, slots=True)
class LiveServer:
    """`running` ends when the server has shut down."""

    server: Server
    http: HttpServer
    url: str
    running: asyncio.Task[None]

    def client(self, **options: Any) -> httpx.AsyncClient:
        """A client that waits for as long as other tests may keep the cores busy.

        options: of httpx.AsyncClient.
        """
        return httpx.AsyncClient(**{"base_url": self.url, "timeout": 60.0, **options})


def events(text: str) -> list[str]:
    """The data of each server-sent event."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def chunks(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream that ends as it should."""
    data = events(text)
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def assert_envelope(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response that must have `status` and all four keys."""
    assert response.status_code == status, response.text
    body = response.json()
    if response.url.path.startswith("/v1/messages"):  # Anthropic's
        assert body.pop("type") == "error"
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error
