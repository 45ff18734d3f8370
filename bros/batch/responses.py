"""The store of responses: conversations that clients continue, and background responses to run.

```
 background ─▶ queued ─▶ in_progress ─▶ completed, incomplete
                  │           ├───────▶ failed: by an error, or at its deadline
                  └───────────┴───────▶ cancelled
 others are stored when they have ended
```

Each response has its own input items and its output. A response that continues another one names
it, so a conversation is a chain, and a turn is stored once however many follow. A request
that continues a conversation extends the life of all of its turns.
"""

from __future__ import annotations

import contextlib
import enum
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import sqlalchemy as sa

from bros.batch.database import RESPONSES, Database
from bros.batch.files import has_id
from bros.batch.objects import StoreFullError, is_storable
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.tenants import NO_LIMITS, Resource, TenantLimits, check_limit
from bros.text.json_text import WrittenJson


class ResponseStatus(enum.StrEnum):
    """The values of `status` in the API."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in _OPEN

    @property
    def has_output(self) -> bool:
        """Whether a conversation can go on from it."""
        return self in (ResponseStatus.COMPLETED, ResponseStatus.INCOMPLETE)


_OPEN = (ResponseStatus.QUEUED, ResponseStatus.IN_PROGRESS)

MAX_TURNS = 10_000
"""Most responses of one conversation."""

MAX_CONVERSATION_BYTES = 16 * 2**20
"""Most JSON of one conversation; no context is that long."""

_OVERHEAD_BYTES = 512
"""What a response counts for besides its JSON."""

_OVERDUE = {
    "code": "server_error",
    "message": "The response was not finished before its deadline.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One response. Times in Unix seconds.

    served_model: only servers of this model run it.
    previous_id: the response whose conversation it continues; None: it begins one.
    expires_at: when it is deleted.
    deadline_at: a background response that has not ended by then fails.
    input: its own input items, as JSON. All JSON is in ASCII.
    body: the response object, as JSON; of an open response without its output.
    error: code and message, as JSON, if it failed.
    request: what to run, as JSON; None if it is not open.
    """

    id: str
    tenant: str
    served_model: str
    previous_id: str | None
    status: ResponseStatus
    background: bool
    created_at: int
    expires_at: int
    deadline_at: float | None = None
    input: str
    body: str
    error: str | None = None
    request: str | None = None

    @property
    def is_body_complete(self) -> bool:
        """Whether the response object is `body` as it is."""
        return self.status.has_output and self.error is None

    @property
    def num_bytes(self) -> int:
        """What it counts for in the limit of its tenant."""
        return sum(map(len, (self.input, self.body, self.request or ""))) + _OVERHEAD_BYTES

    def to_object(self) -> dict[str, Any]:
        """The response object as it is now. Log-probabilities are WrittenJson."""
        found = _read_body(self.body)
        found["status"] = self.status.value
        if self.error is not None:
            found["error"] = json.loads(self.error)
        return found


_LOGPROBS = '"logprobs":['
_ENTRIES = _LOGPROBS + '{"token":'
_DECODER = json.JSONDecoder()


def _read_body(body: str) -> dict[str, Any]:
    """A response object. Log-probabilities become WrittenJson: reading them all would take ten
    times their memory, and hold the interpreter for 10 ms per megabyte."""
    # In JSON no string has such quotes, and the output comes before what repeats the request.
    at = body.find('"output":[')
    end = body.find('"usage":', at)
    read = 0
    kept: list[str] = []
    found: list[WrittenJson] = []
    while (at := body.find(_ENTRIES, at, end)) >= 0:
        at += len(_LOGPROBS)
        kept += [body[read:at], str(len(found))]
        texts = WrittenJson()
        while True:
            _, read = _DECODER.raw_decode(body, at)
            texts.append(body[at:read])
            if body[read] != ",":
                break
            at = read + 1
        found.append(texts)
        at = read
    value: dict[str, Any] = json.loads("".join(kept) + body[read:])
    for item in value.get("output", ()):
        for part in item.get("content", ()):
            if part.get("logprobs"):
                part["logprobs"] = found[part["logprobs"][0]]
    return value


class Turn(NamedTuple):
    """One response of a conversation: its own input items and its output items, in which
    log-probabilities are WrittenJson."""

    input: list[dict[str, Any]]
    output: list[dict[str, Any]]


