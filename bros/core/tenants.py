"""What the server holds for each tenant, and the limits of that.

    hold, count ──▶ QuotaHold ── resize ──▶ release    its owner releases it, however the work ends
                        │
                        └── counts until then in `used` of its tenant and resource

Files, batches and responses outlive the process, so the store counts those; caches count what they
keep. The limits of these are here, too.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import itemgetter
from types import MappingProxyType
from typing import NamedTuple, Self

from bros.core.clock import Clock, SystemClock
from bros.core.errors import OverTenantLimitError, ServerLimitError, TenantLimitError
from bros.core.request import ServiceClass


class Resource(enum.StrEnum):
    """What is counted; the values are labels of metrics.

    RT_REQUESTS, BE_REQUESTS: open requests of a class, as asked for: sent to the engine and not
        ended, so in its queue or running. Rows of batches do not count, since batches have limits
        of their own.
    SESSIONS: open sessions.
    SESSION_CHARS: characters of templates and values in open sessions; their calls and variables,
        tokens of prompts and bytes of sampling parameters count as further ones.
    WAITS: requests of clients that wait for values of sessions or for the end of background
        responses.
    FILES, FILE_BYTES: files in the store; the bytes of uploads count while they are received, and
        those of results of batches from when a row has ended.
    BATCHES: unfinished batches.
    BATCH_TOKENS: prompt tokens of unfinished batches.
    RESPONSES, RESPONSE_BYTES: stored responses. The oldest make room for new ones.
    BACKGROUND: background responses that have not ended.
    INPUT_BYTES: bytes of requests that are received, or wait for a thread or are processed there:
        bodies, prompts to render and tokenize, grammars to check. A body of a call counts as what
        it takes when parsed, until its prompts are made; then what is kept of it, if it is large.
    OUTPUT_BYTES: bytes of large replies that their clients have not read yet.
    CPU_SECONDS: CPU time of work off the event loop, see `CpuBudget`, within some minute: what was
        used a minute ago counts a third.
    REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE: requests that the engine has accepted, and tokens of
        their prompts and answers; each falls by its limit per minute. An answer counts when it
        ends. Rows of batches do not count.
    GRAMMARS: outputs of open requests that must match a grammar, and grammars that wait for their
        check or are checked.
    CACHED_GRAMMARS: checked grammars that the server remembers. The oldest make room for new ones.
    TRACES: traces of ended requests that the engines keep. The oldest make room for new ones.
    """

    RT_REQUESTS = "rt_requests"
    BE_REQUESTS = "be_requests"
    SESSIONS = "sessions"
    SESSION_CHARS = "session_chars"
    WAITS = "waits"
    FILES = "files"
    FILE_BYTES = "file_bytes"
    BATCHES = "batches"
    BATCH_TOKENS = "batch_tokens"
    RESPONSES = "responses"
    RESPONSE_BYTES = "response_bytes"
    BACKGROUND = "background"
    INPUT_BYTES = "input_bytes"
    OUTPUT_BYTES = "output_bytes"
    CPU_SECONDS = "cpu_seconds"
    REQUESTS_PER_MINUTE = "requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    GRAMMARS = "grammars"
    CACHED_GRAMMARS = "cached_grammars"
    TRACES = "traces"

    __hash__ = str.__hash__


REQUESTS: Mapping[ServiceClass, Resource] = MappingProxyType(
    {ServiceClass.RT: Resource.RT_REQUESTS, ServiceClass.BE: Resource.BE_REQUESTS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """Most that the server holds for a tenant; None: no limit. For the units see Resource.

    requests: of each class.
    """

    requests: int | None = None
    sessions: int | None = None
    session_chars: int | None = None
    waits: int | None = None
    files: int | None = None
    file_bytes: int | None = None
    batches: int | None = None
    batch_tokens: int | None = None
    responses: int | None = None
    response_bytes: int | None = None
    background: int | None = None
    input_bytes: int | None = None
    output_bytes: int | None = None
    cpu_seconds: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    grammars: int | None = None
    cached_grammars: int | None = None
    traces: int | None = None

    def of(self, resource: Resource) -> int | None:
        limit: int | None = getattr(self, _LIMITS[resource])
        return limit


_LIMITS: Mapping[Resource, str] = MappingProxyType(
    {
        resource: "requests" if resource in REQUESTS.values() else resource.value
        for resource in Resource
    }
)
"""Resource -> the field of TenantLimits."""

LIMIT_NAMES: tuple[str, ...] = tuple(field.name for field in fields(TenantLimits))

_NAMES: Mapping[Resource, tuple[str, str]] = MappingProxyType(
    {
        Resource.RT_REQUESTS: ("open real-time request", "open real-time requests"),
        Resource.BE_REQUESTS: ("open best-effort request", "open best-effort requests"),
        Resource.SESSIONS: ("open session", "open sessions"),
        Resource.SESSION_CHARS: ("character in open sessions", "characters in open sessions"),
        Resource.WAITS: (
            "request that waits for values or responses",
            "requests that wait for values or responses",
        ),
        Resource.FILES: ("file", "files"),
        Resource.FILE_BYTES: ("byte of files", "bytes of files"),
        Resource.BATCHES: ("unfinished batch", "unfinished batches"),
        Resource.BATCH_TOKENS: (
            "prompt token in unfinished batches",
            "prompt tokens in unfinished batches",
        ),
        Resource.RESPONSES: ("stored response", "stored responses"),
        Resource.RESPONSE_BYTES: ("byte of stored responses", "bytes of stored responses"),
        Resource.BACKGROUND: (
            "unfinished background response",
            "unfinished background responses",
        ),
        Resource.INPUT_BYTES: (
            "byte of requests that are received or wait to be processed",
            "bytes of requests that are received or wait to be processed",
        ),
        Resource.OUTPUT_BYTES: (
            "byte of replies that clients have not read",
            "bytes of replies that clients have not read",
        ),
        Resource.CPU_SECONDS: ("CPU second per minute", "CPU seconds per minute"),
        Resource.REQUESTS_PER_MINUTE: ("request per minute", "requests per minute"),
        Resource.TOKENS_PER_MINUTE: ("token per minute", "tokens per minute"),
        Resource.GRAMMARS: (
            "output with a grammar in open requests",
            "outputs with a grammar in open requests",
        ),
        Resource.CACHED_GRAMMARS: ("remembered grammar", "remembered grammars"),
        Resource.TRACES: ("kept trace", "kept traces"),
    }
)
"""Resource -> what one of it is called, and several."""

_SOON = frozenset(
    {
        *REQUESTS.values(),
        Resource.WAITS,
        Resource.INPUT_BYTES,
        Resource.OUTPUT_BYTES,
        Resource.GRAMMARS,
    }
)
"""What ends by itself within seconds. The rest stays until its tenant ends it or it expires."""

_SOON_S, _LATER_S = 1.0, 60.0
"""When a refused client may try again."""

RATES = Resource.REQUESTS_PER_MINUTE, Resource.TOKENS_PER_MINUTE
_MINUTE_S = 60.0

CPU_WINDOW_S = 60.0
"""Of CPU_SECONDS."""
_CPU_KEPT_S = 10 * CPU_WINDOW_S
"""After this time without work, nothing is left of what a tenant has used."""


NO_LIMITS = TenantLimits()


class HeldElsewhere(NamedTuple):
    """The amount of a resource that the accounts do not count themselves, such as files in the
    store.

    of_tenant: what one tenant has.
    of_all: what all tenants have together.
    """

    of_tenant: int = 0
    of_all: int = 0


NOTHING_ELSEWHERE = HeldElsewhere()

ALL_TENANTS = "*"
"""Name of all tenants together, whose limits are those of the server. No tenant has it."""


def check_limit(
    limits: TenantLimits,
    resource: Resource,
    used: int,
    more: int = 1,
    *,
    of_server: bool = False,
) -> None:
    """Raises TenantLimitError if a tenant that holds `used` may not hold `more` in addition now,
    and OverTenantLimitError if it never may.

    of_server: these are the server's limits, `used` is what all tenants hold, and the error is a
        ServerLimitError instead of a TenantLimitError.
    """
    limit = limits.of(resource)
    if limit is None or used + more <= limit:
        return
    option = _option(resource, of_server=of_server)
    if more > limit:
        whose = "this server" if of_server else "your API key"
        raise OverTenantLimitError(
            f"The limit of {whose} is {_amount(limit, resource)} ({option}); this needs {more}.",
            resource.value,
        )
    soon = resource in _SOON
    raise (ServerLimitError if of_server else TenantLimitError)(
        f"{'This server' if of_server else 'Your API key'} has {_amount(used, resource)}, and its "
        f"limit is {limit} ({option}).",
        resource.value,
        _SOON_S if soon else _LATER_S,
        ends_soon=soon,
    )


def _option(resource: Resource, *, of_server: bool) -> str:
    """What sets a limit: an option of the server, or a field of the file of --api-keys."""
    name = f"max_{_LIMITS[resource]}"
    return f"--{name.replace('_', '-')}" if of_server else name


def _amount(amount: int, resource: Resource) -> str:
    one, several = _NAMES[resource]
    return f"{amount} {one if amount == 1 else several}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantFigure:
    """What a tenant holds of one resource.

    tenant: its name, or ALL_TENANTS.
    limit: None if there is none.
    refused: number of requests that were refused because of the limit, since the server started.
    """

    tenant: str
    resource: Resource
    used: int
    limit: int | None
    refused: int

    @property
    def option(self) -> str:
        """What sets the limit: its name in the file of --api-keys, or the server's option."""
        return _option(self.resource, of_server=self.tenant == ALL_TENANTS)


