"""The mechanisms of the scheduler, and how ablation.py leaves each one out.

A mechanism is left out by other options, by patches of named constants and methods, or by both.
The scheduler has no switches for this. A patch that names something that no longer exists fails, so
a mechanism that is deleted from the scheduler has to be deleted here as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from bros.core import request
from bros.core.config import MAX_RT_SLOWDOWN
from bros.core.request import ServiceClass
from bros.scheduler import build, memory, packing
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.memory import StepMemory
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.packing import _Packer
from bros.scheduler.policies import best_effort_order, bros, pressure
from bros.scheduler.policies.best_effort_order import BestEffortOrder
from bros.scheduler.policies.bros import AdaptiveBatchSize, BrosPolicy, OverloadGuard, UrgentOrder
from bros.scheduler.state import Queues, Rank, RequestState

Patch = tuple[object, str, object]
"""(a module or class, name of its attribute, what the attribute is instead)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mechanism:
    """One mechanism.

    name: in tables.
    part: packing, policy, batch size, cost model, memory, or admission.
    without: what the scheduler does if it is left out.
    options: options of the engine that leave it out.
    patches: what is replaced in the scheduler.
    kept: why it stays although no load needs it.
    """

    name: str
    part: str
    without: str
    options: Mapping[str, Any] = field(default_factory=dict)
    patches: Sequence[Patch] = ()
    kept: str = ""

    @contextlib.contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave it out of every scheduler that is built and used within the context."""
        with contextlib.ExitStack() as stack:
            for owner, name, instead in self.patches:
                stack.enter_context(patch.object(owner, name, instead))
            yield


def _rules(**changes: Any) -> Patch:
    """Other switches of packing.Rules."""
    rules = build._rules
    return build, "_rules", lambda *args: dataclasses.replace(rules(*args), **changes)


def _always(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _fixed(value: Any) -> property:
    """An attribute that always has this value, whatever is assigned to it."""
    return property(lambda self: value, lambda self, assigned: None)


# ---- Packing.


def _bind_without_just_possible(
    bind: Callable[..., None], packer: _Packer[Any], item: Any, finish_s: float, due_s: float
) -> None:
    """A token that is on time only without the safety margin counts as lost."""
    just = due_s < finish_s <= due_s * packer._safety_factor
    bind(packer, item, math.inf if just else finish_s, due_s)


def _wrapped(owner: Any, name: str, wrapper: Callable[..., Any]) -> Patch:
    """A method replaced by `wrapper`, which gets the method first and then its arguments."""
    method = getattr(owner, name)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    return owner, name, replaced


def _for_one_newcomer(
    yields: Callable[..., bool],
    policy: BrosPolicy,
    packing: Any,
    began_s: float,
    newcomers: Sequence[Any],
    *args: Any,
) -> bool:
    return any(yields(policy, packing, began_s, [each], *args) for each in newcomers)


def _with_the_usual_margin(yields: Callable[..., bool], policy: BrosPolicy, *args: Any) -> bool:
    with patch.object(StepTimePredictor, "rare_share", 1.0):
        return yields(policy, *args)


def _for_as_long_as_it_may(let_wait: Callable[..., None], packing: Any, gaps: float) -> None:
    let_wait(packing, bros._GAPS_IF_YIELDING)


_OTHER_SEEDS = "with nine other seeds it costs something: "

PACKING = (
    Mechanism(
        name="chunked prompts",
        part="packing",
        without="prompts are taken whole",
        patches=[_rules(chunked=False)],
    ),
    Mechanism(
        name="passing over",
        part="packing",
        without="the first urgent candidate that does not fit ends the step (lines 11-12)",
        patches=[_rules(early_return=True)],
    ),
    Mechanism(
        name="due rows exceed the batch size",
        part="packing",
        without="the batch size also bounds decode rows that are due before the next step",
        patches=[_rules(strict_rows=True)],
        kept=(
            "without it attainment collapses now and then: from 91 to 46 and from 79 to 40 % "
            "with two of nine seeds of `long prompts`, from 97 to 85 with one of `tight`"
        ),
    ),
    Mechanism(
        name="replacement",
        part="packing",
        without="best-effort work never takes the row of a real-time request (lines 25-32)",
        patches=[_rules(replace=False)],
        kept=_OTHER_SEEDS + "`relegated`, throughput -49.5 %; it is the paper's",
    ),
    Mechanism(
        name="smallest chunk",
        part="packing",
        without="chunks of one token are allowed, instead of 16",
        patches=[_rules(min_chunk=1)],
        kept=(
            "the share is paid in pieces of this size, and a real step has costs of each "
            "piece that the profiles do not know"
        ),
    ),
    Mechanism(
        name="late prompts in short steps",
        part="packing",
        without="a prompt that is late in any case may fill the step up to the others' deadlines",
        patches=[(_Packer, "_is_hopeless", _always(False))],
    ),
    Mechanism(
        name="patient prompts in short steps",
        part="packing",
        without="a prompt that is due much later may fill the step up to the others' deadlines",
        patches=[(packing, "_PATIENT_STEPS", math.inf)],
    ),
    Mechanism(
        name="task groups in short steps",
        part="packing",
        without="prompts of task groups may fill the step up to the others' deadlines",
        patches=[(RequestState, "patient", property(lambda self: False, lambda self, value: None))],
        kept=(
            "measured on a server: 97.3 instead of 96.2 % of the chats beside sessions "
            "(decision 12)"
        ),
    ),
    Mechanism(
        name="just possible tokens",
        part="packing",
        without="a token that is on time only without the safety margin does not end the step",
        patches=[_wrapped(_Packer, "_bind", _bind_without_just_possible)],
        kept=(
            "best-effort work makes no first token late that is possible "
            "(tests/scheduler/test_packing.py)"
        ),
    ),
    Mechanism(
        name="copies are predicted",
        part="packing",
        without="the time of copies to the host is not predicted",
        patches=[(StepMemory, "is_tight", _always(False))],
        kept=(
            "with nine other seeds, `long prompts`, p99 gap +7 %, attainment -1.5 points "
            "(95 % interval: -3.4 to 0.4)"
        ),
    ),
)


# ---- The order of real-time requests.


def _renew_running_only(
    renew: Callable[..., None], order: UrgentOrder, running: Any, queues: Queues, now: float
) -> None:
    renew(order, running, Queues(), now)


def _without_turn(turn: int) -> Patch:
    """No step is the turn at `turn` of _TURN_STEPS."""

    def order(
        method: Any, self: UrgentOrder, running: Any, queues: Queues, step: int, *rest: float
    ) -> Any:
        return method(self, running, queues, step + (step % bros._TURN_STEPS == turn), *rest)

    return _wrapped(UrgentOrder, "order", order)


def _without_soon(method: Any, *args: Any) -> Any:
    *others, _ = args
    return method(*others, -math.inf)


URGENT = (
    Mechanism(
        name="rows that are due soon",
        part="policy",
        without="decode rows come by their deadline alone, behind prompts that fill the step",
        patches=[_wrapped(UrgentOrder, "order", _without_soon)],
        kept=(
            "streams beside a flood of prompts keep the gap objective "
            "(tests/scheduler/test_policies.py)"
        ),
    ),
    Mechanism(
        name="late deadlines are renewed",
        part="policy",
        without="a lost deadline stays, so that the latest token comes first (edf)",
        options={"late": "edf"},
    ),
    Mechanism(
        name="late first tokens wait",
        part="policy",
        without="waiting requests keep their place although their first token is late",
        patches=[_wrapped(UrgentOrder, "renew", _renew_running_only)],
    ),
    Mechanism(
        name="turns of late requests",
        part="policy",
        without="no step begins with the request that has been late for longest",
        patches=[_without_turn(0)],
    ),
    Mechanism(
        name="turns of preempted streams",
        part="policy",
        without="no step begins with the oldest preempted stream",
        patches=[_without_turn(bros._TURN_STEPS // 2)],
        kept="no stream that lost its memory waits for ever (tests/scheduler/test_policies.py)",
    ),
    Mechanism(
        name="time to start over",
        part="policy",
        without="a request that starts over gets hardly more time than its prompt takes",
        patches=[(bros, "_RESTART_MARGIN", 1.01)],
        kept="a deadline that leaves less is lost at once, again and again",
    ),
    Mechanism(
        name="lead over the pace",
        part="policy",
        without="each token is due one interval after the last, however far ahead a request is",
        patches=[(request, "GAP_IN_INTERVALS", 1.0)],
    ),
    Mechanism(
        name="bounded lead",
        part="policy",
        without="a request that is ahead of its pace may wait until it is on pace",
        patches=[(request, "GAP_IN_INTERVALS", 1e6)],
    ),
)


# ---- The time that best-effort work gets.


TIME = (
    Mechanism(
        name="bound on best-effort steps",
        part="policy",
        without="steps with best-effort work may take the whole TTFT objective (--rt-wait 1)",
        options={"rt_wait": 1.0},
    ),
    Mechanism(
        name="tight objectives",
        part="policy",
        without="best-effort steps are bounded by the default TTFT objective alone",
        patches=[(bros, "_TIGHT_FOR_S", -1.0)],
    ),
    Mechanism(
        name="best-effort steps within the pace",
        part="policy",
        without="best-effort steps may be longer than the shortest TPOT objective",
        patches=[(BrosPolicy, "_pace_bound_s", _always(math.inf))],
        kept=_OTHER_SEEDS + "`tight`, attainment -1.2 points, p99 gap +11.8 %",
    ),
    Mechanism(
        name="less best-effort work in full memory",
        part="policy",
        without="best-effort work gets as much time when real-time requests fill the memory",
        patches=[(BrosPolicy, "_best_effort_share", _always(1.0))],
        kept=(_OTHER_SEEDS + "`full memory`, attainment -0.7 points; `overload`, p99 TTFT +16.5 %"),
    ),
    Mechanism(
        name="guaranteed share",
        part="policy",
        without="best-effort work has no credit (--be-share 0)",
        options={"be_share": 0.0},
    ),
    Mechanism(
        name="target slowdown",
        part="policy",
        without="only the objectives bound how much best-effort work slows down streams "
        "(--rt-slowdown 1000)",
        options={"rt_slowdown": MAX_RT_SLOWDOWN},
    ),
    Mechanism(
        name="pressure",
        part="policy",
        without="streams keep the target slowdown, whatever best-effort work needs",
        patches=[(pressure, "_within_s", _always(1e9)), (pressure, "_PATIENCE_S", 1e9)],
    ),
    Mechanism(
        name="half of deadlines",
        part="policy",
        without="best-effort work is in a hurry only if it needs all the time until its deadline",
        patches=[(pressure, "_DEADLINE_PART", 1.0)],
    ),
    Mechanism(
        name="reserves of streams",
        part="policy",
        without="best-effort work fills steps up to the interval of streams that have no lead",
        patches=[(packing, "_FOR_RESERVES", 0.0)],
        kept=(
            "beside an endless backlog on two cores, 40 of 2288 streams (int4) and 209 of 2296 "
            "(fp32) miss their pace without it, 0 and 21 with it (decision 26)"
        ),
    ),
    Mechanism(
        name="saved seconds",
        part="policy",
        without="what best-effort work may add to a step and does not is lost to it",
        patches=[(BrosPolicy, "_save", _always(None))],
    ),
    Mechanism(
        name="steps that yield",
        part="policy",
        without="no running step yields to an arrival",
        patches=[_rules(aborts_steps=False)],
    ),
    Mechanism(
        name="bounded lost time",
        part="policy",
        without="any share of the time may be lost",
        patches=[(bros, "_LOST_SHARE", math.inf), (bros, "_MAX_LOST_S", math.inf)],
        kept="it bounds what encoders and the scoring of prompts lose, of which no load has any: "
        "27 % without it (tests/scheduler/test_suspended.py)",
    ),
    Mechanism(
        name="newcomers together",
        part="policy",
        without="whether a step yields is asked for each newcomer as if it came alone",
        patches=[_wrapped(BrosPolicy, "yields", _for_one_newcomer)],
    ),
    Mechanism(
        name="margin of newcomers",
        part="policy",
        without="a step yields only if a first token would miss its usual margin",
        patches=[_wrapped(BrosPolicy, "yields", _with_the_usual_margin)],
        kept="where a few steps take up to 2.2 times as long, 6 instead of 23 of 9,445 chats that "
        "come in pairs are late (decision 5)",
    ),
    Mechanism(
        name="yielding may delay streams",
        part="policy",
        without="a step yields only if no stream misses its deadline by that",
        patches=[(bros, "_latest_s", lambda state, gaps=1.0: state.deadline_s)],
    ),
    Mechanism(
        name="bounded delay by yielding",
        part="policy",
        without="yielding may delay a stream for any time",
        patches=[(bros, "_latest_s", lambda state, gaps=1.0: math.inf)],
        kept=(
            "no stream stalls for longer than 2.5 intervals by yielding "
            "(tests/scheduler/test_abort_step.py)"
        ),
    ),
    Mechanism(
        name="gaps kept by yielding",
        part="policy",
        without="streams whose step yields wait for as long as they may, also if there is time",
        patches=[_wrapped(bros, "_let_wait", _for_as_long_as_it_may)],
        kept="85 instead of 66 % of the streams have no gap beyond their objective (decision 5), "
        "of which no figure here is a measure",
    ),
)


# ---- The order of best-effort requests.


class _ByArrival(BestEffortOrder):
    def key(self, state: RequestState, now: float) -> Rank:
        return (state.record.arrival_s, state.arrival_index)


def _order_without(**hints: Any) -> Patch:
    """The order as if requests had these hints."""

    class Order(BestEffortOrder):
        def key(self, state: RequestState, now: float) -> Rank:
            request = state.request
            state.request = dataclasses.replace(
                request, hints=dataclasses.replace(request.hints, **hints)
            )
            try:
                return super().key(state, now)
            finally:
                state.request = request

    return build, "BestEffortOrder", Order


ORDER = (
    Mechanism(
        name="best-effort start order",
        part="policy",
        without="best-effort requests start in order of arrival",
        patches=[(build, "BestEffortOrder", _ByArrival)],
    ),
    Mechanism(
        name="programs in order",
        part="policy",
        without="best-effort requests of a program that has begun do not go first",
        patches=[_order_without(program="")],
        kept="programs end earlier in sessions (decision 12)",
    ),
    Mechanism(
        name="task groups first",
        part="policy",
        without="best-effort requests of task groups do not go first",
        patches=[_order_without(group=None)],
        kept="a client waits for what follows them (decision 12)",
    ),
    Mechanism(
        name="deepest calls first",
        part="policy",
        without="calls of a program are not ordered by depth",
        patches=[_order_without(depth=0)],
        kept="as for programs",
    ),
    Mechanism(
        name="common prefixes together",
        part="policy",
        without="best-effort requests with a common prefix do not start next to each other",
        patches=[(best_effort_order, "_PREFIX_TOKENS", 10**9)],
    ),
    Mechanism(
        name="pressing deadlines",
        part="policy",
        without="best-effort requests with a deadline do not go first when it comes near",
        patches=[(BrosPolicy, "_move_pressing", _always(None))],
    ),
    Mechanism(
        name="rows to restore come last",
        part="policy",
        without="best-effort rows that must be restored come in order of arrival",
        patches=[(bros, "_tokens_to_restore", _always(0))],
        kept="line 17 of the published algorithm",
    ),
)


# ---- Adaptive batch size.


def _largest(initial: int, most: int, growth: str) -> AdaptiveBatchSize:
    return AdaptiveBatchSize(most, most, growth)


class _WithoutSlowStart(AdaptiveBatchSize):
    def __init__(self, initial: int, most: int, growth: str) -> None:
        super().__init__(initial, most, growth)
        self._slow_start = False


class _WithoutHalving(AdaptiveBatchSize):
    def __init__(self, initial: int, most: int, growth: str) -> None:
        super().__init__(initial, most, growth)
        self._halves = False


BATCH = (
    Mechanism(
        name="adaptive batch size",
        part="batch size",
        without="as many rows as --max-num-seqs, always",
        patches=[(bros, "AdaptiveBatchSize", _largest)],
    ),
    Mechanism(
        name="slow start",
        part="batch size",
        without="the batch size grows by one row from the beginning",
        patches=[(bros, "AdaptiveBatchSize", _WithoutSlowStart)],
    ),
    Mechanism(
        name="halving",
        part="batch size",
        without="a violation resets the batch size to B0",
        patches=[(bros, "AdaptiveBatchSize", _WithoutHalving)],
        kept="the paper's reset is the option --batch-growth additive",
    ),
    Mechanism(
        name="never below the running requests",
        part="batch size",
        without="the batch size may fall below the number of running real-time requests",
        patches=[(BrosPolicy, "_rows", lambda self, running: self._batch.rows)],
        kept=(
            "as for due rows: from 91 to 53 and from 79 to 39 % with two of nine seeds of "
            "`long prompts`"
        ),
    ),
    Mechanism(
        name="only rows late because of others",
        part="batch size",
        without="every late decode row and first token is a violation",
        patches=[(_Packer, "_late_because_of_others", _always(True))],
    ),
)


# ---- Corrections of the cost model.


class _OneFactor(StepTimePredictor):
    """Prefill and decode are corrected by one factor."""

    def observe(self, load: StepLoad, actual_s: float) -> None:
        super().observe(load, actual_s)
        self.rho_decode = self.rho_prefill = (self.rho_decode + self.rho_prefill) / 2


class _FixedMargins(StepTimePredictor):
    def _follow(self, ratio: float) -> None:
        pass


COST = (
    Mechanism(
        name="online correction",
        part="cost model",
        without="predictions are not corrected by measured step times",
        patches=[(build, "StepTimePredictor", partial(StepTimePredictor, alpha=0.0))],
    ),
    Mechanism(
        name="a factor per phase",
        part="cost model",
        without="one factor corrects prefill and decode",
        patches=[(build, "StepTimePredictor", _OneFactor)],
        kept="BROS 3.1; in these loads a slow machine is equally slow in both",
    ),
    Mechanism(
        name="safety margin",
        part="cost model",
        without="steps are bounded by their expected times, but for the margin of first tokens",
        patches=[(build, "StepTimePredictor", partial(StepTimePredictor, max_factor=1.0))],
    ),
    Mechanism(
        name="learnt margins",
        part="cost model",
        without="the safety margin is always 5 %, and that of first tokens 10 %",
        patches=[(build, "StepTimePredictor", _FixedMargins)],
    ),
    Mechanism(
        name="larger margin of first tokens",
        part="cost model",
        without="first tokens have the margin of all tokens, in packing and when steps yield",
        patches=[(StepTimePredictor, "rare_share", 1.0)],
    ),
)


# ---- Memory: admission of new requests, and the choice of victims.


def _victims_as_if_on_time(
    victims: Callable[..., Iterable[RequestState]], self: StepMemory, state: RequestState
) -> Iterator[RequestState]:
    late, state.late = state.late, False
    found = list(victims(self, state))
    state.late = late
    return iter(found)


def _oldest_first(
    victims: Callable[..., Iterable[RequestState]], self: StepMemory, state: RequestState
) -> Iterator[RequestState]:
    found = list(victims(self, state))
    found.sort(key=lambda victim: (victim.service_class is ServiceClass.RT, victim.arrival_index))
    return iter(found)


class _Unlearnt(ClassCounters):
    mean_output_tokens = _fixed(128.0)


def _one_kind_of_rows(init: Callable[..., None], self: StepMemory, *args: Any, **kw: Any) -> None:
    init(self, *args, **kw)
    self._free_rows[ServiceClass.RT] = self._free_rows[ServiceClass.BE]


MEMORY = (
    Mechanism(
        name="new requests preempt",
        part="memory",
        without="new real-time requests wait until memory is free",
        patches=[(BrosPolicy, "new_requests_preempt", False)],
    ),
    Mechanism(
        name="late new requests spare real-time ones",
        part="memory",
        without="a late new request may preempt younger real-time requests",
        patches=[_wrapped(StepMemory, "_victims", _victims_as_if_on_time)],
    ),
    Mechanism(
        name="the newest is the victim",
        part="memory",
        without="of each class, the oldest request is preempted first",
        patches=[_wrapped(StepMemory, "_victims", _oldest_first)],
    ),
    Mechanism(
        name="expected growth",
        part="memory",
        without="best-effort requests are admitted as soon as their prompt fits",
        patches=[(StepMemory, "_fits_with_growth", _always(True))],
        kept=(
            "with best-effort answers of 200 to 500 tokens in 14,400 tokens of KV memory, "
            "throughput falls by 18 %"
        ),
    ),
    Mechanism(
        name="spare blocks",
        part="memory",
        without="each holder has half a block beside those of its expected tokens, for rounding",
        patches=[(memory, "_SPARE_BLOCKS", 0.5)],
    ),
    Mechanism(
        name="output lengths are learnt",
        part="memory",
        without="each output is expected to have 128 tokens",
        patches=[(build, "ClassCounters", _Unlearnt)],
    ),
    Mechanism(
        name="rows of best-effort work do not count",
        part="memory",
        without="best-effort requests that hold memory take real-time requests' --max-num-seqs",
        patches=[_wrapped(StepMemory, "__init__", _one_kind_of_rows)],
    ),
    Mechanism(
        name="waiting for a producer",
        part="memory",
        without="a new request computes a prefix itself although another one computes it",
        patches=[(StepMemory, "_should_wait_for_prefix", _always(False))],
    ),
    Mechanism(
        name="waiting in time only",
        part="memory",
        without="waiting for a producer is taken to need no more than the predicted time",
        patches=[(memory, "_WAIT_MARGIN", 0.0)],
        kept=(
            "no request waits for a producer beyond its own deadline "
            "(tests/scheduler/test_prefixes.py)"
        ),
    ),
    Mechanism(
        name="copies of preempted KV",
        part="memory",
        without="preempted KV is recomputed (--on-pressure recompute)",
        options={"on_pressure": "recompute"},
    ),
    Mechanism(
        name="blocks of both classes",
        part="memory",
        without="blocks have one owner (--kv-layout plain)",
        options={"kv_layout": "plain"},
        kept="the option --kv-layout; measured in benchmarks/results/paper.md (figure 13)",
    ),
)


# ---- Overload: only with --overload relegate or reject.


GUARD = (
    Mechanism(
        name="relegation",
        part="admission",
        without="requests that cannot be on time are served as real-time (--overload late)",
        options={"overload": "late"},
        kept="the option --overload: a client learns on arrival that it has to wait",
    ),
    Mechanism(
        name="wait for room",
        part="admission",
        without="the estimate assumes that a row and memory are free",
        patches=[(OverloadGuard, "_start_wait_s", _always(0.0))],
        kept="the estimate that a client is told",
    ),
    Mechanism(
        name="share of prompts",
        part="admission",
        without="the estimate assumes that prompts get all time",
        patches=[(bros, "_MIN_SHARE", 1.0)],
        kept="as before",
    ),
)

MECHANISMS = {
    mechanism.name: mechanism
    for group in (PACKING, URGENT, TIME, ORDER, BATCH, COST, MEMORY, GUARD)
    for mechanism in group
}


DELETED: Sequence[tuple[str, str, str, str]] = (
    ("no abort near the end", "a step may be aborted although less than a fifth of it is left",
     "", ""),
    ("credit for aborted steps", "the time of aborted steps earns best-effort work no credit",
     "", "one-token flood: attainment +2.8 points"),
    ("room for a usual prompt",
     "best-effort steps leave half the TTFT objective, however long prompts are",
     "cpu, long: attainment -0.4 points", "slow machine: throughput +22 %"),
    ("half more time for deadlines",
     "a best-effort request presses only when its work takes all time that is left",
     "deadlines: p99 wait +12.9 %", "deadlines: deadlines +9.6 points"),
    ("only credit beside late prompts",
     "best-effort work is added beside a prompt whose first token is just lost", "", ""),
    ("early prefills only if worth it", "early prefills take all time that is left", "", ""),
    ("long answers go on",
     "the estimate assumes that an answer longer than the mean ends at once", "", ""),
    ("shortest prompts first", "running best-effort prompts come in order of arrival", "", ""),
    ("blocks for the rest of new prompts",
     "several new requests of a step may count on the same blocks", "", ""),
    ("a block for each holder",
     "new requests are admitted although others have no block to grow into",
     "full memory: throughput -6.4 %",
     "overload: attainment +3.0 points; overload: p99 TTFT -18.5 %; lost memory: throughput "
     "+10.6 %; batch prefixes: throughput +9.5 %"),
)  # fmt: skip
"""Mechanisms that were deleted: (name, what was without it, costs, gains)."""
