"""An open session on the server: its settings, and its records of calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bros.core.interfaces import Placement
from bros.core.request import RequestGroup, ServiceClass
from bros.core.tenants import QuotaHold
from bros.semantic.core.nodes import Call, Level, LlmCall, Variable
from bros.semantic.core.objectives import Needs, awaited_alone
from bros.semantic.core.prompt import (
    PlannedPieces,
    Prompt,
    PromptSharing,
    RequestedPrefixes,
    SharedBeginning,
)
from bros.semantic.core.retention import SessionLimits
from bros.semantic.core.session import Action, SessionStateMachine
from bros.semantic.schema import (
    Criteria,
    PrefixView,
    SharingMode,
    SubmittedCall,
)
from bros.text.generation import Occupancy


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits and times of the session service.

    ttl_s: time after which an idle session expires.
    max_ttl_s: longest TTL that a client can request.
    max_sessions: open sessions of the service.
    max_calls: open calls of a session.
    kept_calls: ended calls of a session that are kept.
    max_variables: variables of a session.
    max_chars: characters of all values of a session, and likewise of all its templates.
    max_labels: labels of a session, see SessionLimits. This many take 1 to 2 s of CPU time, in
        slices.
    max_waiting: waiting gets and streams of the service.
    max_wait_s: longest wait of a get, and its default timeout.
    criteria: default criteria of sessions.
    max_tokens: default of outputs. Without it, an output that no stop condition ends would be
        generated up to the context length.
    pin_s: how long KV stays pinned for the next LLM call of a call, or after a prefill ahead.
    retries: restarts of a reproducible LLM call after engine deaths.
    recovery_s: how long LLM calls wait for a dead engine to recover.
    patience_s: how long an LLM call retries while the engine is overloaded.
    max_gone: ids of ended sessions that are remembered.
    """

    ttl_s: float = 600.0
    max_ttl_s: float = 86_400.0
    max_sessions: int = 1000
    max_calls: int = 10_000
    kept_calls: int = 2_000
    max_variables: int = 50_000
    max_chars: int = 50_000_000
    max_labels: int = 100_000
    max_waiting: int = 10_000
    max_wait_s: float = 3600.0
    criteria: Criteria = Criteria()
    max_tokens: int = 256
    pin_s: float = 60.0
    retries: int = 2
    recovery_s: float = 60.0
    patience_s: float = 600.0
    max_gone: int = 10_000

    def limits(self) -> SessionLimits:
        """The limits of one session."""
        return SessionLimits(
            max_calls=self.max_calls,
            kept_calls=self.kept_calls,
            max_variables=self.max_variables,
            max_value_chars=self.max_chars,
            max_labels=self.max_labels,
        )


CALL_CHARS, VARIABLE_CHARS = 2_000, 500
"""What a call and a variable count for among the characters of a tenant, besides their texts: their
records take 2.8 KB and 0.5 KB. A session may have 50,000 variables without a character."""

ANSWER_CHARS = 500
"""What a call counts for in the answer to a program with a key, which is remembered: 0.4 KB."""

_FORGET_FROM = 100
_FREED_TOGETHER = 500
"""Records of an ended session that are freed at a time; that takes half a millisecond."""

_KEPT_ANSWERS = 8

_KEPT_NAMES = 64
"""Names of plain calls whose KV stays pinned: a client that gives each request a new name would
otherwise pin the KV of all of them until its session ends."""


class LoadMark(NamedTuple):
    """The load of an engine at one time.

    prefilled_s: see the OwnLoad of the session.
    decoded_s: row-seconds of LLM calls of the session that are being decoded.
    others_s: request-seconds of real-time requests that are not of the session.
    """

    prefilled_s: float = 0.0
    decoded_s: float = 0.0
    others_s: float = 0.0


@dataclass(eq=False, slots=True)
class OwnLoad:
    """What the LLM calls of a session have had the engine do, to tell it from load of others.

    prefilled_s: predicted seconds of all their prefills so far.
    decoding: LLM calls that are being decoded.
    open: LLM calls that are real-time requests of the engine.
    """

    prefilled_s: float = 0.0
    decoding: Occupancy = field(default_factory=Occupancy)
    open: Occupancy = field(default_factory=Occupancy)

    def at(self, now: float, open_requests: Occupancy) -> LoadMark:
        """The load at the present time. open_requests: those of all sessions and clients."""
        others_s = open_requests.seconds(now) - self.open.seconds(now)
        return LoadMark(self.prefilled_s, self.decoding.seconds(now), others_s)


