"""Offline use: `from bros import LLM`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import operator
import os
import re
import reprlib
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.errors import BrosError, ConfigError, EngineDeadError, InvalidRequestError
from bros.core.loop_thread import LoopThread
from bros.core.request import Pooling, SamplingParams, ServiceClass, check_token_ids
from bros.executor.model_store import cache_dir_of
from bros.terminal import progress_bar
from bros.text.answers import AnswerParsing
from bros.text.chat_format import ChatFormat
from bros.text.contexts import Contexts, GenerationJob, TokenContext
from bros.text.generation import ChoiceResult, Generation, collect, shifted_seed
from bros.text.pooling import (
    PoolingInput,
    TextPooler,
    check_dimensions,
    distinct_texts,
    embedding_of,
    pair_scores,
)
from bros.text.tokenizer import InnerTexts
from bros.text.tools import NO_TOOLS
from bros.transport.local import LocalEngine, open_local

Prompt = str | Iterable[int]
Message = Mapping[str, Any]
T = TypeVar("T")

_STEPS_AHEAD = 4
"""Prompts of a call that are open at once, in full steps: these stay full while the next prompts
are on their way to the engine. A million open requests would take memory and fill the queue."""

_PREPARING = 256
"""Most prompts with grammars that are being submitted, by all calls together: half of the grammars
that an engine lets wait to be compiled."""


class LLM:
    """A model for scripts and notebooks. Close it, or use it in a `with` block.

    It works in the process that made it only, not in a forked child such as a worker of a
    multiprocessing.Pool with the start method fork: there its methods raise EngineDeadError.

        with LLM() as llm:
            for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(answer[0].text)

    model: as in EngineConfig.
    data_dir: folder for converted models and profiles; default: as for `bros serve`.
    options: other fields of EngineConfig (the flags of `bros serve` with underscores). Sizes may be
        numbers of bytes.
    Raises ModelError or ConfigError if the model cannot be served with these options; with several
    ranks (tp), EngineDeadError if one of them says so while it loads.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        data_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        config = _config(model, options)
        cache_dir = cache_dir_of(data_dir)
        self._loop = LoopThread("bros-llm")
        self._exit = contextlib.AsyncExitStack()
        try:
            opening = self._exit.enter_async_context(open_local(config, cache_dir))
            self._engine: LocalEngine = self._loop.run(opening)
        except BaseException:
            self._loop.close()
            raise
        engine = self._engine
        self._chat = ChatFormat(engine.tokenizer)
        self._inner = InnerTexts(engine.tokenizer)
        self._contexts = Contexts(engine.client, engine.generator, engine.ids)
        self._window = _STEPS_AHEAD * config.step_bounds(engine.client.info.device).rows
        self._preparing = asyncio.Semaphore(_PREPARING)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        service_class: ServiceClass = ServiceClass.BE,
        progress: bool | None = None,
    ) -> list[tuple[ChoiceResult, ...]]:
        """Complete texts (or lists of token ids); returns params.n choices per prompt, in order.

        prompts: any iterable; token ids may be arrays. It is one prompt if its first item is a
            number.
        params: one for all prompts or one per prompt; None: SamplingParams(), which generates up to
            the model's context length.
        progress: show a progress bar on stderr; None: only if that is a terminal or a notebook.
        Raises InvalidRequestError or PromptTooLongError if a prompt cannot be served; the message
        begins with the prompt, such as prompts[3]. All prompts are checked before the first one
        runs, except that grammars are compiled later; then the others are aborted. A choice that
        fails in the engine does not raise: its finish_reason is "error", and `error` says why.
        """
        self._check_usable()
        tokenizer = self._engine.tokenizer

        def job(prompt: Any, sampling: SamplingParams, param: str) -> _Job:
            return _Job(_token_ids(tokenizer.encode, prompt, param), sampling)

        return self._run_all(_prompts(prompts, "prompts"), params, job, service_class, progress)

    def chat(
        self,
        messages: Iterable[Message] | Iterable[Iterable[Message]],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        service_class: ServiceClass = ServiceClass.BE,
        progress: bool | None = None,
    ) -> list[tuple[ChoiceResult, ...]]:
        """Answer one or more conversations; returns params.n choices per conversation, in order.

        messages: each is {"role": ..., "content": ...}.

        If the model thinks before it answers, this is the `reasoning` of a result, not a part of
        its `text`, and a grammar applies to the text. Otherwise as `generate`.
        """
        self._check_usable()
        inputs = _conversations(messages)
        return self._run_all(inputs, params, self._chat_job, service_class, progress)

    def context(
        self,
        beginning: Prompt | Iterable[Message] = "",
        *,
        service_class: ServiceClass = ServiceClass.BE,
    ) -> Context:
        """A token sequence to fill, generate into and fork, see Context.

        beginning: a text, a list of token ids, or messages; with messages the context ends where
            the assistant's answer begins. It is prefilled at once.
        service_class: of all work in the context and its forks.
        Raises InvalidRequestError or PromptTooLongError.
        """
        self._check_usable()
        context = Context(self, self._contexts.new(_service_class(service_class)))
        context.fill(self._encode_beginning(beginning))
        return context

    def generate_in(
        self,
        contexts: Iterable[Context],
        prompts: str | Iterable[Prompt] = "",
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> list[ChoiceResult]:
        """Continue several contexts as one batch; returns their answers in order.

        prompts: what to append before the answers: one text for all contexts, or a text or list of
            token ids for each.
        params: one for all contexts or one for each. If one for all has a seed, context i uses
            seed + i, so that forks of one context get different answers.
        Each context gets its prompt and its answer, as by Context.generate. If one job fails, the
        others are aborted and no context changes. Raises what Context.generate raises, and
        InvalidRequestError if a context occurs twice or belongs to another LLM.
        """
        self._check_usable()
        each = _items(contexts, "contexts", "a list of contexts")
        many = (
            [prompts] * len(each)
            if isinstance(prompts, str)
            else _items(prompts, "prompts", "a text or a list with a prompt for each context")
        )
        if len(many) != len(each):
            message = f"{len(many)} prompts for {len(each)} contexts; pass a text for all or"
            raise InvalidRequestError(f"{message} one prompt each.", param="prompts")
        return self._generate_in(each, _Inputs(many, "prompts", several=True), params)

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        dimensions: int | None = None,
        service_class: ServiceClass = ServiceClass.RT,
    ) -> list[list[float]]:
        """The embedding of each text, or token ids, as in /v1/embeddings.

        dimensions: of the embeddings, which are cut; only for models that are trained for it.
        Raises InvalidRequestError or PromptTooLongError, whose message begins with the text, such
        as texts[3], before any text is computed; or BrosError if a request fails.
        """
        self._check_usable()
        client, tokenizer = self._engine.client, self._engine.tokenizer
        info = client.info.embedding
        if info is None or info.pooling not in client.info.poolings:
            raise InvalidRequestError("This model computes no embeddings.", param="model")
        check_dimensions(dimensions, info)
        pooler = TextPooler(client, SystemClock(), self._engine.ids)
        texts_of, inputs = _prompts(texts, "texts"), []
        for param, text in texts_of:
            with texts_of.errors_at(param):
                inputs.append(PoolingInput(_token_ids(tokenizer.encode, text, param)))
                if not inputs[-1].token_ids:
                    raise InvalidRequestError("The text is empty.", param=param)
                pooler.check(inputs[-1], param)
        results = self._run(
            pooler.run(
                inputs, info.pooling, service_class=_service_class(service_class), param="texts"
            )
        )
        return [embedding_of(each.values, info, dimensions).tolist() for each in results]

    def score(
        self,
        query: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        service_class: ServiceClass = ServiceClass.RT,
    ) -> list[float]:
        """How relevant each document is to the query, as in /v1/score: by the model's score head,
        or as the cosine of their embeddings.

        query: one text for all documents, or a list with one for each.
        Parts of texts that read like special tokens stay text. Raises what `embed` raises.
        """
        self._check_usable()
        client, tokenizer = self._engine.client, self._engine.tokenizer
        info = client.info.embedding
        if info is None:
            raise InvalidRequestError("This model computes no embeddings.", param="model")
        named = _texts(documents, "documents")
        queries = list(_texts(query, "query").items)
        if isinstance(query, str):
            queries *= len(named.items)
        if len(queries) != len(named.items):
            message = f"{len(queries)} queries for {len(named.items)} documents; pass one for all"
            raise InvalidRequestError(f"{message} or one each.", param="query")
        pairs = list(zip(queries, named.items, strict=True))
        needed = pairs if info.scores else [(text,) for text in distinct_texts(pairs)]
        pooler = TextPooler(client, SystemClock(), self._engine.ids)
        names, inputs = {document: name for name, document in named}, []
        for each in needed:
            name = names.get(each[-1], "query")
            token_ids = tokenizer.encode_texts(*map(tokenizer.escape, each), escaped=True)
            inputs.append(PoolingInput(*token_ids))
            with named.errors_at(name):
                pooler.check(inputs[-1], name)
        pooling = Pooling.SCORE if info.scores else info.pooling
        work = pooler.run(
            inputs, pooling, service_class=_service_class(service_class), param="documents"
        )
        return pair_scores(pairs, self._run(work), info)

    def rerank(
        self,
        query: str,
        documents: str | Iterable[str],
        *,
        top_n: int | None = None,
        service_class: ServiceClass = ServiceClass.RT,
    ) -> list[RankedDocument]:
        """The documents by their scores, the most relevant one first, as in /v1/rerank.

        top_n: how many of them; None or 0: all.
        Raises what `score` raises.
        """
        if not isinstance(query, str):
            raise _is_no(query, "query", "a text")
        if top_n is not None and (not isinstance(top_n, int) or top_n < 0):
            raise _is_no(top_n, "top_n", "a number of documents")
        texts = list(_texts(documents, "documents").items)
        scores = self.score(query, texts, service_class=service_class)
        ranked = [
            RankedDocument(index, text, score)
            for index, (text, score) in enumerate(zip(texts, scores, strict=True))
        ]
        ranked.sort(key=lambda each: -each.score)
        return ranked[: top_n or None]

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer together, or of a text to embed."""
        return self._engine.client.info.max_model_len

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, as `generate` uses them: the text of a special token becomes
        this token. Raises InvalidRequestError.

        add_special_tokens: add BOS or EOS where the model expects them.
        """
        if not isinstance(text, str):
            raise _is_no(text, "text", "a text")
        encode = partial(self._engine.tokenizer.encode, add_special_tokens=add_special_tokens)
        return _token_ids(encode, text, "text")

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids, with U+FFFD for incomplete characters. Raises
        InvalidRequestError."""
        ids = _items(token_ids, "token_ids", "a list of token ids")
        for token_id in ids:
            if not isinstance(token_id, int):
                raise _is_no(token_ids, "token_ids", "a list of token ids")
        if ids:
            check_token_ids("token_ids", ids, self._engine.client.info.vocab_size)
        return self._engine.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """The text of one token inside a text, such as " Paris", for the ids in log-probabilities.
        It has U+FFFD for incomplete characters; of a special token it is the name. Raises
        InvalidRequestError."""
        if not isinstance(token_id, int):
            raise _is_no(token_id, "token_id", "a token id")
        check_token_ids("token_id", [token_id], self._engine.client.info.vocab_size)
        return self._engine.tokenizer.token_text(token_id)

    def close(self) -> None:
        """Stop the engine and free its memory. May be called twice. In a forked child it does
        nothing but end the use there."""
        if not (self._loop.closed or self._loop.is_forked):
            self._loop.run(self._exit.aclose())
        self._loop.close()

    def __enter__(self) -> LLM:
        self._check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        """Raises EngineDeadError if the LLM was closed or belongs to another process."""
        if self._loop.closed:
            raise EngineDeadError("The LLM has been closed.")
        self._loop.check_process()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            self._check_usable()
        except EngineDeadError:
            work.close()
            raise
        return self._loop.run(work)

    def _generate_in(
        self,
        contexts: Sequence[Context],
        inputs: _Inputs,
        params: SamplingParams | Iterable[SamplingParams] | None,
    ) -> list[ChoiceResult]:
        """inputs: one for each context."""
        each = _one_per_prompt(params, len(contexts))
        if params is None or isinstance(params, SamplingParams):
            each = [p.with_changes(seed=shifted_seed(p.seed, i)) for i, p in enumerate(each)]
        for index, context in enumerate(contexts):
            if not isinstance(context, Context):
                message = f"contexts[{index}] must be a context, got {reprlib.repr(context)}."
                raise InvalidRequestError(message, param="contexts")
            if context._llm is not self:
                raise InvalidRequestError("The context belongs to another LLM.", param="contexts")
        jobs = []
        for context, (param, prompt), sampling in zip(contexts, inputs, each, strict=True):
            with inputs.errors_at(param):
                token_ids = context._encode(prompt, param)
                self._check(token_ids, sampling, param, after=len(context))
            jobs.append(GenerationJob(context._core, token_ids, sampling))
        return self._run(self._contexts.generate(jobs))

    def _chat_job(self, messages: Any, sampling: SamplingParams, param: str) -> _Job:
        tokenizer, chat = self._engine.tokenizer, self._chat
        adapted, _ = chat.conversation(_checked_messages(messages, param), ())
        text = tokenizer.render_chat(adapted)
        start = chat.reasoning_start(text)
        ids = tokenizer.encode(text, add_special_tokens=False, escaped=True)
        return _Job(ids, chat.with_reasoning(sampling, start), chat.parsing(NO_TOOLS, start))

    def _encode_beginning(self, beginning: Prompt | Iterable[Message]) -> list[int]:
        tokenizer, items = self._engine.tokenizer, beginning
        if not isinstance(items, str):
            items = _items(items, "beginning", "a text, a list of token ids, or messages")
            if items and isinstance(items[0], Mapping):
                return tokenizer.apply_chat_template(_checked_messages(items, "beginning"))
        return _token_ids(tokenizer.encode, items, "beginning")

    def _check(
        self, prompt: Sequence[int], sampling: SamplingParams, param: str, *, after: int = 0
    ) -> None:
        """Raises InvalidRequestError or PromptTooLongError for what the engine would refuse.

        after: number of tokens before the prompt.
        """
        if not (prompt or after):
            raise InvalidRequestError("The prompt is empty.", param=param)
        vocab_size = self._engine.client.info.vocab_size
        self._engine.generator.check(after + len(prompt), sampling, param)
        if prompt:
            check_token_ids(param, prompt, vocab_size)
        sampling.check_vocabulary(vocab_size)

    def _run_all(
        self,
        inputs: _Inputs,
        params: SamplingParams | Iterable[SamplingParams] | None,
        job_of: Callable[[Any, SamplingParams, str], _Job],
        service_class: ServiceClass,
        progress: bool | None,
    ) -> list[tuple[ChoiceResult, ...]]:
        """The choices of each input. job_of: makes a job of an input, its params and its name."""
        jobs: list[_Job] = []
        for (param, item), sampling in zip(
            inputs, _one_per_prompt(params, len(inputs.items)), strict=True
        ):
            with inputs.errors_at(param):
                jobs.append(job_of(item, sampling, param))
                self._check(jobs[-1].prompt, sampling, param)
        done = done_tokens = 0
        service_class = _service_class(service_class)
        with progress_bar("generating", shown=progress) as advance:
            advance(0, len(jobs), "0 tokens")

            async def one(index: int, job: _Job) -> tuple[ChoiceResult, ...]:
                nonlocal done, done_tokens
                param = inputs.name(index)
                with inputs.errors_at(param):
                    generation = await self._start(job, service_class, param)
                result = tuple(await collect(generation))
                done_tokens += sum(len(choice.token_ids) for choice in result)
                done += 1
                advance(done, len(jobs), f"{done_tokens} tokens")
                return result

            async def everything() -> list[tuple[ChoiceResult, ...]]:
                results: list[tuple[ChoiceResult, ...]] = [()] * len(jobs)
                waiting = iter(enumerate(jobs))

                async def work() -> None:
                    for index, job in waiting:
                        results[index] = await one(index, job)

                async with asyncio.TaskGroup() as group:
                    for _ in range(self._num_open(jobs)):
                        group.create_task(work())
                return results

            try:
                return self._run(everything())
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None

    def _num_open(self, jobs: Sequence[_Job]) -> int:
        """How many prompts are open at once: enough for full steps, and no more than half of the
        queue, which calls of other threads use as well."""
        choices = max((job.sampling.n for job in jobs), default=1)
        room = self._engine.client.info.max_queue // (2 * choices)
        return max(1, min(len(jobs), self._window, room))

    async def _start(self, job: _Job, service_class: ServiceClass, param: str) -> Generation:
        preparing = self._preparing if job.sampling.grammar else contextlib.nullcontext()
        async with preparing:
            return await self._engine.generator.start(
                [job.prompt],
                job.sampling,
                request_id=self._engine.ids.new("llm"),
                service_class=service_class,
                param=param,
                parsing=job.parsing,
                streamed=False,
            )


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document of `LLM.rerank`. index: where it is in the list of documents."""

    index: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The inputs of a call. Iterating gives (name, input).

    param: the parameter that has them.
    several: whether it is a list of them, so that an error has to say which one it is about.
    """

    items: Sequence[Any]
    param: str
    several: bool

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((self.name(index), item) for index, item in enumerate(self.items))

    def name(self, index: int) -> str:
        """What the caller would write for it, such as prompts[3]."""
        return f"{self.param}[{index}]" if self.several else self.param

    @contextlib.contextmanager
    def errors_at(self, name: str) -> Iterator[None]:
        """Errors of the block about one of several inputs begin with its name."""
        try:
            yield
        except InvalidRequestError as error:
            if self.several and not error.message.lstrip("'").startswith(name):
                error.message = f"{name}: {error.message}"
                error.args = (error.message,)
            raise


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt to complete.

    parsing: as for TextGenerator.start.
    """

    prompt: list[int]
    sampling: SamplingParams
    parsing: AnswerParsing | None = None


