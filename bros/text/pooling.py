"""Embeddings and scores of texts: many requests to an engine, of which a few are open at a time.

inputs    a b c d e f g h ...
open        [ c d e ]          at most `window`: more would fill the queue of the engine
results   a b                  by index
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bros.core.clock import Clock
from bros.core.errors import (
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
)
from bros.core.interfaces import EmbeddingInfo, EngineClient, RequestStream
from bros.core.request import (
    EngineRequest,
    FinishReason,
    IdGenerator,
    Output,
    PooledTokens,
    Pooling,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    check_token_ids,
    expanded,
)
from bros.core.tenants import REQUESTS, TenantAccounts
from bros.text.generation import failure_of, numbered

Vector = NDArray[np.float32]

_NO_SLO = Slo()
_NO_TOKENS = SamplingParams(max_tokens=0)

_WINDOW = 96
"""Texts of a call that are open at once: about three steps of a CPU."""


class PoolingFailedError(BrosError):
    """The engine ended a request without its result."""


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One text, or a pair of texts.

    second_from: where the second text begins; None if there is one text.
    """

    token_ids: Sequence[int]
    second_from: int | None = None


@dataclass(frozen=True, slots=True)
class PooledResult:
    """values: the embedding as the model has it, or one score.
    cached_tokens: see RequestOutput.
    """

    values: Vector
    cached_tokens: int


class PoolingObserver:
    """Observes the requests of a call. This one does nothing."""

    def accepted(self, index: int, service_class: ServiceClass) -> None:
        """The engine serves a request as this class."""

    def ended(self, index: int, reason: FinishReason) -> None:
        """A request has ended. Not called if the call is cancelled or another request fails."""


