"""The seam between the packing loop and a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.packing import Bounds, Packing
from bros.scheduler.state import Queues, RequestState


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What may run in the next step.

    urgent: candidates that are served first, in this order.
    best_effort: candidates for the time that is left, in this order.
    bounds: of the step.
    exclusive: best-effort candidates run only if no urgent one can.
    drop: waiting requests that end now with an error instead.
    """

    urgent: Iterable[RequestState]
    best_effort: Iterable[RequestState] = ()
    bounds: Bounds
    exclusive: bool = False
    drop: Sequence[RequestState] = ()


class Policy(Protocol):
    """Orders requests and bounds steps; never allocates.

    predictor: how long steps take, if the policy minds. newcomers_preempt: requests that hold
    no KV memory may take it from others of higher rank. expected_tokens: how many more tokens a
    request is likely to produce, if admission of best-effort work shall look ahead.
    """

    @property
    def name(self) -> str: ...

    @property
    def predictor(self) -> StepTimePredictor | None: ...

    @property
    def new_requests_preempt(self) -> bool: ...

    @property
    def expected_tokens(self) -> Callable[[RequestState], int] | None: ...

    @property
    def batch_size(self) -> tuple[int, int]:
        """(rows that the next step may have, how often that was reset)"""
        ...

    def classify(self, state: RequestState, queues: Queues, now: float) -> ServiceClass:
        """The class a new request is served as. Raises OverloadedError to refuse it."""
        ...

    def place(self, state: RequestState, now: float) -> None:
        """A request starts to wait, or changes its class: give it a queue_key, and its rank, always
        the same one in a class.

        No two requests share either.
        """
        ...

    def propose(self, queues: Queues, now: float) -> Proposal:
        """What may run next. May move waiting requests and set deadlines that are lost anew."""
        ...

    @property
    def aborts_steps(self) -> bool:
        """Whether `yields` ever says yes."""
        ...

    def yields(
        self, packing: Packing[RequestState], began_s: float, tokens: int, due_s: float, now: float
    ) -> bool:
        """Whether to abort the running step, which holds best-effort work and began at `began_s`.

        For a real-time request that has just arrived with a prompt of `tokens`, and whose first
        token is due at `due_s`.
        """
        ...

    def chosen(self, packing: Packing[RequestState]) -> None:
        """The step after `turn` is going to run."""
        return

    def settle(self, packing: Packing[RequestState], seconds: float, be_waits: bool) -> None:
        """A step took `seconds`; be_waits: there was best-effort work that it left out.

        With steps that overlap, the turn of the one after it has been taken already.
        """
        ...

    def aborted(self, packing: Packing[RequestState], seconds: float) -> None:
        """A step was aborted after so many seconds, and nothing of it counts."""
        ...


class OrderPolicy:
    """Base of the policies that only order: no predictions, no classes but in the order."""

    name = "base"
    new_requests_preempt = True

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds

    @property
    def predictor(self) -> StepTimePredictor | None:
        return None

    @property
    def expected_tokens(self) -> Callable[[RequestState], int] | None:
        return None

    @property
    def batch_size(self) -> tuple[int, int]:
        return self._bounds.rows, 0

    def classify(self, state: RequestState, queues: Queues, now: float) -> ServiceClass:
        return state.service_class

    @property
    def aborts_steps(self) -> bool:
        return False

    def yields(
        self, packing: Packing[RequestState], began_s: float, tokens: int, due_s: float, now: float
    ) -> bool:
        return False

    def chosen(self, packing: Packing[RequestState]) -> None:
        pass

    def settle(self, packing: Packing[RequestState], seconds: float, be_waits: bool) -> None:
        pass

    def aborted(self, packing: Packing[RequestState], seconds: float) -> None:
        raise AssertionError("this policy never aborts a step")
