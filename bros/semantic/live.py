"""What a service holds of one open session, besides its graph."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.request import ServiceClass
from bros.semantic.nodes import Turn, Variable
from bros.semantic.program import CallSpec, Criteria, SubmittedCall
from bros.semantic.prompt import Begun, Prompt, Sharing
from bros.semantic.session import SessionCore
from bros.semantic.views import PrefixView

_FORGET_FROM = 100
_KEPT_ANSWERS = 8


@dataclass(eq=False, slots=True)
class TurnRecord:
    """What came of a turn on the engine.

    service_class: as which it is served, None before it is accepted. text: so far, while it is
    being generated. request_id: of the engine's request that runs it. group: the one that it was
    in when it was handed to the engine.
    """

    service_class: ServiceClass | None = None
    request_id: str | None = None
    group: str | None = None
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    prefilled_tokens: int = 0
    attempts: int = 0


@dataclass(eq=False, slots=True)
class CallRecord:
    """What a call has with the engine.

    prompt: None once the call is over, and of calls that the engine does not run. prefixes: of the
    whole prompt, then. text_chars: of its template. counted: its
    end is in the figures. kept: requests of the engine whose KV it keeps for what comes next. fill:
    the task that computes what is known of a prompt. growing: whoever adds to the prompt holds
    it, because long texts are encoded on a thread.
    """

    prompt: Prompt | None = None
    prefixes: tuple[PrefixView, ...] = ()
    text_chars: int = 0
    counted: bool = False
    turns: dict[int, TurnRecord] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    fill: asyncio.Task[None] | None = None
    growing: asyncio.Lock = field(default_factory=asyncio.Lock)

    def turn(self, index: int) -> TurnRecord:
        return self.turns.setdefault(index, TurnRecord())


class Readers:
    """Who waits for news of variables: each has an event of its own, and takes it away again."""

    def __init__(self) -> None:
        self._events: dict[str, set[asyncio.Event]] = {}

    def __len__(self) -> int:
        return sum(len(events) for events in self._events.values())

    @contextlib.contextmanager
    def reading(self, variable: Variable) -> Iterator[asyncio.Event]:
        """An event that is set on every `tell` while the block lasts."""
        event = asyncio.Event()
        self._events.setdefault(variable.id, set()).add(event)
        try:
            yield event
        finally:
            events = self._events[variable.id]
            events.remove(event)
            if not events:
                del self._events[variable.id]

    def tell(self, variable: Variable) -> None:
        """There is something new about the variable."""
        for event in self._events.get(variable.id, ()):
            event.set()


@dataclass(eq=False, slots=True, kw_only=True)
class LiveSession:
    """An open session.

    id: as its tenant calls it. uid: never used again for another, even if the id is.
    settled: who waits for values; streamed: who wants to see them grow as well.
    touched_s: when somebody last had to do with it. text_chars: of all templates that are
    remembered. num_plain: requests of plain clients that are under way; last_plain: by name of
    their calls, the engine's requests that keep KV for the next one. only_plain: one of these has
    opened it, and nobody else has done anything in it.
    answers: to the latest programs that have come with a key, by that.
    starting: held by a turn that begins, so that of a thousand that start together one after the
    other makes its prompt. gone: why it is no longer there.
    """

    id: str
    uid: str
    tenant: str
    scope: str
    criteria: Criteria
    sampling: Mapping[str, Any]
    metadata: Mapping[str, str]
    created_s: float
    created_unix_s: float
    ttl_s: float
    touched_s: float
    core: SessionCore
    sharing: Sharing
    begun: Begun
    records: dict[str, CallRecord] = field(default_factory=dict)
    tasks: dict[Turn, asyncio.Task[None]] = field(default_factory=dict)
    settled: Readers = field(default_factory=Readers)
    streamed: Readers = field(default_factory=Readers)
    timer: asyncio.TimerHandle | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    text_chars: int = 0
    num_plain: int = 0
    only_plain: bool = False
    last_plain: dict[str, tuple[str, ...]] = field(default_factory=dict)
    answers: dict[str, tuple[Sequence[CallSpec], Sequence[SubmittedCall]]] = field(
        default_factory=dict
    )
    gone: str | None = None

    @property
    def busy(self) -> bool:
        """Whether something runs in it, or somebody waits."""
        return bool(self.tasks or self.num_plain or len(self.settled) or len(self.streamed))

    def expires_s(self) -> float | None:
        """When it has been idle for too long; None while it is not idle."""
        return None if self.busy else self.touched_s + self.ttl_s

    def record(self, call_id: str) -> CallRecord:
        return self.records.setdefault(call_id, CallRecord())

    def remember_answer(
        self, key: str, calls: Sequence[CallSpec], answer: Sequence[SubmittedCall]
    ) -> None:
        """A client that does not get it may ask again."""
        self.answers[key] = calls, answer
        if len(self.answers) > _KEPT_ANSWERS:
            del self.answers[next(iter(self.answers))]

    def forget_records(self) -> None:
        """Those of calls that the graph has forgotten and the engine is done with, once there
        are many."""
        known = self.core.graph.calls
        if len(self.records) > 2 * len(known) + _FORGET_FROM:
            self.records = {
                key: record
                for key, record in self.records.items()
                if key in known or record.prompt is not None or record.kept
            }
            self.text_chars = sum(record.text_chars for record in self.records.values())
