"""Several engines on one virtual clock, and a router before them.

    a request comes -> Fleet.route -> an engine's queue -> steps -> its tokens -> Fleet is told

Events happen in the order of their times, and of those at one time, first what ended, then what is
told, then what comes, then the steps that begin. So nothing is known before it has happened:
the outputs of a step wait for its end, although the engine has computed them at its beginning.
Steps are not given up for newcomers here, as it takes the future to say which.
"""

from __future__ import annotations

import enum
import hashlib
import heapq
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bros.core.clock import ManualClock
from bros.core.errors import OverloadedError, QueueFullError
from bros.core.interfaces import Notice
from bros.core.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    Slo,
)
from bros.engine.engine import Engine
from bros.router.fleet import Fleet
from bros.simulator.prefix_requests import PrefixRequest, prompt_of
from bros.simulator.sim_executor import TOKEN, SimExecutor

_PROGRESS_REQUESTS = 200
NO_SLO = Slo()


class _Event(enum.IntEnum):
    """What happens first at one time."""

    STEP_ENDS = 0
    TOLD = 1
    COMES = 2
    DECIDED = 3
    STEP_BEGINS = 4


@dataclass(slots=True, eq=False)
class SimReplica:
    """An engine with an executor and a clock of its own. number: the router's.

    clock: ahead of the simulation's while a step runs. waiting: come during that step. due: the
    next step is about to begin.
    """

    engine: Engine
    executor: SimExecutor
    clock: ManualClock
    number: int = -1
    stepping: bool = False
    due: bool = False
    waiting: deque[EngineRequest] = field(default_factory=deque)
    outputs: Sequence[RequestOutput] = ()


@dataclass(slots=True)
class FleetRecord:
    """What became of one request; times in seconds after the start.

    arrival_s: when it came, which in a closed loop is found out on the way. cached: tokens of its
    prompt that were there when it began; matched: as many as the router thought.
    """

    request: PrefixRequest
    arrival_s: float
    prompt_tokens: int
    replica: int = -1
    reason: str = ""
    matched: int = 0
    cached: int = 0
    tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None
    finish: FinishReason | None = None
    refused: bool = False

    @property
    def finished(self) -> bool:
        """It got all its tokens."""
        return self.finish is not None and self.finish.complete


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """records by number of the request; all of them have ended. busy_s, steps: by replica."""

    records: Sequence[FleetRecord]
    end_s: float
    busy_s: Sequence[float]
    steps: Sequence[int]
    preemptions: int

    def digest(self) -> str:
        """A hash of every time and place: equal only if two runs were the same to the bit."""
        hashed = hashlib.sha256()
        for r in self.records:
            what = f"{r.replica} {r.reason} {r.matched} {r.cached} {r.tokens} {r.finish}\n"
            hashed.update(what.encode())
            times = (r.arrival_s, r.first_s or -1.0, r.last_s or -1.0)
            hashed.update(struct.pack("<3d", *times))
        return hashed.hexdigest()