class Context:
    """A token sequence in the engine: filled once, then forked for every continuation.

        with llm.context("You plan a journey.\\n") as plan:  # computed once
            branches = [plan.fork() for _ in range(4)]  # computes and copies nothing
            answers = llm.generate_in(branches, "First,", SamplingParams(stop="\\n"))

    Made by LLM.context and `fork`. A context is a list of tokens; the KV of common prefixes is
    computed and stored once. It stays cached for ten minutes after the last job of a context, as
    far as memory allows, and a later job recomputes what is missing. So contexts need not be freed.
    A context runs one job at a time; several threads may use different contexts.

    Each text is tokenized separately, so a text should begin where a word begins, with the space
    before it. Methods raise InvalidRequestError if the context was freed or a job is running in it,
    and EngineDeadError after the LLM was closed.
    """

    def __init__(self, llm: LLM, core: TokenContext) -> None:
        """Only LLM.context and `fork` create contexts."""
        self._llm = llm
        self._core = core

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._core.tokens)

    def __bool__(self) -> bool:
        """True, also for a context without tokens."""
        return True

    def __enter__(self) -> Context:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.free()
        except BrosError:
            if kind is None:  # else what the block has raised matters more, such as Ctrl-C
                raise

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens, exactly as the engine has received and generated them."""
        return tuple(self._core.tokens)

    @property
    def text(self) -> str:
        """All tokens as text, special tokens included."""
        tokenizer = self._llm._engine.tokenizer
        return tokenizer.decode(self._core.tokens, skip_special_tokens=False)

    def fill(self, prompt: Prompt) -> int:
        """Append a text or token ids and compute their KV; returns the number of tokens.

        Raises InvalidRequestError or PromptTooLongError, and leaves the context unchanged then.
        """
        token_ids = self._encode(prompt, "prompt")
        self._llm._run(self._llm._contexts.fill(self._core, token_ids))
        return len(token_ids)

    def generate(self, prompt: Prompt = "", params: SamplingParams | None = None) -> ChoiceResult:
        """Append a text or token ids, generate an answer, and append the answer.

        The appended answer has all tokens of the result: also a final stop token, and those of a
        stop string up to the token in which it ends. The `text` of the result has neither.
        `cached_tokens` of the result is how many tokens of the context were not computed again.
        Raises InvalidRequestError (for n > 1 too: fork the context), PromptTooLongError,
        OverloadedError, or BrosError if the request fails, and leaves the context unchanged then.
        """
        self._llm._check_usable()
        inputs = _Inputs([prompt], "prompt", several=False)
        return self._llm._generate_in([self], inputs, params)[0]

    def fork(self) -> Context:
        """A new context with the same tokens."""
        return Context(self._llm, self._core.fork())

    def free(self) -> int:
        """Unpin the KV and end the use of the context. Its forks stay as they are.

        Returns the number of tokens, 0 if the context had been freed, the LLM was closed, or this
        is a forked child.
        """
        if self._llm._loop.closed or self._llm._loop.is_forked:
            return 0
        return self._llm._run(self._llm._contexts.free(self._core))

    def _encode(self, prompt: Prompt, param: str) -> list[int]:
        """Token ids; special tokens such as BOS are added at the beginning of the context only."""
        encode = self._llm._inner.encode if len(self) else self._llm._engine.tokenizer.encode
        return _token_ids(encode, prompt, param)


def _service_class(value: ServiceClass | str) -> ServiceClass:
    """Raises InvalidRequestError."""
    try:
        return ServiceClass(value)
    except ValueError:
        raise InvalidRequestError(
            f"service_class must be ServiceClass.RT or ServiceClass.BE, got {value!r}.",
            param="service_class",
        ) from None


def _checked_messages(messages: Any, name: str) -> list[dict[str, Any]]:
    """The messages of a conversation, with texts as contents. Raises InvalidRequestError.

    name: what the caller would write for the conversation.
    """
    items = _items(messages, name, _MESSAGES)
    if not all(isinstance(each, Mapping) for each in items):
        raise _is_no(messages, name, _MESSAGES)
    checked = []
    for number, message in enumerate(items):
        param, content = f"{name}[{number}]", message.get("content")
        if not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"{param} needs a role.", param=f"{param}.role")
        calls = message.get("tool_calls")
        if calls and not all(_is_call(call) for call in calls):
            raise InvalidRequestError(
                f"{param}: calls have an id and a function with name and arguments.",
                param=f"{param}.tool_calls",
            )
        if isinstance(content, list | tuple) and all(map(_is_text_part, content)):
            content = "\n".join(part["text"] for part in content)
        if not (isinstance(content, str) or (content is None and calls)):
            raise InvalidRequestError(
                f"{param}: the content must be a text or a list of text parts, got "
                f"{reprlib.repr(content)}.",
                param=f"{param}.content",
            )
        if isinstance(content, str) and _SURROGATE.search(content):
            raise InvalidRequestError(
                f"{param}: the content has half of a surrogate pair, which is no character.",
                param=f"{param}.content",
            )
        checked.append({**message, "content": content})
    if not checked:
        raise InvalidRequestError(f"{name} must not be empty.", param=name)
    return checked


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    )


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(function, Mapping)
        and {"id"} <= call.keys()
        and {"name", "arguments"} <= function.keys()
    )


def _token_ids(encode: Callable[[str], list[int]], prompt: Prompt, param: str) -> list[int]:
    """encode: of texts. Raises InvalidRequestError, naming `param`, for what is neither a text nor
    token ids."""
    what = "a text or a list of token ids"
    try:
        if isinstance(prompt, str):
            return encode(prompt)
        return [operator.index(token_id) for token_id in _items(prompt, param, what)]
    except (TypeError, UnicodeEncodeError):  # half of a surrogate pair is no text
        raise _is_no(prompt, param, what) from None


_MESSAGES = 'a list of {"role": ..., "content": ...}'
_SURROGATE = re.compile("[\ud800-\udfff]")


def _is_no(value: object, param: str, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} must be {what}, got {reprlib.repr(value)}.", param=param)


def _items(value: Any, param: str, what: str) -> list[Any]:
    """The items of a list, an array, an iterator, ... Raises InvalidRequestError for anything else.

    what: what is needed, for the message.
    """
    plain = _plain(value)
    if isinstance(plain, str | bytes | bytearray | Mapping):
        raise _is_no(value, param, what)
    try:
        items = iter(plain)
    except TypeError:
        raise _is_no(value, param, what) from None
    return [_plain(item) for item in items]


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy, torch, pandas, ... as lists and numbers of Python."""
    return value.tolist() if hasattr(value, "tolist") else value