class Claim(NamedTuple):
    """The right of one process to run a background response.

    epoch: rises with every claim, so writes under an older claim change nothing.
    """

    response_id: str
    owner: str
    epoch: int
    tenant: str
    deadline_at: float


def _turn(row: sa.Row[Any, Any, Any]) -> Turn:
    return Turn(json.loads(row.input), _read_body(row.body)["output"])


_STORE_ONLY = ("seq", "num_bytes", "lease_owner", "lease_epoch", "lease_until")


def _response(row: sa.Row[tuple[object, ...]]) -> StoredResponse:
    fields = dict(row._mapping)
    for name in _STORE_ONLY:
        del fields[name]
    return StoredResponse(**{**fields, "status": ResponseStatus(fields["status"])})


class ResponseStore:
    """Blocking; for worker threads. `now` is in Unix seconds.

    A tenant sees its own responses only; for those of others it gets NotFoundError.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    # ---- Requests of clients

    @property
    def is_full(self) -> bool:
        """Whether `put` would raise StoreFullError, as far as is known without asking the disk."""
        return self._database.is_full

    def look_for_room(self) -> None:
        """Ask the disk."""
        with contextlib.suppress(StoreFullError):
            self._database.check_room()

    def put(self, response: StoredResponse, limits: TenantLimits = NO_LIMITS) -> None:
        """Store a response. If its tenant has no room for it, its responses that expire first make
        room; open ones never do.

        Raises StoreFullError, TenantLimitError if the tenant has too many open responses, and
        InvalidRequestError if it may not have one of this size.
        """
        size = response.num_bytes
        with self._database.write(grows=True) as connection:
            self._database.lock_tenant(connection, response.tenant)
            if not response.status.is_final:
                check_limit(limits, Resource.BACKGROUND, self._count_open(connection, response))
            self._make_room(connection, response.tenant, size, limits)
            values = asdict(response) | {"status": response.status.value, "num_bytes": size}
            connection.execute(sa.insert(RESPONSES).values(values))
            if response.previous_id is not None:
                chain = _chain(response.tenant, response.previous_id)
                connection.execute(
                    sa.update(RESPONSES)
                    .where(RESPONSES.c.id.in_(sa.select(chain.c.id)))
                    .where(RESPONSES.c.expires_at < response.expires_at)
                    .values(expires_at=response.expires_at)
                )

    def get(self, tenant: str, response_id: str, now: float) -> StoredResponse:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return self._get(connection, tenant, response_id, now)

    def conversation(self, tenant: str, response_id: str, now: float) -> list[Turn]:
        """The turns of the conversation that ends with a response, the first one first.

        Raises NotFoundError if one of them is gone, InvalidRequestError if the response has no
        output or the conversation is too long. All name `previous_response_id`.
        """
        param = "previous_response_id"
        with self._database.read() as connection:
            last = self._get(connection, tenant, response_id, now, param)
            if not last.status.has_output:
                raise InvalidRequestError(
                    f"The response {response_id!r} is {last.status}, so it has no output that a "
                    "conversation could go on from.",
                    param,
                    "invalid_response_status",
                )
            rows = self._chain_rows(connection, tenant, response_id, param)
        if rows[0].previous_id is not None:
            raise NotFoundError(
                f"The response {rows[0].previous_id!r}, an earlier one of this conversation, was "
                "deleted or has expired.",
                param,
                "previous_response_not_found",
            )
        return [_turn(row) for row in rows]

    def turns(self, tenant: str, response_id: str, now: float) -> list[Turn]:
        """The turns of a conversation that are still stored, up to the response, which may not have
        ended. Raises NotFoundError, or InvalidRequestError if the conversation is too long."""
        with self._database.read() as connection:
            self._get(connection, tenant, response_id, now)
            return [_turn(row) for row in self._chain_rows(connection, tenant, response_id, "id")]

    def outputs(self, tenant: str, response_ids: Iterable[str], now: float) -> list[dict[str, Any]]:
        """The output items of those of the responses that are stored and have ended, in any order;
        log-probabilities are WrittenJson.

        Raises InvalidRequestError if the responses are as long as no conversation may be.
        """
        wanted = [each for each in set(response_ids) if is_storable(each)]
        mine = RESPONSES.c.tenant == tenant, RESPONSES.c.expires_at > int(now)
        found: list[dict[str, Any]] = []
        num_bytes = 0
        with self._database.read() as connection:
            for begin in range(0, len(wanted), _CHUNK):
                chunk = RESPONSES.c.id.in_(wanted[begin : begin + _CHUNK])
                size = sa.func.sum(sa.func.length(RESPONSES.c.body))
                query = sa.select(sa.func.coalesce(size, 0)).where(chunk, *mine)
                num_bytes += int(connection.execute(query).scalar_one())
                check_conversation(len(wanted), num_bytes, "input")
                columns = sa.select(RESPONSES.c.body, RESPONSES.c.status).where(chunk, *mine)
                for body, status in connection.execute(columns):
                    if ResponseStatus(status).has_output:
                        found += _read_body(body)["output"]
        return found

    def cancel(self, tenant: str, response_id: str, now: float) -> StoredResponse:
        """Cancel a background response; one that has ended stays as it is.

        Raises NotFoundError, or InvalidRequestError if it does not run in the background.
        """
        with self._database.write() as connection:
            found = self._get(connection, tenant, response_id, now)
            if not found.background:
                raise InvalidRequestError(
                    "Only a response that was created with background=true can be cancelled.",
                    "id",
                    "invalid_response_status",
                )
            connection.execute(
                _ended(ResponseStatus.CANCELLED).where(
                    RESPONSES.c.id == response_id, RESPONSES.c.status.in_(_OPEN)
                )
            )
            return self._get(connection, tenant, response_id, now)

    def delete(self, tenant: str, response_id: str, now: float) -> None:
        """Delete a response; a background response is aborted. Raises NotFoundError."""
        with self._database.write() as connection:
            self._get(connection, tenant, response_id, now)
            connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.id == response_id))

    def usage(self) -> Mapping[tuple[str, Resource], int]:
        """What the store holds for each tenant: (tenant, resource) -> amount."""
        found: dict[tuple[str, Resource], int] = {}
        is_open = sa.case((RESPONSES.c.status.in_(_OPEN), 1), else_=0)
        amounts = sa.func.count(), sa.func.sum(RESPONSES.c.num_bytes), sa.func.sum(is_open)
        query = sa.select(RESPONSES.c.tenant, *amounts).group_by(RESPONSES.c.tenant)
        with self._database.read() as connection:
            for tenant, count, size, unfinished in connection.execute(query):
                found[tenant, Resource.RESPONSES] = count
                found[tenant, Resource.RESPONSE_BYTES] = int(size)
                found[tenant, Resource.BACKGROUND] = int(unfinished)
        return found

    # ---- Background responses: as with batches, writes under an old lease change nothing.

    def claim(
        self, owner: str, now: float, lease_s: float, most: int, model: str
    ) -> Sequence[Claim]:
        """Claim open responses without a valid lease: of the tenants with the fewest claims first,
        and of each those with the earliest deadline. Else one that sends hundreds, all with an
        early deadline, would have every place."""
        is_open = RESPONSES.c.status.in_(_OPEN), RESPONSES.c.served_model == model
        is_free = self._database.is_free(RESPONSES.c.lease_until, now, lease_s)
        free = (*is_open, is_free)
        tenant, urgency = RESPONSES.c.tenant, (RESPONSES.c.deadline_at, RESPONSES.c.seq)
        count = sa.func.count().label("count")
        claimed = sa.select(tenant, count).where(*is_open, sa.not_(is_free))
        has = claimed.group_by(tenant).subquery()
        place = sa.func.row_number().over(partition_by=tenant, order_by=urgency)
        wanted = (
            sa.select(RESPONSES.c.id)
            .outerjoin(has, has.c.tenant == tenant)
            .where(*free)
            .order_by(place + sa.func.coalesce(has.c.count, 0), *urgency)
            .limit(most)
        )
        with self._database.read() as connection:
            if connection.execute(wanted.limit(1)).first() is None:
                return []
        columns = [RESPONSES.c[name] for name in ("id", "lease_epoch", "tenant", "deadline_at")]
        chosen = sa.select(RESPONSES.c.id).where(*free, RESPONSES.c.id.in_(wanted))
        with self._database.write() as connection:
            ids = self._database.unlocked(connection, chosen)
            rows = connection.execute(
                sa.update(RESPONSES)
                .where(*free, RESPONSES.c.id.in_(ids))
                .values(
                    status=ResponseStatus.IN_PROGRESS.value,
                    lease_owner=owner,
                    lease_epoch=RESPONSES.c.lease_epoch + 1,
                    lease_until=now + lease_s,
                )
                .returning(*columns)
            ).all()
        claims = [
            Claim(row.id, owner, row.lease_epoch, row.tenant, row.deadline_at) for row in rows
        ]
        return sorted(claims, key=lambda claim: claim.deadline_at)

    def renew(
        self, owner: str, response_ids: Sequence[str], now: float, lease_s: float
    ) -> frozenset[tuple[str, int]]:
        """Renew an owner's leases of open responses; returns (id, epoch) of those still held."""
        with self._database.write() as connection:
            rows = connection.execute(
                sa.update(RESPONSES)
                .where(RESPONSES.c.lease_owner == owner, RESPONSES.c.id.in_(response_ids))
                .where(RESPONSES.c.status.in_(_OPEN))
                .values(lease_until=now + lease_s)
                .returning(RESPONSES.c.id, RESPONSES.c.lease_epoch)
            ).all()
        return frozenset((row.id, row.lease_epoch) for row in rows)

    def release(self, owner: str | None = None) -> None:
        """Release the leases of `owner`; None: of all owners, only while no other process runs."""
        column = RESPONSES.c.lease_owner
        held = column.is_not(None) if owner is None else column == owner
        with self._database.write() as connection:
            connection.execute(
                sa.update(RESPONSES)
                .where(held, RESPONSES.c.status.in_(_OPEN))
                .values(status=ResponseStatus.QUEUED.value, lease_owner=None, lease_until=0.0)
            )

    def load(self, claim: Claim) -> StoredResponse | None:
        """The response to run; None if it has ended, was deleted, or has another owner."""
        query = sa.select(RESPONSES).where(*_is_held(claim))
        with self._database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else _response(row)

    def finish(
        self, claim: Claim, status: ResponseStatus, body: str | None, error: str | None
    ) -> bool:
        """Store the end of a background response: its response object, or the error. Returns
        whether it did: not if it has ended, was deleted, or has another owner."""
        values: dict[str, object] = {"error": error}
        if body is not None:
            values["body"] = body
            size = sa.func.length(RESPONSES.c.input) + len(body) + _OVERHEAD_BYTES
            values["num_bytes"] = size
        with self._database.write(grows=True) as connection:
            query = _ended(status).where(*_is_held(claim)).values(values)
            return connection.execute(query).rowcount > 0

    def fail_overdue(self, now: float) -> None:
        """Let all open responses fail whose deadline has passed, of any model. now: of the servers'
        clocks, which the deadlines are of."""
        overdue = RESPONSES.c.status.in_(_OPEN), RESPONSES.c.deadline_at <= now
        with self._database.read() as connection:
            if (
                connection.execute(sa.select(RESPONSES.c.id).where(*overdue).limit(1)).first()
                is None
            ):
                return
        with self._database.write() as connection:
            query = _ended(ResponseStatus.FAILED).where(*overdue)
            connection.execute(query.values(error=json.dumps(_OVERDUE)))

    def sweep(self, now: float) -> None:
        """Delete expired responses."""
        with self._database.write(patient=True) as connection:
            connection.execute(
                sa.delete(RESPONSES).where(
                    RESPONSES.c.expires_at <= int(now), RESPONSES.c.status.not_in(_OPEN)
                )
            )

    # ---- Within a transaction

    def _get(
        self,
        connection: sa.Connection,
        tenant: str,
        response_id: str,
        now: float,
        param: str = "id",
    ) -> StoredResponse:
        query = sa.select(RESPONSES).where(
            has_id(RESPONSES, response_id),
            RESPONSES.c.tenant == tenant,
            RESPONSES.c.expires_at > int(now),
        )
        row = connection.execute(query).first()
        if row is None:
            code = "response_not_found" if param == "id" else "previous_response_not_found"
            raise NotFoundError(f"There is no response {response_id[:100]!r}.", param, code)
        return _response(row)

    def _chain_rows(
        self, connection: sa.Connection, tenant: str, response_id: str, param: str
    ) -> Sequence[sa.Row[Any, Any, Any]]:
        """The responses of a conversation, the first one first. Raises InvalidRequestError."""
        chain = _chain(tenant, response_id)
        size = sa.select(sa.func.count(), sa.func.coalesce(sa.func.sum(chain.c.num_bytes), 0))
        count, num_bytes = connection.execute(size).one()
        check_conversation(count, num_bytes, param)
        columns = RESPONSES.c.input, RESPONSES.c.body, RESPONSES.c.previous_id
        turns = sa.select(*columns).join(chain, chain.c.id == RESPONSES.c.id)
        return connection.execute(turns.order_by(chain.c.depth.desc())).all()

    def _count_open(self, connection: sa.Connection, response: StoredResponse) -> int:
        is_open = RESPONSES.c.tenant == response.tenant, RESPONSES.c.status.in_(_OPEN)
        query = sa.select(sa.func.count()).where(*is_open)
        return connection.execute(query).scalar_one()

    def _make_room(
        self, connection: sa.Connection, tenant: str, num_bytes: int, limits: TenantLimits
    ) -> None:
        """Delete responses until one more of this size is within the limits."""
        check_limit(limits, Resource.RESPONSE_BYTES, 0, num_bytes)
        most, most_bytes = limits.responses, limits.response_bytes
        if most is None and most_bytes is None:
            return
        mine = RESPONSES.c.tenant == tenant
        size = sa.func.coalesce(sa.func.sum(RESPONSES.c.num_bytes), 0)
        count, held = connection.execute(sa.select(sa.func.count(), size).where(mine)).one()
        many = 0 if most is None else count + 1 - most
        much = 0 if most_bytes is None else int(held) + num_bytes - most_bytes
        if many <= 0 and much <= 0:
            return
        columns = RESPONSES.c.seq, RESPONSES.c.num_bytes
        oldest = sa.select(*columns).where(mine, RESPONSES.c.status.not_in(_OPEN))
        doomed = []
        order = RESPONSES.c.expires_at, RESPONSES.c.seq
        for seq, freed in connection.execute(oldest.order_by(*order)):
            if many <= 0 and much <= 0:
                break
            doomed.append(seq)
            many, much = many - 1, much - freed
        for begin in range(0, len(doomed), _CHUNK):
            chunk = doomed[begin : begin + _CHUNK]
            connection.execute(sa.delete(RESPONSES).where(RESPONSES.c.seq.in_(chunk)))