class FleetSimulation:
    """One run, until every request has ended. `replicas` are known to `fleet` by their numbers."""

    def __init__(
        self,
        replicas: Sequence[SimReplica],
        fleet: Fleet,
        requests: Sequence[PrefixRequest],
        *,
        seed: int,
        notice_s: float = 0.05,
        decision_s: float = 0.0,
        slo: Slo = NO_SLO,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        """seed: of the prompts. notice_s: after so long the router hears what a replica says.
        decision_s: what the router takes for one request; it decides one after the other. slo: of
        the requests.
        progress: told the share that is done, now and then.
        """
        self._replicas = {replica.number: replica for replica in replicas}
        self._fleet = fleet
        self._requests = requests
        self._seed = seed
        self._notice_s = notice_s
        self._decision_s = decision_s
        self._slo = slo
        self._undecided: deque[int] = deque()
        self._progress = progress
        self._records: dict[str, FleetRecord] = {}
        self._followers: dict[int, list[int]] = {}
        self._num_ended = 0
        self._sampling: dict[int, SamplingParams] = {}
        self._events: list[tuple[float, _Event, int, object]] = []
        self._happened = 0
        self._now = 0.0
        self._handlers: dict[_Event, Callable[..., None]] = {
            _Event.STEP_ENDS: self._end_step,
            _Event.TOLD: self._tell,
            _Event.COMES: self._come,
            _Event.DECIDED: self._deliver,
            _Event.STEP_BEGINS: self._begin_step,
        }

    def run(self) -> FleetResult:
        """Call it once."""
        for number, request in enumerate(self._requests):
            if request.follows is None:
                self._expect(request.time_s, _Event.COMES, number)
            else:
                self._followers.setdefault(request.follows, []).append(number)
        while self._events and self._num_ended < len(self._requests):
            self._now, kind, _, what = heapq.heappop(self._events)
            self._handlers[kind](what)
        replicas = self._replicas.values()
        stats = [replica.engine.stats() for replica in replicas]
        return FleetResult(
            records=[self._records[request_id(n)] for n in range(len(self._requests))],
            end_s=self._now,
            busy_s=[replica.executor.busy_s for replica in replicas],
            steps=[replica.executor.steps for replica in replicas],
            preemptions=sum(c.preemptions for each in stats for c in each.by_class.values()),
        )

    def _expect(self, time_s: float, kind: _Event, what: object) -> None:
        """In the order in which they were thought of, if time and kind are the same."""
        heapq.heappush(self._events, (time_s, kind, self._happened, what))
        self._happened += 1

    def _come(self, number: int) -> None:
        """A request has come; it waits until the router has decided for those before it."""
        request = self._requests[number]
        record = FleetRecord(request, self._now, request.prompt_tokens)
        self._records[request_id(number)] = record
        self._undecided.append(number)
        if len(self._undecided) == 1:
            self._decide()

    def _decide(self) -> None:
        """The first one is routed, with what is known now."""
        request = self._engine_request(self._undecided[0])
        (decision,) = self._fleet.route([request], self._now)
        record = self._records[request.request_id]
        record.replica, record.reason = decision.replica, decision.reason
        record.matched = decision.matched
        if self._decision_s:
            self._expect(self._now + self._decision_s, _Event.DECIDED, request)
        else:
            self._deliver(request)

    def _deliver(self, request: EngineRequest) -> None:
        """It has come to its replica."""
        self._undecided.popleft()
        replica = self._replicas[self._records[request.request_id].replica]
        replica.waiting.append(request)
        self._wake(replica)
        if self._undecided:
            self._decide()

    def _engine_request(self, number: int) -> EngineRequest:
        request = self._requests[number]
        sampling = self._sampling.get(request.output_tokens)
        if sampling is None:
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
            )
            self._sampling[request.output_tokens] = sampling
        return EngineRequest(
            request_id=request_id(number),
            prompt_token_ids=prompt_of(request, self._seed),
            sampling=sampling,
            service_class=request.service_class,
            slo=self._slo,
            arrival_s=self._records[request_id(number)].arrival_s,
        )

    def _wake(self, replica: SimReplica) -> None:
        if not replica.stepping and not replica.due:
            replica.due = True
            self._expect(self._now, _Event.STEP_BEGINS, replica)

    def _begin_step(self, replica: SimReplica) -> None:
        replica.due = False
        replica.clock.advance(max(0.0, self._now - replica.clock.now()))
        while replica.waiting:
            self._submit(replica, replica.waiting.popleft())
        if replica.engine.has_work:
            replica.outputs = replica.engine.step()
            replica.stepping = True
            self._expect(replica.clock.now(), _Event.STEP_ENDS, replica)

    def _submit(self, replica: SimReplica, request: EngineRequest) -> None:
        try:
            replica.engine.submit(request)
        except (QueueFullError, OverloadedError):
            self._records[request.request_id].refused = True
            self._gone(request.request_id, cached=False)

    def _end_step(self, replica: SimReplica) -> None:
        replica.stepping = False
        for output in replica.outputs:
            self._take(output)
        replica.outputs = ()
        idle = not replica.engine.has_work
        notice = replica.engine.due_notice()
        if notice is not None:
            told = (replica.number, notice)
            self._expect(self._now + self._notice_s, _Event.TOLD, told)
        if replica.waiting or not idle:
            self._wake(replica)

    def _take(self, output: RequestOutput) -> None:
        record = self._records[output.request_id]
        record.tokens += len(output.token_ids)
        if output.token_ids:
            record.last_s = self._now
            if record.first_s is None:
                record.first_s, record.cached = self._now, output.cached_tokens
                self._fleet.begun(output.request_id, output.cached_tokens, self._now)
        if output.finish_reason is not None:
            record.finish = output.finish_reason
            self._gone(output.request_id, cached=record.finished)

    def _gone(self, name: str, *, cached: bool) -> None:
        """It is over; who waited for its end comes."""
        answer = [TOKEN] * self._records[name].tokens
        self._fleet.ended(name, answer, self._now, cached=cached)
        number = int(name)
        self._num_ended += 1
        for follower in self._followers.pop(number, ()):
            time_s = max(self._now, self._requests[follower].time_s)
            self._expect(time_s, _Event.COMES, follower)
        if self._progress is not None and self._num_ended % _PROGRESS_REQUESTS == 0:
            self._progress(self._num_ended / len(self._requests))

    def _tell(self, told: tuple[int, Notice]) -> None:
        number, notice = told
        self._fleet.take(number, notice, self._now)


def request_id(number: int) -> str:
    """The name of the request with this number."""
    return str(number)
