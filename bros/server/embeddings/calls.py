"""Embeddings, scores and rerank, from HTTP or from rows of a batch: to requests of the engine, and
from their results to a response.

A score compares two texts: with the model's score head if it has one, else it is the cosine of the
two embeddings.
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic_core import to_json
from starlette.responses import Response

from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.core.interfaces import EmbeddingInfo
from bros.core.request import FinishReason, Pooling, ServiceClass, Slo
from bros.core.tenants import QuotaHold
from bros.server.embeddings.schema import (
    MAX_INPUTS,
    EmbeddingRequest,
    PoolingRequest,
    PoolingUsage,
    RerankDocument,
    RerankReply,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from bros.server.errors import GenerationFailedError
from bros.server.http import count_kept, offload_held, offload_reply, pieces_response, validate
from bros.server.openai.calls import Tier, refuse_unsupported
from bros.server.openai.stream import Observer
from bros.server.state import ServerState
from bros.text.generation import TextDelta
from bros.text.pooling import (
    PooledResult,
    PoolingFailedError,
    PoolingInput,
    PoolingObserver,
    TextPooler,
    Vector,
    check_dimensions,
    distinct_texts,
    embedding_of,
    pair_scores,
)

R = TypeVar("R", bound=PoolingRequest)

MAX_TOKENS = 300_000
"""Most tokens of all texts of a request, as in OpenAI's API."""

_CHARS_PER_ID = 4
_CHARS_PER_NUMBER = 5
"""Writing a number takes as long as tokenizing so many characters."""


