"""Fair shares of a class's device time between tenants: virtual-time counters.

A counter is what its tenant has used, in device seconds per weight. Among the tenants with waiting
requests the one with the least goes first:

    seconds / weight
       |            a ____ |  a waits too: both rise alike, as fast as their weights say
       |         ___/   b /
       |    a __/  ......'|   b was idle until here: its counter is lifted to the least of those
       |   __/    :       |   that wait, so that its idle time is no credit
       |  /    b .:       |
       +------------------------------- time

Source: Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024,
Algorithms 2 and 3, weights as in section 4.3). There a counter is a sum of tokens with a price for
each kind, and a new request is charged for its whole prompt. Here it is the predicted time of the
steps that have run, so a cached prefix costs what reading it costs.

While two tenants have waiting requests all the time, what they use per weight differs by at most
what one of them had used ahead when both began to wait, and what their requests that run need: the
bound of the paper's Theorem 4.4.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import CostModel
from bros.scheduler.state import Queues, RequestState

T = TypeVar("T")

Chunks = Sequence[tuple[RequestState, int]]
"""(request, tokens) of the chunks of a step."""

SHARE = "share"
"""The reason to wait of a tenant that has used more of the device than another one."""

_RECENT_S = 10.0
"""Device seconds of a class over which `over_share` looks back: what was used so long ago counts a
third. A tenant that was idle may use about so much times its share before it is over."""

_ACTIVE_FROM, _OVER = 0.01, 1.1
"""A tenant is active from this part of the recent use on, and over its share from so many times
that share on."""

Place = tuple[float, float, str]
"""Order between tenants: (counter, used seconds per weight, tenant)."""


class TenantShares:
    """The counters of one class.

    used_s: tenant -> device seconds so far.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """weights: of the tenants; 1 for all others."""
        self._weights = weights
        self._counters: dict[str, float] = {}
        self._waiting: set[str] = set()
        self._last_tenant: str | None = None
        # tenant -> (device seconds that count, `_total_s` at that time), see `_lately_s`
        self._recent: dict[str, tuple[float, float]] = {}
        self._total_s = 0.0
        self.used_s: dict[str, float] = {}

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)

    def place(self, tenant: str) -> Place:
        """Where the counters are equal, the tenant that has used less in all goes first."""
        used = self.used_s.get(tenant, 0.0) / self.weight(tenant)
        return self.counter(tenant), used, tenant

    def set_waiting(self, tenants: Collection[str]) -> None:
        """These tenants have waiting requests now. The counters of those that had none are lifted.

        If none had any, they are lifted to the counter of the one that had some last.
        """
        waiting = self._waiting
        if waiting == tenants:
            return
        for tenant in sorted(waiting.difference(tenants)):
            self.stop_waiting(tenant)
        least = min((self.counter(tenant) for tenant in waiting), default=None)
        if least is None:
            least = 0.0 if self._last_tenant is None else self.counter(self._last_tenant)
        for tenant in tenants:
            if tenant not in waiting:
                self._counters[tenant] = max(self.counter(tenant), least)
        self._waiting = set(tenants)

    def stop_waiting(self, tenant: str) -> None:
        """The last waiting request of a tenant has started or ended."""
        self._waiting.discard(tenant)
        self._last_tenant = tenant

    def charge(self, tenant: str, seconds: float) -> None:
        """A tenant uses the device for these seconds; negative ones take a charge back."""
        self._counters[tenant] = self.counter(tenant) + seconds / self.weight(tenant)
        self.used_s[tenant] = self.used_s.get(tenant, 0.0) + seconds
        self._total_s += seconds
        self._recent[tenant] = max(0.0, self._lately_s(tenant) + seconds), self._total_s

    def _lately_s(self, tenant: str) -> float:
        """Device seconds of a tenant, where those longer ago count less."""
        seconds, total_s = self._recent.get(tenant, (0.0, 0.0))
        return seconds * math.exp((total_s - self._total_s) / _RECENT_S)

    def over_share(self) -> frozenset[str]:
        """The tenants that have lately used more than their weight's part of what all have.

        Tenants that neither wait nor have used more than nearly nothing lately do not count, so one
        tenant alone is never over.
        """
        if len(self._waiting.union(self._recent)) < 2:
            return frozenset()
        recent = {tenant: self._lately_s(tenant) for tenant in self._recent}
        least_s = _ACTIVE_FROM * sum(recent.values())
        for tenant in [tenant for tenant, seconds in recent.items() if seconds <= least_s]:
            del self._recent[tenant], recent[tenant]
        weights = sum(map(self.weight, self._waiting.union(recent)))
        each_s = _OVER * sum(recent.values()) / weights
        over = {t for t, seconds in recent.items() if seconds > each_s * self.weight(t)}
        return frozenset(over) if len(self._waiting.union(recent)) > 1 else frozenset()

    def behind(self, tenants: Collection[str]) -> frozenset[str]:
        """All of these tenants but the first."""
        if len(tenants) < 2:
            return frozenset()
        return frozenset(tenants).difference({min(tenants, key=self.place)})

    def merge(
        self, requests: Mapping[str, Iterable[T]], seconds: Callable[[T], float]
    ) -> Iterator[T]:
        """Requests of several tenants in a fair order, which keeps the order of each tenant.

        seconds: what a request is expected to use; its tenant's next one comes as if it had been
            charged.
        """
        heap = [(*self.place(tenant), iter(own)) for tenant, own in requests.items()]
        heapq.heapify(heap)
        while heap:
            counter, used, tenant, own = heap[0]
            request = next(own, None)
            if request is None:
                heapq.heappop(heap)
                continue
            yield request
            counter += seconds(request) / self.weight(tenant)
            heapq.heapreplace(heap, (counter, used, tenant, own))