class TextPooler:
    """Computes embeddings and scores with one engine. One per server."""

    def __init__(
        self,
        engine: EngineClient,
        clock: Clock,
        ids: IdGenerator,
        accounts: TenantAccounts | None = None,
    ) -> None:
        """accounts: count the open requests of each tenant; None: there are no limits."""
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._accounts = accounts or TenantAccounts()

    async def run(
        self,
        inputs: Sequence[PoolingInput],
        pooling: Pooling,
        *,
        request_id: str | None = None,
        service_class: ServiceClass = ServiceClass.RT,
        slo: Slo = _NO_SLO,
        tenant: str = "",
        user: str = "",
        cache_salt: str = "",
        param: str = "input",
        arrival_s: float | None = None,
        observer: PoolingObserver | None = None,
    ) -> list[PooledResult]:
        """The results of all inputs, in their order. If one fails or the call is cancelled, all
        others are aborted.

        request_id: base of the engine's request ids, see `numbered`. None: a new one.
        param: the request field that an error about a text names.
        arrival_s: time from which objectives count, on this pooler's clock; None: now.

        Raises TenantLimitError, what EngineClient.submit raises, OverloadedError if a request was
        dropped for lack of capacity, and PoolingFailedError if one failed.
        """
        self._check_all(inputs, pooling, param)
        names = numbered(request_id or self._ids.new("embd"), len(inputs))
        requests = [
            EngineRequest(
                request_id=name,
                prompt_token_ids=each.token_ids,
                sampling=_NO_TOKENS,
                service_class=service_class,
                slo=slo,
                arrival_s=self._clock.now() if arrival_s is None else arrival_s,
                tenant=tenant,
                user=user,
                max_traces=self._accounts.limits(tenant).traces,
                cache_salt=cache_salt,
                pooling=pooling,
                second_from=each.second_from,
            )
            for name, each in zip(names, inputs, strict=True)
        ]
        window = max(1, min(len(requests), _WINDOW, self._engine.info.max_queue // 2))
        limit = self._accounts.limits(tenant).of(REQUESTS[service_class])
        if limit is not None:
            window = max(1, min(window, limit // 2))
        results: list[PooledResult | None] = [None] * len(requests)
        waiting = iter(enumerate(requests))
        watching = observer or PoolingObserver()
        accepted = 0

        async def work() -> None:
            nonlocal accepted
            for index, request in waiting:
                stream = await self._engine.submit(request)
                accepted += 1
                results[index] = await self._result(index, request, stream, watching)

        tokens = sum(len(each.token_ids) for each in inputs)
        with self._accounts.hold(tenant, REQUESTS[service_class], window):
            self._accounts.begin_request(tenant, tokens)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(window):
                        group.create_task(work())
            except BaseException as error:
                if not accepted:
                    self._accounts.undo_request(tenant, tokens)
                if isinstance(error, BaseExceptionGroup):
                    raise _first(error) from None
                raise
        return [result for result in results if result is not None]

    async def _result(
        self, index: int, request: EngineRequest, stream: RequestStream, observer: PoolingObserver
    ) -> PooledResult:
        observer.accepted(index, stream.service_class)
        pieces: list[PooledTokens] = []
        ended: asyncio.Future[RequestOutput] = asyncio.get_running_loop().create_future()

        def put(item: Output | EngineDeadError) -> None:
            if ended.done():
                return
            if isinstance(item, EngineDeadError):
                ended.set_exception(item)
                return
            output = expanded(item)
            pieces.extend(output.pooled)
            if output.finish_reason is not None:
                ended.set_result(output)

        stream.connect(put)
        try:
            output = await ended
        except asyncio.CancelledError:
            await asyncio.shield(self._engine.abort(request.request_id))
            raise
        reason = output.finish_reason
        assert reason is not None
        observer.ended(index, reason)
        if reason.complete:
            return PooledResult(_joined(pieces), output.cached_tokens)
        raise failure_of(output, PoolingFailedError)

    def check(self, text: PoolingInput, param: str) -> None:
        """Raises InvalidRequestError or PromptTooLongError, naming `param`, for an input that the
        model does not take."""
        info = self._engine.info
        if len(text.token_ids) > info.max_model_len:
            raise PromptTooLongError(
                len(text.token_ids), info.max_model_len, param, generates=False
            )
        if text.token_ids:
            check_token_ids(param, text.token_ids, info.vocab_size)

    def _check_all(self, inputs: Sequence[PoolingInput], pooling: Pooling, param: str) -> None:
        info = self._engine.info
        if pooling not in info.poolings:
            raise InvalidRequestError(
                "This model computes no scores." if pooling is Pooling.SCORE
                else "This model computes no embeddings.",
                param="model",
                code="model_not_supported",
            )  # fmt: skip
        for each in inputs:
            self.check(each, param)


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure that a client can do something about."""
    found = list(_flat(failures))
    return next((each for each in found if isinstance(each, BrosError)), found[0])


def _flat(failures: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for each in failures.exceptions:
        if isinstance(each, BaseExceptionGroup):
            yield from _flat(each)
        else:
            yield each


def _joined(pieces: Sequence[PooledTokens]) -> Vector:
    """The mean of all positions of a request; of one position itself."""
    if len(pieces) == 1 and pieces[0].count == 1:
        return np.frombuffer(pieces[0].values, np.float32)
    total = sum(np.frombuffer(piece.values, np.float32).astype(np.float64) for piece in pieces)
    count = sum(piece.count for piece in pieces)
    mean: Vector = np.asarray(total / count, np.float32)
    return mean


def embedding_of(values: Vector, info: EmbeddingInfo, dimensions: int | None = None) -> Vector:
    """The embedding that a client gets. dimensions: see `check_dimensions`; None: all."""
    vector = values[:dimensions].astype(np.float64)
    if info.normalized:
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    found: Vector = vector.astype(np.float32)
    return found


def check_dimensions(dimensions: int | None, info: EmbeddingInfo) -> None:
    """Raises InvalidRequestError if embeddings of the model cannot be cut to `dimensions`."""
    if dimensions is None or dimensions == info.size:
        return
    allowed = info.dimensions
    if allowed is None:
        raise InvalidRequestError(
            f"The embeddings of this model have {info.size} numbers and cannot be cut: it was not "
            "trained for that. Leave 'dimensions' out.",
            param="dimensions",
            code="unsupported_parameter",
        )
    if not 1 <= dimensions <= info.size or (allowed and dimensions not in allowed):
        choice = f"one of {', '.join(map(str, allowed))}" if allowed else f"from 1 to {info.size}"
        raise InvalidRequestError(
            f"'dimensions' must be {choice} for this model, got {dimensions}.",
            param="dimensions",
            code="invalid_value",
        )


def cosine(one: Vector, other: Vector) -> float:
    """The cosine of the angle between two embeddings, from -1 to 1; 0 if one of them is 0."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    found = float(np.dot(a, b)) / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-12)
    return float(np.clip(found, -1.0, 1.0))  # rounding may take it a little beyond


Pairs = Sequence[tuple[str, str]]


def distinct_texts(pairs: Pairs) -> list[str]:
    """Every text once: a query that is compared with many documents is embedded once."""
    return list(dict.fromkeys(text for pair in pairs for text in pair))


def pair_scores(pairs: Pairs, results: Sequence[PooledResult], info: EmbeddingInfo) -> list[float]:
    """How relevant the second text of each pair is to the first, by the model's score head, or as
    the cosine of their embeddings.

    results: with a score head, of the pairs; else of `distinct_texts`.
    """
    if info.scores:
        return [probability(float(result.values[0])) for result in results]
    texts = distinct_texts(pairs)
    vectors = {text: each.values for text, each in zip(texts, results, strict=True)}
    return [cosine(vectors[first], vectors[second]) for first, second in pairs]


def probability(score: float) -> float:
    """The sigmoid of the number of a score head: how relevant the second text is to the first."""
    return float(1.0 / (1.0 + np.exp(-np.float64(score))))