class PoolingCall(ABC, Generic[R]):
    """A validated request of one endpoint.

    id_prefix: beginning of the response's id.
    param: name of the field with the texts.
    _unsupported: unsupported field that would change the result -> values without an effect.
    """

    id_prefix: str
    param: str
    _model: type[R]
    _unsupported: Mapping[str, tuple[Any, ...]] = MappingProxyType({})

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError naming the wrong field."""
        self._state = state
        self.body: R = validate(self._model, fields)
        state.check_model(self.body.model)
        refuse_unsupported(fields, self._unsupported)
        self._info = _embedding_info(state)
        if self._count() > MAX_INPUTS:
            raise InvalidRequestError(
                f"'{self.param}' may have at most {MAX_INPUTS} texts, got {self._count()}.",
                param=self.param,
                code="array_above_max_length",
            )
        self._check()

    @abstractmethod
    def _count(self) -> int:
        """Number of texts, or of pairs that are scored."""

    @abstractmethod
    def _check(self) -> None:
        """Raises InvalidRequestError for empty texts, and for what the model cannot do."""

    @property
    @abstractmethod
    def pooling(self) -> Pooling: ...

    @abstractmethod
    def texts(self) -> Sequence[str | Sequence[int]]:
        """All texts, for their lengths and for finding common prefixes."""

    @abstractmethod
    def _tokenize(self) -> list[PoolingInput]:
        """Any thread may call it."""

    async def inputs(self, tenant: str) -> list[PoolingInput]:
        """What the engine computes. tenant: whose call it is.

        Raises InvalidRequestError, or PromptTooLongError if a text is longer than the model takes.
        """
        inputs = await offload_held(self._state, tenant, self._tokenize, self.num_chars())
        total = sum(len(each.token_ids) for each in inputs)
        if total > MAX_TOKENS:
            raise InvalidRequestError(
                f"The texts have {total} tokens, more than {MAX_TOKENS}; send several requests.",
                param=self.param,
                code="max_tokens_per_request",
            )
        return inputs

    @abstractmethod
    def reply(
        self, header: Mapping[str, Any], results: Sequence[PooledResult], usage: PoolingUsage
    ) -> Iterator[bytes]:
        """The response as pieces of JSON. header: id, created, model."""

    def prompt_text(self) -> str:
        """The first text, for finding common prefixes."""
        first = self.texts()[0]
        return first if isinstance(first, str) else " ".join(map(str, first))

    def num_chars(self) -> int:
        """Length of all texts in characters; a token id counts for `_CHARS_PER_ID`."""
        return sum(
            len(text) if isinstance(text, str) else _CHARS_PER_ID * len(text)
            for text in self.texts()
        )

    def _input(self, text: str | Sequence[int], second: str | None = None) -> PoolingInput:
        """The tokens of a text, or of a pair."""
        limit = self._state.engine.info.max_model_len
        cut = self.body.truncate_prompt_tokens
        if cut is not None:
            cut = limit if cut == -1 else cut
            if not 1 <= cut <= limit:
                raise InvalidRequestError(
                    f"'truncate_prompt_tokens' must be -1 or from 1 to {limit}, got {cut}.",
                    param="truncate_prompt_tokens",
                )
        if not isinstance(text, str):
            return PoolingInput(list(text)[:cut])
        tokenizer = self._state.tokenizer
        if not self.body.allow_special_tokens:
            text = tokenizer.escape(text)
            second = None if second is None else tokenizer.escape(second)
        try:
            tokens, second_from = tokenizer.encode_texts(
                text, second, cut=cut, limit=limit, escaped=not self.body.allow_special_tokens
            )
        except PromptTooLongError as error:
            raise PromptTooLongError(
                error.prompt_tokens, limit, self.param, exact=False, generates=False
            ) from None
        return PoolingInput(tokens, second_from)


def _embedding_info(state: ServerState) -> EmbeddingInfo:
    info = state.engine.info.embedding
    if info is None:
        raise InvalidRequestError(
            "This server computes no embeddings.", param="model", code="model_not_supported"
        )
    return info


class EmbeddingCall(PoolingCall[EmbeddingRequest]):
    """POST /v1/embeddings"""

    id_prefix, param = "embd-", "input"
    _model = EmbeddingRequest

    @property
    def pooling(self) -> Pooling:
        return self._info.pooling

    def _count(self) -> int:
        return len(self.body.input)

    def _check(self) -> None:
        _check_embeds(self._state)
        check_dimensions(self.body.dimensions, self._info)
        _check_not_empty("input", self.body.input)

    def texts(self) -> Sequence[str | Sequence[int]]:
        found: list[str | Sequence[int]] = self.body.input
        return found

    def _tokenize(self) -> list[PoolingInput]:
        return [self._input(text) for text in self.body.input]

    def reply(
        self, header: Mapping[str, Any], results: Sequence[PooledResult], usage: PoolingUsage
    ) -> Iterator[bytes]:
        """An EmbeddingList. Dumping the model would hold the interpreter for long."""
        write = _base64 if self.body.encoding_format == "base64" else _floats
        head = to_json({**header, "object": "list", "usage": usage.model_dump()})[:-1]
        between = b'%b,"data":[' % head
        for index, result in enumerate(results):
            vector = embedding_of(result.values, self._info, self.body.dimensions)
            item = b'{"object":"embedding","index":%d,"embedding":%b}' % (index, write(vector))
            yield between + item
            between = b","
        yield b"]}"


def _floats(vector: Vector) -> bytes:
    return to_json(vector.tolist())


def _base64(vector: Vector) -> bytes:
    return b'"%b"' % base64.b64encode(vector.astype("<f4").tobytes())


def _check_not_empty(param: str, texts: Sequence[str | Sequence[int]]) -> None:
    """Raises InvalidRequestError naming the first empty one of the texts in a field."""
    for index, text in enumerate(texts):
        if not text:
            name = param if len(texts) == 1 else f"{param}[{index}]"
            raise InvalidRequestError(f"The text in '{name}' must not be empty.", name)


def _check_embeds(state: ServerState) -> None:
    info = state.engine.info
    if info.embedding is not None and info.embedding.pooling not in info.poolings:
        raise InvalidRequestError(
            "This model has a score head and computes no embeddings; use /v1/rerank or /v1/score.",
            param="model",
            code="model_not_supported",
        )


class PairCall(PoolingCall[R]):
    """Scores of pairs of texts: with the score head, or as the cosine of embeddings."""

    @abstractmethod
    def pairs(self) -> list[tuple[str, str]]: ...

    @property
    def pooling(self) -> Pooling:
        return Pooling.SCORE if self._info.scores else self._info.pooling

    def _count(self) -> int:
        return len(self.pairs())

    def texts(self) -> Sequence[str]:
        if self._info.scores:
            return [text for pair in self.pairs() for text in pair]
        return distinct_texts(self.pairs())

    def _tokenize(self) -> list[PoolingInput]:
        if self._info.scores:
            return [self._input(*pair) for pair in self.pairs()]
        return [self._input(text) for text in distinct_texts(self.pairs())]

    def scores(self, results: Sequence[PooledResult]) -> list[float]:
        """One per pair."""
        return pair_scores(self.pairs(), results, self._info)


class ScoreCall(PairCall[ScoreRequest]):
    """POST /v1/score"""

    id_prefix, param = "score-", "text_2"
    _model = ScoreRequest

    def _check(self) -> None:
        _check_not_empty("text_1", self.body.text_1)
        _check_not_empty("text_2", self.body.text_2)

    def pairs(self) -> list[tuple[str, str]]:
        first, second = self.body.text_1, self.body.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise InvalidRequestError(
                f"There are {len(first)} texts in 'text_1' and {len(second)} in 'text_2'; give one "
                "in 'text_1', or as many as in 'text_2'.",
                param="text_1",
            )
        return list(zip(first, second, strict=True))

    def reply(
        self, header: Mapping[str, Any], results: Sequence[PooledResult], usage: PoolingUsage
    ) -> Iterator[bytes]:
        data = [Score(index=i, score=score) for i, score in enumerate(self.scores(results))]
        yield ScoreList(**header, data=data, usage=usage).model_dump_json().encode()


class RerankCall(PairCall[RerankRequest]):
    """POST /v1/rerank"""

    id_prefix, param = "rerank-", "documents"
    _model = RerankRequest
    _unsupported = MappingProxyType({"rank_fields": (None, [], ["text"])})

    def _check(self) -> None:
        _check_not_empty("query", [self.body.query])
        _check_not_empty("documents", self.body.documents)

    def pairs(self) -> list[tuple[str, str]]:
        return [(self.body.query, document) for document in self.body.documents]

    def reply(
        self, header: Mapping[str, Any], results: Sequence[PooledResult], usage: PoolingUsage
    ) -> Iterator[bytes]:
        body, scores = self.body, self.scores(results)
        order = np.argsort(-np.array(scores), kind="stable")[: body.top_n or None].tolist()
        shown = body.return_documents is not False
        found = [
            RerankResult(
                index=index,
                document=RerankDocument(text=body.documents[index]) if shown else None,
                relevance_score=scores[index],
            )
            for index in order
        ]
        reply = RerankReply(id=header["id"], model=header["model"], results=found, usage=usage)
        yield reply.model_dump_json().encode()


AnyPoolingCall = PoolingCall[Any]

POOLING_CALLS: Mapping[str, Callable[[ServerState, Mapping[str, Any]], AnyPoolingCall]] = {
    "/v1/embeddings": EmbeddingCall,
    "/v1/score": ScoreCall,
    "/v1/rerank": RerankCall,
}
"""Path of an endpoint -> its call."""


class PoolingExchange:
    """Runs one call on the engine and builds its response, for HTTP requests and rows of batches.

    usage, cached_tokens: valid after `complete`.
    """

    def __init__(
        self,
        state: ServerState,
        call: AnyPoolingCall,
        *,
        tier: Tier,
        slo: Slo,
        tenant: str,
        arrival_s: float,
        held: QuotaHold | None = None,
    ) -> None:
        """tenant: whose call it is. arrival_s: on the state's clock; deadlines count from it.
        held: what its body counts as; None: it does not count."""
        self._state = state
        self._call = call
        self._tier = tier
        self._slo = slo
        self._tenant = tenant
        self._arrival_s = arrival_s
        self._held = held
        self._pooler = TextPooler(state.engine, state.clock, state.ids, state.accounts)
        self._id = state.ids.new(call.id_prefix, "")
        self.usage = PoolingUsage(prompt_tokens=0, total_tokens=0)
        self.cached_tokens = 0

    async def complete(self) -> bytes:
        """The response as JSON. Raises what `respond` raises."""
        results, header, size = await self._results()

        def render() -> bytes:
            return b"".join(self._call.reply(header, results, self.usage))

        return await offload_reply(self._state, self._tenant, render, size)

    async def respond(self) -> Response:
        """The response. Raises what the call's `inputs` and TextPooler.run raise, and
        GenerationFailedError. If it is cancelled, the requests are aborted."""
        results, header, size = await self._results()
        return await pieces_response(
            self._state,
            self._tenant,
            lambda: self._call.reply(header, results, self.usage),
            size,
            kept_bytes=sum(result.values.nbytes for result in results),
        )

    async def _results(self) -> tuple[Sequence[PooledResult], dict[str, Any], int]:
        """The results, the header of the response, and how long writing it takes."""
        state, call, body = self._state, self._call, self._call.body
        inputs = await call.inputs(self._tenant)
        count_kept(self._held, call.num_chars())
        state.recent.note(self._tenant, self._id, prompts=len(inputs), n=1)
        observer = _MetricsObserver(state, self._arrival_s)
        try:
            results = await self._pooler.run(
                inputs,
                call.pooling,
                request_id=self._id,
                service_class=self._tier.service_class,
                slo=self._slo,
                tenant=self._tenant,
                user=body.safety_identifier or body.user or "",
                cache_salt=body.cache_salt or "",
                param=call.param,
                arrival_s=self._arrival_s,
                observer=observer,
            )
        except PoolingFailedError as error:
            raise GenerationFailedError(str(error)) from error
        finally:
            observer.close()
        tokens = sum(len(each.token_ids) for each in inputs)
        self.usage = PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)
        self.cached_tokens = sum(result.cached_tokens for result in results)
        header = {
            "id": self._id,
            "created": int(state.clock.unix_time()),
            "model": state.model_name,
        }
        size = _CHARS_PER_NUMBER * sum(len(result.values) for result in results)
        return results, header, size


class _MetricsObserver(PoolingObserver):
    """Counts the requests of a call among those of their class."""

    def __init__(self, state: ServerState, arrival_s: float) -> None:
        self._metrics = state.metrics
        self._arrival_s = arrival_s
        self._open: dict[int, Observer] = {}

    def accepted(self, index: int, service_class: ServiceClass) -> None:
        self._open[index] = self._metrics.observer(self._arrival_s, [service_class])

    def ended(self, index: int, reason: FinishReason) -> None:
        self._open.pop(index).on_delta(TextDelta(0, "", finish_reason=reason))

    def close(self) -> None:
        """Count the others as aborted."""
        for observer in self._open.values():
            observer.close()
        self._open.clear()