@dataclass(frozen=True, slots=True)
class _CpuLevel:
    """CPU time that a tenant has used lately.

    seconds: at the time `as_of_s`; it fades.
    """

    seconds: float
    as_of_s: float

    def at(self, now: float) -> float:
        return self.seconds * math.exp((self.as_of_s - now) / CPU_WINDOW_S)


@dataclass(frozen=True, slots=True)
class RateFigure:
    """How far a tenant has used a limit per minute.

    remaining: how much more it may use at once.
    reset_s: seconds until that is the limit again, if it uses nothing.
    """

    limit: int
    remaining: int
    reset_s: float


class TenantAccounts:
    """Counts what each tenant holds, and refuses more than its limits. Not thread-safe.

    names: the tenants that the operator has named; metrics and tables show these.
    """

    names: tuple[str, ...]
    _limits: Mapping[str, TenantLimits]
    _default: TenantLimits

    def __init__(
        self,
        limits: Mapping[str, TenantLimits] = MappingProxyType({}),
        default: TenantLimits = NO_LIMITS,
        clock: Clock | None = None,
        *,
        server_limits: TenantLimits = NO_LIMITS,
    ) -> None:
        """limits: by tenant.
        default: limits of every other tenant.
        clock: for CPU time; None: the clock of the machine.
        server_limits: limits of what all tenants hold together; there is none of CPU time.
        """
        self.change_limits(limits, default)
        self.server_limits = server_limits
        self._clock = clock or SystemClock()
        self._used: Counter[tuple[str, Resource]] = Counter()
        self._sums: Counter[Resource] = Counter()  # of all tenants
        self._cpu: OrderedDict[str, _CpuLevel] = OrderedDict()  # in the order of their last work
        self._refused: Counter[tuple[str, Resource]] = Counter()
        # Limits per minute: (tenant, resource) -> (what counted, at what time in seconds).
        self._levels: dict[tuple[str, Resource], tuple[float, float]] = {}

    def change_limits(self, limits: Mapping[str, TenantLimits], default: TenantLimits) -> None:
        """As in the constructor. What is held already stays."""
        self.names = tuple(limits)
        self._limits, self._default = limits, default

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, self._default)

    def used(self, tenant: str, resource: Resource) -> int:
        return self._used[tenant, resource]

    def refused(self, tenant: str, resource: Resource) -> int:
        """Number of requests that were refused. tenant: ALL_TENANTS: by a limit of the server."""
        return self._refused[tenant, resource]

    def figures(self, elsewhere: Mapping[tuple[str, Resource], int]) -> list[TenantFigure]:
        """One for each resource of each tenant that the operator has named or that holds something.

        elsewhere: what the store, the engines and caches hold, (tenant, resource) -> amount.
        """
        now = self._clock.now()
        cpu = {
            (tenant, Resource.CPU_SECONDS): round(level.at(now))
            for tenant, level in self._cpu.items()
        }
        rates = {key: math.ceil(self._level(*key)) for key in self._levels}
        amounts = Counter({**self._used, **cpu, **rates})
        amounts.update(elsewhere)
        others = sorted({tenant for (tenant, _), amount in amounts.items() if amount})
        return [
            TenantFigure(
                tenant=tenant,
                resource=resource,
                used=amounts[tenant, resource],
                limit=self.limits(tenant).of(resource),
                refused=self._refused[tenant, resource],
            )
            for tenant in dict.fromkeys((*self.names, *others))
            for resource in Resource
        ]

    def server_figures(self, elsewhere: Mapping[tuple[str, Resource], int]) -> list[TenantFigure]:
        """One figure of ALL_TENANTS for each limit of the server. elsewhere: as for `figures`."""
        sums = self._sums.copy()
        for (_, resource), amount in elsewhere.items():
            sums[resource] += amount
        return [
            TenantFigure(
                tenant=ALL_TENANTS,
                resource=resource,
                used=sums[resource],
                limit=limit,
                refused=self._refused[ALL_TENANTS, resource],
            )
            for resource in Resource
            if (limit := self.server_limits.of(resource)) is not None
        ]

    @property
    def held(self) -> Mapping[tuple[str, Resource], int]:
        """All that is held: (tenant, resource) -> amount above 0."""
        return {key: amount for key, amount in self._used.items() if amount}

    def hold(self, tenant: str, resource: Resource, amount: int = 1) -> QuotaHold:
        """Count `amount` more. Raises what `check` raises."""
        self.check(tenant, resource, amount)
        return self.count(tenant, resource, amount)

    def hold_all(self, tenant: str, resources: Sequence[Resource], amount: int) -> QuotaHolds:
        """Count `amount` more of each resource, or nothing. Raises what `check` raises."""
        for resource in resources:
            self.check(tenant, resource, amount)
        return QuotaHolds([self.count(tenant, resource, amount) for resource in resources])

    def count(self, tenant: str, resource: Resource, amount: int = 1) -> QuotaHold:
        """Count `amount` more whatever the limit is; the caller has called `check`."""
        return QuotaHold(self, tenant, resource, amount)

    def check(
        self,
        tenant: str,
        resource: Resource,
        more: int = 1,
        elsewhere: HeldElsewhere = NOTHING_ELSEWHERE,
    ) -> None:
        """Raises what `check_limit` raises if the tenant, or all tenants together, may not hold
        `more` in addition.

        elsewhere: what they hold that is not counted here.
        """
        used = self._used[tenant, resource] + elsewhere.of_tenant
        check_limit(self.limits(tenant), resource, used, more)
        used = self._sums[resource] + elsewhere.of_all
        check_limit(self.server_limits, resource, used, more, of_server=True)

    def most(self, tenant: str, resource: Resource) -> int | None:
        """Most that a tenant may hold: its own limit or the server's; None: no limit."""
        limits = self.limits(tenant).of(resource), self.server_limits.of(resource)
        return min((limit for limit in limits if limit is not None), default=None)

    def check_growth(
        self, hold: QuotaHold, amount: int, elsewhere: HeldElsewhere = NOTHING_ELSEWHERE
    ) -> None:
        """Raises what `check` raises if a hold may not grow to this amount."""
        check_limit(self.limits(hold.tenant), hold.resource, 0, amount)
        check_limit(self.server_limits, hold.resource, 0, amount, of_server=True)
        self.check(hold.tenant, hold.resource, amount - hold.amount, elsewhere)

    def grow(self, hold: QuotaHold, amount: int) -> None:
        """A hold has this amount from now on. If its tenant has no other one of the resource, it
        may exceed the limits. Raises what `check` raises; then it stays as it is."""
        more = amount - hold.amount
        if more > 0 and self._used[hold.tenant, hold.resource] > hold.amount:
            self.check(hold.tenant, hold.resource, more)
        hold.resize(amount)

    def spend(self, tenant: str, cpu_s: float) -> None:
        """Work of the tenant off the event loop has used `cpu_s` seconds of CPU time."""
        now = self._clock.now()
        level = self._cpu.pop(tenant, None)
        seconds = cpu_s if level is None else level.at(now) + cpu_s
        self._cpu[tenant] = _CpuLevel(seconds, now)
        while now - next(iter(self._cpu.values())).as_of_s > _CPU_KEPT_S:
            self._cpu.popitem(last=False)  # tenants without keys of their own must not add up

    def cpu_wait_s(self, tenant: str) -> float:
        """Seconds until the tenant may begin new work off the event loop; 0: now."""
        limit, level = self.limits(tenant).cpu_seconds, self._cpu.get(tenant)
        if limit is None or level is None:
            return 0.0
        return max(0.0, CPU_WINDOW_S * math.log(max(level.at(self._clock.now()), limit) / limit))

    def check_cpu(self, tenant: str) -> None:
        """Raises TenantLimitError if the tenant has used up its CPU time."""
        wait_s = self.cpu_wait_s(tenant)
        if wait_s > 0:
            limit = self.limits(tenant).cpu_seconds
            raise TenantLimitError(
                f"Requests of your API key have used {_amount(limit or 0, Resource.CPU_SECONDS)}, "
                "for tokenizing, transforms and grammars, which is its limit "
                "(max_cpu_seconds).",
                Resource.CPU_SECONDS.value,
                max(wait_s, _SOON_S),
                ends_soon=True,
            )

    def begin_request(self, tenant: str, prompt_tokens: int) -> None:
        """Count a request and its prompt for the limits per minute. Raises TenantLimitError if one
        is used up, and OverTenantLimitError if the prompt alone exceeds it; then nothing counts."""
        amounts = dict(zip(RATES, (1, prompt_tokens), strict=True))
        waits: list[tuple[float, int, Resource]] = []
        for resource, more in amounts.items():
            limit = self.limits(tenant).of(resource)
            if limit is None:
                continue
            if more > limit:
                check_limit(self.limits(tenant), resource, 0, more)
            over = self._level(tenant, resource) + more - limit
            waits.append((over * _MINUTE_S / limit, limit, resource))
        wait_s, limit, resource = max(waits, key=itemgetter(0), default=(0.0, 0, RATES[0]))
        if wait_s > 0.0:
            raise TenantLimitError(
                f"Your API key has reached its limit of {_amount(limit, resource)} "
                f"(max_{_LIMITS[resource]}).",
                resource.value,
                wait_s,
                ends_soon=wait_s <= _MINUTE_S,
            )
        for resource, more in amounts.items():
            self._raise_level(tenant, resource, more)

    def undo_request(self, tenant: str, prompt_tokens: int) -> None:
        """The engine has refused a request that `begin_request` has counted."""
        for resource, amount in zip(RATES, (1, prompt_tokens), strict=True):
            self._raise_level(tenant, resource, -amount)

    def count_tokens(self, tenant: str, tokens: int) -> None:
        """An answer of `tokens` tokens has ended. It may exceed the limit, so that the next request
        has to wait longer."""
        self._raise_level(tenant, Resource.TOKENS_PER_MINUTE, tokens)

    def rates(self, tenant: str) -> Mapping[Resource, RateFigure]:
        """Of its limits per minute."""
        figures = {}
        for resource in RATES:
            limit = self.limits(tenant).of(resource)
            if limit is not None:
                level = self._level(tenant, resource)
                # A limit above 2**53 is rounded when the level, a float, is taken from it.
                remaining = min(limit, max(0, math.floor(limit - level)))
                figures[resource] = RateFigure(limit, remaining, level * _MINUTE_S / limit)
        return figures

    @property
    def have_rates(self) -> bool:
        """Whether any tenant has a limit per minute."""
        each = (self._default, *self._limits.values())
        return any(limits.of(resource) is not None for limits in each for resource in RATES)

    def of_batches(self) -> TenantAccounts:
        """Accounts without limits but those of caches, for what has limits of its own."""
        limits = {name: TenantLimits(traces=each.traces) for name, each in self._limits.items()}
        return TenantAccounts(limits, TenantLimits(traces=self._default.traces), self._clock)

    def note_refusal(self, tenant: str, resource: Resource) -> None:
        """A client got a TenantLimitError or an OverTenantLimitError."""
        self._refused[tenant, resource] += 1

    def note_server_refusal(self, tenant: str, resource: Resource) -> None:
        """A client of the tenant got a ServerLimitError."""
        self.note_refusal(tenant, resource)
        self.note_refusal(ALL_TENANTS, resource)

    def check_integrity(self, holds: Mapping[QuotaHold, int]) -> None:
        """Raise AssertionError unless exactly these are counted, with these amounts."""
        counted: Counter[tuple[str, Resource]] = Counter()
        for hold, amount in holds.items():
            assert hold.amount == amount
            counted[hold.tenant, hold.resource] += amount
        assert self.held == {key: amount for key, amount in counted.items() if amount}
        for resource in Resource:
            held = sum(amount for (_, each), amount in counted.items() if each is resource)
            assert self._sums[resource] == held

    def _level(self, tenant: str, resource: Resource) -> float:
        """What counts now for a limit per minute."""
        limit = self.limits(tenant).of(resource)
        amount, as_of_s = self._levels.get((tenant, resource), (0.0, 0.0))
        return max(0.0, amount - (limit or 0) * (self._clock.now() - as_of_s) / _MINUTE_S)

    def _raise_level(self, tenant: str, resource: Resource, amount: int) -> None:
        if self.limits(tenant).of(resource) is not None:
            level = max(0.0, self._level(tenant, resource) + amount)
            self._levels[tenant, resource] = level, self._clock.now()

    def _add(self, tenant: str, resource: Resource, amount: int) -> None:
        key = tenant, resource
        self._used[key] += amount
        self._sums[resource] += amount
        assert self._used[key] >= 0, "released twice"
        if not self._used[key]:
            del self._used[key]  # tenants without keys of their own must not add up


