"""The seams: what one layer promises another. Implementations are chosen in server/build.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, RequestOutput, ServiceClass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a running engine that never change while it runs."""

    model: str
    weights: str
    kernels: str
    kv_dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    policy: str
    max_queue: int = 2**31 - 1
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStats:
    """Counters and gauges of one service class."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    kv_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counters count since the engine started."""

    steps: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    by_class: Mapping[ServiceClass, ClassStats] = field(default_factory=dict)


class Executor(Protocol):
    """Runs plans on a device. Holds the weights and the KV memory, decides nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one iteration and return one sample per chunk that asked for one, in order."""
        ...

    def close(self) -> None:
        """Release memory and worker processes. Calling it twice is fine."""
        ...


class RequestStream(Protocol):
    """The outputs of one accepted request; iteration ends after the one that has a finish_reason.

    Raises EngineDeadError from the iterator if the engine dies first.
    """

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...


class EngineClient(Protocol):
    """An engine somewhere: in this process, in another, or several behind a router."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False once the engine has died and until it has been restarted."""
        ...

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Hand over a request; returns once the engine has accepted it.

        Cancelling the call withdraws the request. Raises PromptTooLongError,
        InvalidRequestError, QueueFullError or EngineDeadError.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request and free its KV at the next iteration. Unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if there is no engine to ask."""
        ...

    async def close(self) -> None: ...