def _prompts(prompts: Prompt | Iterable[Prompt], param: str) -> _Inputs:
    """One text, its token ids, or several of them."""
    if isinstance(prompts, str):
        return _Inputs([prompts], param, several=False)
    items = _items(prompts, param, "a text, a list of token ids, or a list of these")
    if items and isinstance(items[0], int):
        return _Inputs([items], param, several=False)
    return _Inputs(items, param, several=True)


def _texts(texts: str | Iterable[str], param: str) -> _Inputs:
    """One text or several, none of them empty."""
    items = [texts] if isinstance(texts, str) else _items(texts, param, "a text or a list of texts")
    found = _Inputs(items, param, several=not isinstance(texts, str))
    for name, text in found:
        if not isinstance(text, str) or not text or _SURROGATE.search(text):
            raise _is_no(text, name, "a text that is not empty")
    return found


def _conversations(messages: Iterable[Any]) -> _Inputs:
    """One conversation or several."""
    items = _items(messages, "messages", f"{_MESSAGES}, or a list of such lists")
    if items and isinstance(items[0], Mapping):
        return _Inputs([items], "messages", several=False)
    return _Inputs(items, "messages", several=True)


def _one_per_prompt(
    params: SamplingParams | Iterable[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    each = _items(params, "params", "SamplingParams or a list with one for each prompt")
    for index, one in enumerate(each):
        if not isinstance(one, SamplingParams):
            raise _is_no(one, f"params[{index}]", "SamplingParams")
    if len(each) != count:
        raise InvalidRequestError(
            f"{len(each)} sampling params for {count} prompts; pass one for all or one each.",
            param="params",
        )
    return each


def _config(model: Any, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an LLM. Raises ConfigError, or TypeError for an unknown option."""
    if not isinstance(model, str | os.PathLike | None):
        raise ConfigError(f"model: a name or a path is needed, got {reprlib.repr(model)}")
    fields = {field.name: field for field in dataclasses.fields(EngineConfig)}
    for name in options:
        if name not in fields:
            close = difflib.get_close_matches(name, fields, 1, 0.8)
            hint = (
                f"; did you mean {close[0]}?"
                if close
                else "; it has those of the engine in `bros serve --help`"
            )
            raise TypeError(f"LLM has no option {name!r}{hint}")
    # No user waits for a first token, so prompts run in their order.
    given: dict[str, Any] = {"max_queue": 1_000_000, "policy": "fcfs", "model": model, **options}
    for name, value in given.items():
        is_size = isinstance(value, int) and fields[name].metadata.get("size")
        if isinstance(value, os.PathLike):
            given[name] = os.fspath(value)
        elif is_size and not isinstance(value, bool):  # so many bytes
            given[name] = str(value)
    return EngineConfig(**given)