@dataclass(eq=False, slots=True)
class LlmCallRecord:
    """State of an LLM call on the engine.

    service_class: its current service class; None until the engine accepts it.
    request_id: id of its latest engine request.
    group: id of its task group when it was submitted.
    text: text generated so far; empty after its end.
    prompt_tokens: length of its prompt.
    requested_tokens: prompt tokens that had been submitted to the engine before: by the session,
        or whole pieces of the prompt by other sessions that share them.
    cached_tokens: prompt tokens that were cached.
    output_tokens: tokens generated so far.
    prefilled_tokens: prompt tokens prefilled ahead.
    attempts: number of submissions that were accepted.
    submitted_s: time of its latest submission, accepted or not; None before.
    promoted: whether it was submitted as best-effort and has become real-time since.
    needs: its needs when the engine was told of them last; None before.
    withdraw: has the engine abort its request, and submits it again by its present label; None
        while the engine has none.
    placement: where the router had placed it when it ended; None before, and without a router.
    started: load of the session at its latest submission.
    decoding: load of the session when it had its first token; None before that and after its end.
    """

    service_class: ServiceClass | None = None
    request_id: str | None = None
    group: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    requested_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefilled_tokens: int = 0
    attempts: int = 0
    submitted_s: float | None = None
    promoted: bool = False
    needs: Needs | None = None
    withdraw: Callable[[], None] | None = None
    placement: Placement | None = None
    started: LoadMark = LoadMark()
    decoding: LoadMark | None = None


@dataclass(eq=False, slots=True)
class CallRecord:
    """State of a call on the engine.

    prompt: its tokens; None after its end, and for calls that the session does not run.
    prefixes: prefixes of the whole prompt, after its end.
    text_chars: characters of its template, see counted_chars.
    counted_tokens: how many tokens of its prompt count for the session.
    shared: how far its prompt begins like those of other calls of the session.
    counted: whether its end is counted in the figures.
    llm_calls: records of its LLM calls by index.
    pinned: ids of engine requests whose KV is pinned for the next LLM call.
    running: number of tasks of its LLM calls.
    prefill: the task that prefills the known prefix of the prompt. Once it has ended, it is let go
        of: if it was cancelled, its error refers to the record.
    next_prefill: the LLM call whose known prefix it prefills next; None if it is not longer.
    lock: held while the prompt is extended, because long texts are encoded on a thread.
    """

    prompt: Prompt | None = None
    prefixes: tuple[PrefixView, ...] = ()
    text_chars: int = 0
    counted_tokens: int = 0
    shared: SharedBeginning = field(default_factory=SharedBeginning)
    counted: bool = False
    llm_calls: dict[int, LlmCallRecord] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    running: int = 0
    prefill: asyncio.Task[None] | None = None
    next_prefill: LlmCall | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def llm_call(self, index: int) -> LlmCallRecord:
        return self.llm_calls.setdefault(index, LlmCallRecord())


STARTS_PER_TURN = 8
"""LLM calls of a session that begin in one turn of the event loop: 4,000 characters, the most that
is encoded on the loop, take about 2 ms, and the loop is not to be blocked for more than 20 ms."""


MAX_TOGETHER = 64
"""LLM calls of a group that are submitted in one turn of the event loop, so that a wide group does
not block it. A router sends later ones where the prefix of the first ones is."""


GROUP_WAIT_S = 0.05
"""How long an LLM call of a group waits at most for others that start with it. Eight prompts of
4,000 characters take 20 ms, so most groups are placed in one decision. Later members are placed
where the prefix of the earlier ones is, or elsewhere if that is sooner."""


class GroupStart:
    """Holds LLM calls of a task group that start together while others prepare their prompts.

    Those that get ready within GROUP_WAIT_S are submitted in one turn of the event loop, so that a
    router, which places what arrives in one turn, places them as one:

        ready      1 2   3 4               5      6 (the last one)
        submitted          |- 1 2 3 4             |- 5 6
                   |- wait |               | wait |

    Where no router places groups as one, nothing is held: an engine adds calls to a running batch
    in each step.
    """

    def __init__(self, llm_calls: Iterable[LlmCall]) -> None:
        self._preparing = set(llm_calls)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._release_at: asyncio.Handle | None = None

    async def ready(self, llm_call: LlmCall) -> None:
        """The LLM call has its prompt: wait for others that have theirs soon."""
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiting.append(waiter)
        if self._release_at is None:
            self._release_at = loop.call_later(GROUP_WAIT_S, self._release)
        self.leave(llm_call)
        await waiter

    def leave(self, llm_call: LlmCall) -> None:
        """Others do not wait for this LLM call any more. May be called twice."""
        if llm_call in self._preparing:
            self._preparing.remove(llm_call)
            if not self._preparing:  # not at once: the last one does not await its waiter yet
                self._release_soon()

    def _release_soon(self) -> None:
        if self._release_at is not None:
            self._release_at.cancel()
        self._release_at = asyncio.get_running_loop().call_soon(self._release)

    def _release(self) -> None:
        self._release_at = None
        for _ in range(min(MAX_TOGETHER, len(self._waiting))):
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
        if self._waiting:
            self._release_soon()


