"""Extends prompts as values are set, and prefills their known prefixes ahead.

producer   | prefill | decode ............................. |
consumer             | prefill-only: its prefix |           | prefill: the value | decode ...
                                              pinned ───────┘ unpinned at its first token
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from bros.core.clock import Clock, thread_cpu_s
from bros.core.errors import BrosError, PromptTooLongError
from bros.core.fair import FairThreads
from bros.core.interfaces import EngineClient
from bros.core.request import EngineRequest, FinishReason, Hints, SamplingParams, ServiceClass
from bros.core.tenants import Resource, TenantAccounts
from bros.semantic.core.nodes import InputPiece, LlmCall, Variable
from bros.semantic.core.prompt import PieceEncoder, Prompt
from bros.semantic.core.template import Text
from bros.semantic.errors import FailedStage
from bros.semantic.service.generating import LlmCallFailedError
from bros.semantic.service.live import (
    CallRecord,
    ServedSession,
    SessionSettings,
    request_group,
)
from bros.semantic.transforms import TransformError, Transforms
from bros.semantic.transforms.process import TransformRunner
from bros.text.public_prefixes import PublicPrefixes

T = TypeVar("T")

_LONG_CHARS = 4_000
_CHARS_PER_PIECE = 40
"""What a piece costs besides its text, if there is any: it is hashed, and listed in views."""


class Prompter:
    """Extends the prompts of calls. All sessions share its cache of encoded constant texts.

    No prompt is encoded beyond what fits the model's context.
    """

    def __init__(
        self,
        encoder: PieceEncoder,
        threads: FairThreads,
        transforms: TransformRunner,
        engine: EngineClient,
        accounts: TenantAccounts,
    ) -> None:
        """threads: for long texts. transforms: for transforms that may take long.
        engine: of the model whose context the prompts must fit. accounts: count CPU time.
        """
        self._accounts = accounts
        self._encoder = encoder
        self._threads = threads
        self._transforms = transforms
        self._engine = engine

    async def extend(self, session: ServedSession, llm_call: LlmCall) -> Prompt:
        """Extend the prompt of an LLM call up to its end or its first pending variable.

        Raises LlmCallFailedError if an input transform fails or the prompt is too long.
        """
        record = session.record(llm_call.call.id)
        async with record.lock:
            prompt = record.prompt
            assert prompt is not None, "the call is open and not native"
            try:
                await self._extend(session, llm_call, prompt)
            finally:
                session.count_prompt(record)
            return prompt

    async def _extend(self, session: ServedSession, llm_call: LlmCall, prompt: Prompt) -> None:
        yielder, limit = _LoopYielder(), self._engine.info.max_model_len
        for piece in llm_call.call.pieces[prompt.num_pieces : llm_call.prompt_end]:
            first = not prompt.num_tokens
            variable: Variable | None = None
            if not isinstance(piece, Text):
                variable = session.machine.graph.variables[piece.variable_id]
                if not isinstance(piece, InputPiece) or variable.text is None:
                    break
            try:
                if prompt.num_tokens >= limit:
                    raise PromptTooLongError(prompt.num_tokens, limit, exact=False)
                if isinstance(piece, Text):
                    await yielder.before(len(piece.text))
                    prompt.add(await self._constant(session.tenant, piece.text, first=first))
                elif variable is not None:
                    await yielder.before(len(variable.text or ""))
                    value = await self._value(session.tenant, piece, variable, first=first)
                    prompt.add(value, variable.id)
            except PromptTooLongError as error:
                name = None if variable is None else variable.id
                raise LlmCallFailedError(FailedStage.FILL, str(error), name) from error

    async def encode(self, tenant: str, text: str) -> tuple[int, ...]:
        """The tokens of a text inside a prompt."""
        return await self._off_loop(
            tenant, lambda: self._encoder.encode(text, first=False, value=True), len(text)
        )

    async def transform(
        self, tenant: str, transforms: Transforms, text: str, stage: FailedStage, variable: str
    ) -> str:
        """Apply transforms to the text of a variable. Raises LlmCallFailedError (`stage`)."""
        try:
            result = transforms.quickly(text)
            if result is None:
                result = await self._transforms.apply(tenant, transforms, text)
            return result
        except TransformError as error:
            raise LlmCallFailedError(stage, str(error), variable) from error

    def close(self) -> None:
        """End running transforms."""
        self._transforms.close()

    async def _constant(self, tenant: str, text: str, *, first: bool) -> tuple[int, ...]:
        known = self._encoder.cached(tenant, text, first=first)
        if known is not None:
            return known
        token_ids = await self._encode(tenant, text, first=first)
        self._encoder.cache(tenant, text, token_ids, first=first)
        return token_ids

    async def _value(
        self, tenant: str, piece: InputPiece, variable: Variable, *, first: bool
    ) -> tuple[int, ...]:
        text, transforms = variable.text, piece.transforms
        assert text is not None
        if transforms is None and variable.token_ids is not None:
            return variable.token_ids  # encoding the text could give other tokens than generated
        if transforms is not None:
            text = await self.transform(tenant, transforms, text, FailedStage.FILL, variable.id)
        return await self._encode(tenant, text, first=first, value=True)

    async def _encode(
        self, tenant: str, text: str, *, first: bool, value: bool = False
    ) -> tuple[int, ...]:
        limit = self._engine.info.max_model_len
        return await self._off_loop(
            tenant,
            lambda: self._encoder.encode(text, first=first, limit=limit, value=value),
            len(text),
        )

    async def _off_loop(self, tenant: str, work: Callable[[], T], num_chars: int) -> T:
        """Do work, on a thread if the text is long enough to block the event loop noticeably, or if
        the tenant has no CPU time left, so that it waits for some: 1,000 texts of 4,000 characters,
        which a body may have, take 1.8 s."""
        if num_chars > _LONG_CHARS or self._accounts.cpu_wait_s(tenant) > 0:
            return await self._threads.run(tenant, work, num_chars)
        begun_s = thread_cpu_s()
        try:
            return work()
        finally:
            self._accounts.spend(tenant, thread_cpu_s() - begun_s)


class _LoopYielder:
    """Lets other tasks run between the pieces of a prompt that are done on the event loop.

    Without it, 1,000 values of 3,900 characters in one call held the loop for four seconds, and
    empty ones count as well.
    """

    def __init__(self) -> None:
        self._chars = 0

    async def before(self, num_chars: int) -> None:
        """A piece of this many characters comes next."""
        if num_chars > _LONG_CHARS:
            return  # on a thread
        if self._chars + num_chars > _LONG_CHARS:
            self._chars = 0
            await asyncio.sleep(0)
        self._chars += num_chars + _CHARS_PER_PIECE


logger = logging.getLogger(__name__)

_MIN_BLOCKS = 2
"""Fewest new blocks for which a prefill-only request is submitted."""


class Prefiller:
    """Submits prefill-only requests for waiting LLM calls. It logs their errors and goes on.

    count: number of requests that the engine has accepted.
    """

    def __init__(
        self,
        prompter: Prompter,
        engine: EngineClient,
        clock: Clock,
        settings: SessionSettings,
        accounts: TenantAccounts,
        public: PublicPrefixes | None,
    ) -> None:
        self._accounts = accounts
        self._public = public
        self._prompter = prompter
        self._engine = engine
        self._clock = clock
        self._settings = settings
        self.count = 0

    def start(self, session: ServedSession, llm_call: LlmCall) -> asyncio.Task[None] | None:
        """Prefill the known prefix of the prompt. Returns the task that does it.

        None: a task already prefills a shorter prefix of the call, and goes on with this one.
        """
        record = session.record(llm_call.call.id)
        record.next_prefill = llm_call
        if record.prefill is not None and not record.prefill.done():
            return None
        record.prefill = asyncio.create_task(self._prefill_all(session, record))
        return record.prefill

    async def stop(self, session: ServedSession, llm_call: LlmCall) -> None:
        """Cancel an unfinished prefill of the call."""
        record = session.record(llm_call.call.id)
        record.next_prefill = None
        if record.prefill is not None:
            record.prefill.cancel()
            await asyncio.gather(record.prefill, return_exceptions=True)
            record.prefill = None  # its error refers to its frames, and they to the record

    async def _prefill_all(self, session: ServedSession, record: CallRecord) -> None:
        """Prefill the known prefix of a call until it has not become longer meanwhile.

        One task does all of it: a call that reads 1,000 values has up to 1,000 known prefixes.
        """
        while record.next_prefill is not None:
            llm_call, record.next_prefill = record.next_prefill, None
            await self._prefill(session, llm_call)

    async def _prefill(self, session: ServedSession, llm_call: LlmCall) -> None:
        record = session.record(llm_call.call.id)
        try:
            prompt = await self._prompter.extend(session, llm_call)
            token_ids, private_from = prompt.token_ids(), prompt.private_from
            block_size = self._engine.info.block_size
            whole = len(token_ids) // block_size * block_size  # only full blocks can be shared
            if whole - session.requested_prefixes.num_tokens(token_ids) < _MIN_BLOCKS * block_size:
                return
            request = EngineRequest(
                request_id=f"{llm_call.call.id}.{llm_call.index}-fill{len(token_ids)}",
                prompt_token_ids=token_ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=1),
                service_class=ServiceClass.BE,
                arrival_s=self._clock.now(),
                tenant=session.tenant,
                max_traces=self._accounts.limits(session.tenant).traces,
                public_tokens=0 if self._public is None else self._public.count(token_ids),
                prefill_only=True,
                hints=Hints(
                    program=session.uid,
                    depth=llm_call.depth,
                    group=request_group(session, llm_call),
                    private_from=private_from,
                    private_salt=session.sharing.private_salt or "",
                    keep_s=self._settings.pin_s,
                    early=True,
                ),
            )
            with (
                session.requested_prefixes.prefilling(token_ids) as computed,
                self._accounts.hold(session.tenant, Resource.BE_REQUESTS),
            ):
                record.pinned.add(request.request_id)
                if await self._run(request):
                    computed()
                    record.llm_call(llm_call.index).prefilled_tokens = whole
        except (BrosError, LlmCallFailedError) as error:
            logger.debug("no prefill of %s: %s", llm_call.call.id, error)
        except Exception:
            logger.exception("the prefill of %s failed", llm_call.call.id)

    async def _run(self, request: EngineRequest) -> bool:
        """Submit the request and wait for its end. Returns whether the prefill completed."""
        outputs = aiter(await self._engine.submit(request))
        self.count += 1
        reason = None
        try:
            while reason is None:
                reason = (await anext(outputs)).finish_reason
        finally:
            if reason is None:
                await self._engine.abort(request.request_id)
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()
        return reason is FinishReason.LENGTH