class StepCosts:
    """Divides the predicted time of a step among the tenants in it.

    The parts are in proportion to what each chunk adds to a step: products, attention, sampling.
    """

    def __init__(self, model: CostModel, most_tokens: int) -> None:
        """most_tokens: of a step."""
        self._prices = prices = model.prices(most_tokens)
        self._row_s = prices.token_s + model.sample_s
        self._context_s = prices.context_s

    def prefill_s(self, state: RequestState) -> float:
        """What the rest of its prompt adds to steps."""
        return self._prices.prefill_s(state.remaining, state.num_computed_tokens)

    def rest_s(self, state: RequestState, outputs: int) -> float:
        """What the rest of its prompt and so many output tokens add to steps."""
        row_s = self._row_s + self._context_s * len(state.token_ids)
        return self.prefill_s(state) + outputs * row_s

    def divided(self, chunks: Chunks, seconds: float) -> Mapping[str, float]:
        """tenant -> its part of the seconds that these (request, tokens) take."""
        parts: dict[str, float] = {}
        row_s, context_s = self._row_s, self._context_s
        for state, tokens in chunks:
            tenant = state.request.tenant
            if tokens == 1:
                added_s = row_s + context_s * state.num_computed_tokens
            else:
                added_s = self._prices.prefill_s(tokens, state.num_computed_tokens)
            parts[tenant] = parts.get(tenant, 0.0) + added_s
        if not any(parts.values()):  # a model may price small chunks at nothing
            for state, tokens in chunks:
                parts[state.request.tenant] += tokens
        scale = seconds / sum(parts.values())
        return {tenant: scale * part for tenant, part in parts.items()}


class DeviceTime:
    """What the tenants use of the device.

    of: class -> its shares.
    costs: what requests add to steps.
    """

    def __init__(self, weights: Mapping[str, float], model: CostModel, most_tokens: int) -> None:
        """weights: as in TenantShares. model, most_tokens: as in StepCosts."""
        self.of: Mapping[ServiceClass, TenantShares] = {
            cls: TenantShares(weights) for cls in ServiceClass
        }
        self.costs = StepCosts(model, most_tokens)
        self._charges: list[tuple[TenantShares, str, float]] = []  # of the latest step

    def note_waiting(self, queues: Queues) -> None:
        """Before a step is chosen: which tenants have waiting requests."""
        for service_class, shares in self.of.items():
            shares.set_waiting(queues.waiting_of[service_class].keys())

    def charge(self, parts: Mapping[ServiceClass, tuple[Chunks, float]], queues: Queues) -> None:
        """A step is going to run. parts: by class, its chunks and their predicted seconds. queues:
        before its requests leave them."""
        self._charges.clear()
        for service_class, (chunks, seconds) in parts.items():
            if not chunks:
                continue
            shares, waiting_of = self.of[service_class], queues.waiting_of[service_class]
            if len(queues.open_of[service_class]) == 1:
                used_s: Mapping[str, float] = {chunks[0][0].request.tenant: seconds}
            else:
                used_s = self.costs.divided(chunks, seconds)
            for tenant, part_s in used_s.items():
                shares.charge(tenant, part_s)
                self._charges.append((shares, tenant, part_s))
            started = [state.request.tenant for state, _ in chunks if not state.running]
            for tenant, count in Counter(started).items() if started else ():
                if count == waiting_of[tenant]:
                    shares.stop_waiting(tenant)

    def take_back(self, share: float = 1.0) -> None:
        """The latest step was aborted, or suspended when this share was left: so much of its charge
        is void."""
        for shares, tenant, seconds in self._charges:
            shares.charge(tenant, -share * seconds)
        self._charges.clear()
