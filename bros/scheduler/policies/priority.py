"""Priority as vLLM has it: it orders the queue, and who gives up memory when that runs out."""

from __future__ import annotations

from bros.core.request import ServiceClass
from bros.scheduler.policies.base import OrderPolicy, Turn
from bros.scheduler.queues import Queues
from bros.scheduler.state import RequestState


class PriorityPolicy(OrderPolicy):
    """Requests that run go on before any new one is admitted, whatever its class.

    A real-time newcomer is first in the queue, but has to wait until rows, tokens and memory are
    left over.
    """

    name = "priority"
    newcomers_preempt = False

    def place(self, state: RequestState, now: float) -> None:
        best_effort = state.service_class is ServiceClass.BE
        state.rank = state.queue_key = (best_effort, state.arrival_index)

    def turn(self, queues: Queues, now: float) -> Turn:
        some = self._bounds.rows + 1  # one more, which then says why it waits
        order = queues.running[:]
        for service_class in (ServiceClass.RT, ServiceClass.BE):
            order += queues.waiting[service_class][:some]
        return Turn(urgent=order, bounds=self._bounds)