class Subscription:
    """changed: set when one of its variables has changed; its owner clears it.
    which: those that have changed since its owner cleared it, in order.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.which: dict[Variable, None] = {}


class Subscribers:
    """Subscribers to variables."""

    def __init__(self) -> None:
        self._by_variable: dict[str, set[Subscription]] = {}

    def __len__(self) -> int:
        return sum(len(found) for found in self._by_variable.values())

    @contextlib.contextmanager
    def subscribe(self, variables: Iterable[Variable]) -> Iterator[Subscription]:
        """Subscribe to different variables for the duration of the block."""
        made = Subscription()
        ids = [variable.id for variable in variables]
        for each in ids:
            self._by_variable.setdefault(each, set()).add(made)
        try:
            yield made
        finally:
            for each in ids:
                found = self._by_variable[each]
                found.remove(made)
                if not found:
                    del self._by_variable[each]

    def has(self, variable: Variable) -> bool:
        """Whether anything subscribes to the variable."""
        return variable.id in self._by_variable

    def notify(self, variable: Variable) -> None:
        """Wake all subscribers of the variable."""
        for each in self._by_variable.get(variable.id, ()):
            each.which[variable] = None
            each.changed.set()


@dataclass(eq=False, slots=True, weakref_slot=True, kw_only=True)
class ServedSession:
    """An open session.

    id: the id that its tenant uses; reusable after its end.
    uid: unique for all time.
    scope: see SessionService.create.
    shared_with: its `sharing`, see there as well.
    criteria: default criteria of requested values.
    sampling: default sampling parameters of outputs.
    created_s: creation time on the clock of the service.
    created_unix_s: creation time in Unix seconds.
    machine: its state machine with the graph.
    sharing: which requests share the KV of its prompts.
    requested_prefixes: prompt prefixes that were submitted to the engine, or are being prefilled.
    planned: the pieces of the prompts of its calls, submitted to the engine or not.
    held: counts the session to its tenant.
    held_chars: counts its characters to its tenant, see `count_chars`.
    load: what its own LLM calls have had the engine do.
    records: call id -> record.
    pending: actions that are still to be performed, each with the group starts of its batch.
    informing: whether LLM calls are told of set values in the next turn of the event loop.
    abandoned: variables whose waiting clients have gone since the last turn of the event loop.
    tasks: tasks of running LLM calls.
    settled: subscribers that wait for values.
    streamed: subscribers that stream values.
    timer: calls `tick` of the state machine when it is due.
    starting: bounds the LLM calls that begin to prepare their prompts in one turn of the event
        loop, so that a burst of them does not block it.
    submitting: held by the program that is being added, because that takes several turns of the
        event loop if it is large.
    text_chars: characters of all templates with a record, see counted_chars.
    sampling_bytes: memory of `sampling`.
    prompt_tokens: tokens of all prompts with a record.
    num_plain: running requests of plain clients.
    only_plain: whether a plain client opened it and only plain clients have used it.
    last_plain: call name -> engine requests whose KV is pinned for the plain client's next request
        of that name; the latest names come last.
    answers: key -> fingerprint of the calls and answer of the latest programs with a key.
    end_reason: why it has ended; None while it is open.
    """

    id: str
    uid: str
    tenant: str
    scope: str
    shared_with: SharingMode
    criteria: Criteria
    sampling: Mapping[str, Any]
    metadata: Mapping[str, str]
    created_s: float
    created_unix_s: float
    ttl_s: float
    last_activity_s: float
    machine: SessionStateMachine
    sharing: PromptSharing
    requested_prefixes: RequestedPrefixes
    held: QuotaHold
    held_chars: QuotaHold
    planned: PlannedPieces = field(default_factory=PlannedPieces)
    load: OwnLoad = field(default_factory=OwnLoad)
    records: dict[str, CallRecord] = field(default_factory=dict)
    pending: deque[tuple[Action, Mapping[LlmCall, GroupStart]]] = field(default_factory=deque)
    informing: bool = False
    abandoned: dict[Variable, None] = field(default_factory=dict)
    tasks: dict[LlmCall, asyncio.Task[None]] = field(default_factory=dict)
    settled: Subscribers = field(default_factory=Subscribers)
    streamed: Subscribers = field(default_factory=Subscribers)
    timer: asyncio.TimerHandle | None = None
    starting: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(STARTS_PER_TURN))
    submitting: asyncio.Lock = field(default_factory=asyncio.Lock)
    text_chars: int = 0
    sampling_bytes: int = 0
    prompt_tokens: int = 0
    num_plain: int = 0
    only_plain: bool = False
    last_plain: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: dict[str, tuple[bytes, Sequence[SubmittedCall]]] = field(default_factory=dict)
    end_reason: str | None = None

    @property
    def busy(self) -> bool:
        """Whether a call runs in it, or a client waits for one of its values."""
        return bool(
            self.tasks
            or self.pending
            or self.informing
            or self.num_plain
            or len(self.settled)
            or len(self.streamed)
        )

    def awaits(self, variable: Variable) -> bool:
        """Whether a client waits for the variable."""
        return self.settled.has(variable) or self.streamed.has(variable)

    def expires_s(self) -> float | None:
        """Time when it expires; None while it is busy."""
        return None if self.busy else self.last_activity_s + self.ttl_s

    def record(self, call_id: str) -> CallRecord:
        return self.records.setdefault(call_id, CallRecord())

    def count_chars(self) -> None:
        """Count the characters of its templates and values, its sampling parameters, the tokens of
        its prompts, its calls and variables, and the answers that it remembers, to its tenant, as
        they are now. A token takes as much memory as a character may."""
        graph = self.machine.graph
        records = CALL_CHARS * len(graph.calls) + VARIABLE_CHARS * len(graph.variables)
        records += ANSWER_CHARS * sum(len(answer) for _, answer in self.answers.values())
        texts = self.text_chars + self.sampling_bytes + self.machine.value_chars
        self.held_chars.resize(texts + self.prompt_tokens + records)

    def count_prompt(self, record: CallRecord) -> None:
        """The prompt of a call was extended or dropped."""
        tokens = 0 if record.prompt is None else record.prompt.num_tokens
        self.prompt_tokens += tokens - record.counted_tokens
        record.counted_tokens = tokens
        self.count_chars()

    def remember_answer(
        self, key: str, fingerprint: bytes, answer: Sequence[SubmittedCall]
    ) -> None:
        """Remember an answer, because a client that did not receive it may send the key again."""
        self.answers[key] = fingerprint, answer
        if len(self.answers) > _KEPT_ANSWERS:
            del self.answers[next(iter(self.answers))]
        self.count_chars()

    def keep_plain(self, name: str, request_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Keep the KV of a plain call for the next one of its name. Returns the engine requests
        whose KV is kept no longer, since enough later names have theirs."""
        self.last_plain[name] = request_ids
        if len(self.last_plain) <= _KEPT_NAMES:
            return ()
        return self.last_plain.pop(next(iter(self.last_plain)))

    def dismantling(self) -> Iterator[None]:
        """Let go of the calls, variables, records and answers of a session that has ended, in
        slices: when it is freed itself, little is left that would be freed at once."""
        yield from self.machine.dismantling()
        while self.records:
            for _ in range(min(_FREED_TOGETHER, len(self.records))):
                self.records.popitem()
            yield
        while self.answers:
            self.answers.popitem()
            yield

    def forget_records(self, *, few: bool = False) -> None:
        """Drop records of calls that the graph has forgotten and that have no prompt or pinned KV.

        It does so only when there are many, so that its cost is amortized. few: even a few.
        """
        known = self.machine.graph.calls
        if few or len(self.records) > 2 * len(known) + _FORGET_FROM:
            self.records = {
                key: record
                for key, record in self.records.items()
                if key in known or record.prompt is not None or record.pinned
            }
            self.text_chars = sum(record.text_chars for record in self.records.values())


def class_name(session: ServedSession, call: Call) -> str:
    """The last service class of a call; empty if the engine never accepted it."""
    record = session.records.get(call.id) or CallRecord()
    classes = [
        llm_call.service_class for llm_call in record.llm_calls.values() if llm_call.service_class
    ]
    return classes[-1].value if classes else ""


def request_group(session: ServedSession, llm_call: LlmCall) -> RequestGroup | None:
    """The task group of an LLM call as engines and routers know it."""
    group = llm_call.group
    if group is None:
        return None
    precedes = group.level > Level.THROUGHPUT
    return RequestGroup(f"{session.uid}/{group.id}", precedes, awaited_alone(llm_call))
