"""The interface between the scheduler and a policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.packing import Bounds, Packing
from bros.scheduler.state import Queues, RequestState
from bros.scheduler.steps import Newcomer


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """What may run in the next step.

    urgent: candidates that are served first, in this order.
    best_effort: candidates for the time that is left, in this order.
    bounds: of the step.
    exclusive: best-effort candidates run only if no urgent one can.
    behind: by class, tenants whose waiting requests come after those of another tenant that has
        used less of the device. Real-time requests of these give memory and leave rows to others.
    shed: waiting requests that end now with an error.
    """

    urgent: Iterable[RequestState]
    best_effort: Iterable[RequestState] = ()
    bounds: Bounds
    exclusive: bool = False
    behind: Mapping[ServiceClass, Collection[str]] = field(default_factory=dict)
    shed: Sequence[RequestState] = ()


class Policy(ABC):
    """Orders requests and bounds steps; never allocates. A policy that only orders requests says
    nothing about the rest.

    new_requests_preempt: whether requests that hold no KV memory may preempt others.
    aborts_steps: whether `yields` may ever return True.
    predictor: predicts step times; None if the policy does not use them.
    expected_tokens: how many more tokens a request is likely to generate; None if best-effort
        requests are admitted without regard to expected growth.
    batch_size: (most rows of the next step, how often that was reset)
    """

    name = "base"
    new_requests_preempt = True
    aborts_steps = False
    predictor: StepTimePredictor | None = None
    expected_tokens: Callable[[RequestState], int] | None = None

    @property
    @abstractmethod
    def batch_size(self) -> tuple[int, int]: ...

    @abstractmethod
    def assign_rank(self, state: RequestState, now: float) -> None:
        """Set the queue_key and the rank of a request that starts to wait or changes its class.

        Both are unique, and the rank is always the same within a class.
        """

    @abstractmethod
    def propose(self, queues: Queues, now: float) -> Proposal:
        """What may run next. May move waiting requests, and renew deadlines that are lost."""

    def classify(self, state: RequestState, queues: Queues, now: float) -> ServiceClass:
        """The class a new request is served as. Raises OverloadedError to refuse it."""
        return state.service_class

    def yields(
        self,
        packing: Packing,
        began_s: float,
        newcomers: Sequence[Newcomer],
        now: float,
        lost_s: float,
    ) -> bool:
        """Whether to stop the running step for real-time requests that have arrived meanwhile.

        packing: the running step, with best-effort work.
        began_s: when it began.
        newcomers: in order of their deadlines; not empty.
        lost_s: time whose work would be lost.
        """
        return False

    # Events; nothing happens by default.

    def on_step_committed(self, packing: Packing, queues: Queues) -> None:
        """A step is going to run. queues: before its requests leave them."""
        return

    def on_step_done(self, packing: Packing, seconds: float, be_waits: bool) -> None:
        """A step took `seconds`; be_waits: best-effort work waited during it.

        With async scheduling, the next step may be planned already.
        """
        return

    def on_step_aborted(self, packing: Packing, seconds: float) -> None:
        """A step was aborted after `seconds`; none of its tokens counts."""
        raise AssertionError("this policy never aborts a step")

    def on_step_suspended(self, packing: Packing, seconds: float) -> None:
        """A step was suspended after `seconds`."""
        raise AssertionError("this policy never suspends a step")

    def on_work_lost(self, seconds: float) -> None:
        """What a suspended step has computed in this time was dropped."""
        raise AssertionError("this policy never suspends a step")

    def on_request_ended(self, state: RequestState, now: float) -> None:
        """A request has ended, for whatever reason."""
        return

    def device_seconds(self, service_class: ServiceClass) -> Mapping[str, float]:
        """The predicted time of the steps so far, by tenant; empty if the policy predicts none."""
        return {}
