"""Admission: whether a new request may queue, as which class, and with which objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bros.core.errors import (
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from bros.core.request import EngineRequest, Pooling, ServiceClass, Slo, check_token_ids
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.state import RequestState, arrival_s

_ROUNDING_S = 1e-9


def objectives(
    request: EngineRequest, service_class: ServiceClass, default: Slo, now: float
) -> Slo:
    """The objectives of a request that arrives now, if it is served as `service_class`.

    A best-effort request has at most a deadline for the whole answer, and says how much it may slow
    down streams. A real-time request has objectives for TTFT and TPOT as well, which its deadline
    may tighten (see `paced`); a resumed one has only the rest of the time for the rest of its
    tokens.
    """
    asked = request.slo
    if service_class is ServiceClass.BE:
        return replace(asked, ttft_s=None, tpot_s=None, gap_s=None)
    left_s = asked.deadline_s
    if request.resumed and left_s is not None:
        left_s += arrival_s(request, now) - now
    most_tokens = max(1, (request.sampling.max_tokens or 1) - request.resumed)
    found = paced(replace(asked, deadline_s=left_s), most_tokens, default)
    return replace(found, deadline_s=asked.deadline_s)


def paced(asked: Slo, most_tokens: int, default: Slo) -> Slo:
    """The objectives asked for, or the defaults.

    If the last of `most_tokens` would come after the deadline, one factor tightens TTFT and TPOT,
    unless the deadline has passed already. The default for the longest gap holds for the default
    pace only.
    """
    ttft_s = asked.ttft_s or default.ttft_s
    tpot_s = asked.tpot_s or default.tpot_s
    due_s = asked.deadline_s
    if due_s is not None and due_s > 0.0 and ttft_s is not None and tpot_s is not None:
        scale = min(1.0, due_s / (ttft_s + (most_tokens - 1) * tpot_s))
        ttft_s, tpot_s = scale * ttft_s, scale * tpot_s
    gap_s = asked.gap_s or (default.gap_s if tpot_s == default.tpot_s else None)
    found = Slo(ttft_s, tpot_s, due_s, gap_s)
    return replace(found, gap_s=found.longest_gap_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds given by the model, the KV memory and the operator.

    max_model_len: most tokens of prompt and output together; never more than KV memory holds.
    vocab_size: token ids are in [0, vocab_size).
    max_num_seqs: most requests that hold KV memory.
    max_queue: most waiting requests per class, see `check_queue`.
    eos_token_ids: end-of-sequence tokens of the model.
    generates: whether the model can generate tokens; else it only computes embeddings or scores.
    poolings: what it can compute of a text.
    """

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    max_queue: int
    eos_token_ids: frozenset[int] = frozenset()
    generates: bool = True
    poolings: frozenset[Pooling] = frozenset({Pooling.LAST, Pooling.MEAN})

    def check(self, request: EngineRequest) -> None:
        """Raise InvalidRequestError or PromptTooLongError if a request can never be served."""
        prompt = request.prompt_token_ids
        if not prompt:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        self._check_task(request)
        if len(prompt) + (request.samples or request.prefill_only) > self.max_model_len:
            raise PromptTooLongError(len(prompt), self.max_model_len)
        _check_resumed(request)
        params = request.sampling
        check_token_ids("prompt", prompt, self.vocab_size)
        params.check_vocabulary(self.vocab_size)
        if params.stop_token_ids and params.min_tokens:
            stops = self.eos_token_ids.union(params.stop_token_ids)
            if len(stops) >= self.vocab_size:
                raise InvalidRequestError(
                    "stop_token_ids leaves no token to choose before min_tokens.",
                    param="stop_token_ids",
                )

    def _check_task(self, request: EngineRequest) -> None:
        if request.pooling is None and not self.generates:
            raise InvalidRequestError(
                "This model generates no text: it only computes embeddings or scores of texts.",
                param="model",
                code="model_not_supported",
            )
        if request.pooling is not None and request.pooling not in self.poolings:
            raise InvalidRequestError(
                f"This model has no embeddings with the pooling {request.pooling.value!r}."
                if request.pooling is not Pooling.SCORE
                else "This model has no score head.",
                param="model",
                code="model_not_supported",
            )


def _check_resumed(request: EngineRequest) -> None:
    """Raise InvalidRequestError unless `resumed` can be the start of an unfinished answer."""
    resumed, most = request.resumed, request.sampling.max_tokens
    if not 0 <= resumed < len(request.prompt_token_ids):
        raise InvalidRequestError(
            f"resumed must be in [0, {len(request.prompt_token_ids)}), got {resumed}: "
            "a prompt has to come before the answer.",
            param="resumed",
        )
    if resumed and most is not None and resumed >= most:
        raise InvalidRequestError(
            f"resumed ({resumed}) must be less than max_tokens ({most}): the answer is complete.",
            param="resumed",
        )
    if request.prefill_only and resumed:
        raise InvalidRequestError(
            "A prefill-only request has no answer to resume.", param="resumed"
        )


def check_queue(
    waiting: Sequence[RequestState], most: int, tenant: str, counters: ClassCounters, now: float
) -> None:
    """Raise QueueFullError if the queue of a class is full for a tenant.

    When `most` requests wait, a tenant may still queue requests up to its equal share, so that
    others who fill the queue do not lock it out:

        tenants with waiting requests    1      2       3
        share of each                    512    256     170       most = 512

    Then at most most * (1 + 1/2 + 1/3 + ...) requests wait.
    """
    if len(waiting) < most:
        return
    by_tenant = Counter(state.request.tenant for state in waiting)
    num_tenants = len(by_tenant.keys() | {tenant})
    if by_tenant[tenant] >= max(1, most // num_tenants):
        raise QueueFullError(len(waiting), counters.retry_after_s(now))


def promoted_objectives(state: RequestState, asked: Slo, default: Slo, now: float) -> Slo:
    """The objectives of a best-effort request that becomes real-time, counted from `now`.

    If `asked` has no deadline for the whole answer, the request keeps its old one: what is left of
    it, which is negative if it has passed.
    """
    before_s = state.slo.deadline_s
    if asked.deadline_s is None and before_s is not None:
        left_s = state.record.objectives_from_s + before_s - now
        asked = replace(asked, deadline_s=left_s)
    longest = state.request.sampling.max_tokens or 1
    return paced(asked, max(1, longest - state.num_outputs), default)


def tightened_objectives(state: RequestState, asked: Slo, default: Slo, now: float) -> Slo:
    """The objectives of a real-time request that has to meet those that are asked for `now`, too:
    the stricter ones, counted from when its own began to hold."""
    own, more = state.slo, promoted_objectives(state, asked, default, now)
    since_s = now - state.record.objectives_from_s
    first_s = None if state.num_outputs or more.ttft_s is None else since_s + more.ttft_s
    whole_s = None if more.deadline_s is None else since_s + more.deadline_s
    return replace(
        own,
        ttft_s=_stricter(own.ttft_s, first_s),
        tpot_s=_stricter(own.tpot_s, more.tpot_s),
        deadline_s=_stricter(own.deadline_s, whole_s),
        gap_s=_stricter(own.gap_s, more.gap_s),
    )


def _stricter(own_s: float | None, more_s: float | None) -> float | None:
    """The smaller time; None is no bound. Rounding errors are no difference."""
    if own_s is None or more_s is None:
        return more_s if own_s is None else own_s
    return more_s if more_s < own_s - _ROUNDING_S else own_s