class QuotaHold:
    """Something held for a tenant, until `release`. Also a context manager that releases it."""

    __slots__ = ("_accounts", "_released", "amount", "resource", "tenant")

    def __init__(
        self, accounts: TenantAccounts, tenant: str, resource: Resource, amount: int
    ) -> None:
        """Made by TenantAccounts."""
        self.tenant = tenant
        self.resource = resource
        self.amount = amount
        self._accounts = accounts
        self._released = False
        accounts._add(tenant, resource, amount)

    def resize(self, amount: int) -> None:
        """Set the amount, whatever the limit is: `check` comes before what makes it grow. No effect
        after `release`."""
        if not self._released:
            self._accounts._add(self.tenant, self.resource, amount - self.amount)
            self.amount = amount

    def release(self) -> None:
        """May be called repeatedly."""
        self.resize(0)
        self._released = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class QuotaHolds:
    """Holds of the same amount, which are resized and released together."""

    __slots__ = ("_holds",)

    def __init__(self, holds: Sequence[QuotaHold]) -> None:
        self._holds = holds

    def resize(self, amount: int) -> None:
        """See QuotaHold."""
        for hold in self._holds:
            hold.resize(amount)

    def release(self) -> None:
        """May be called repeatedly."""
        for hold in self._holds:
            hold.release()