_CHUNK = 500
"""Most values of one query; databases limit them."""


def check_conversation(count: int, num_bytes: int, param: str) -> None:
    """Raises InvalidRequestError if a conversation is too long.

    count, num_bytes: of its responses.
    """
    if count > MAX_TURNS or num_bytes > MAX_CONVERSATION_BYTES:
        raise InvalidRequestError(
            f"The conversation has {count} responses and {num_bytes} bytes; at most "
            f"{MAX_TURNS} and {MAX_CONVERSATION_BYTES} are allowed.",
            param,
            "context_length_exceeded",
        )


def _is_held(claim: Claim) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        RESPONSES.c.id == claim.response_id,
        RESPONSES.c.lease_owner == claim.owner,
        RESPONSES.c.lease_epoch == claim.epoch,
        RESPONSES.c.status.in_(_OPEN),
    )


def _ended(status: ResponseStatus) -> sa.Update:
    """What the end of a background response changes in any case."""
    freed = sa.func.coalesce(sa.func.length(RESPONSES.c.request), 0)  # JSON in ASCII
    return sa.update(RESPONSES).values(
        status=status.value, request=None, num_bytes=RESPONSES.c.num_bytes - freed
    )


def _chain(tenant: str, response_id: str) -> sa.CTE:
    """A response and those before it in its conversation: (id, previous_id, num_bytes, depth).
    The depth of the last one is 0; at most MAX_TURNS + 1 are found."""
    first_id = response_id if is_storable(response_id) else ""
    columns = RESPONSES.c.id, RESPONSES.c.previous_id, RESPONSES.c.num_bytes
    mine = RESPONSES.c.tenant == tenant
    depth = sa.literal(0, sa.Integer).label("depth")
    last = sa.select(*columns, depth).where(RESPONSES.c.id == first_id, mine)
    chain = last.cte("chain", recursive=True)
    before = sa.select(*columns, chain.c.depth + 1).where(
        RESPONSES.c.id == chain.c.previous_id, mine, chain.c.depth < MAX_TURNS
    )
    return chain.union_all(before)
