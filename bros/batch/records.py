"""Between rows of the database and objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sa

from bros.batch.files import has_id
from bros.batch.objects import Batch, BatchStatus, Lease, LineError, TokenUsage
from bros.batch.schema import BATCHES
from bros.core.errors import NotFoundError

_OURS = ("seq", "enqueued_tokens", "lease_owner", "lease_epoch", "lease_until", "faults")
"""Columns that nobody but the store needs."""

_STAMPS = {
    BatchStatus.FAILED: "failed_at",
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


def errors_json(errors: Sequence[LineError]) -> str:
    return json.dumps([asdict(error) for error in errors])


def batch_of(row: sa.Row[tuple[object, ...]]) -> Batch:
    fields = dict(row._mapping)
    for name in _OURS:
        del fields[name]
    tokens = [fields.pop(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    metadata, errors = fields.pop("metadata"), fields.pop("errors")
    status, outcome = fields.pop("status"), fields.pop("outcome")
    return Batch(
        **fields,
        status=BatchStatus(status),
        outcome=BatchStatus(outcome) if outcome else None,
        metadata=None if metadata is None else json.loads(metadata),
        errors=tuple(LineError(**error) for error in json.loads(errors or "[]")),
        usage=TokenUsage(*tokens),
    )


def get_batch(connection: sa.Connection, batch_id: str, tenant: str | None = None) -> Batch:
    """Raises NotFoundError."""
    query = sa.select(BATCHES).where(has_id(BATCHES, batch_id))
    if tenant is not None:
        query = query.where(BATCHES.c.tenant == tenant)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(
            f"There is no batch {batch_id[:100]!r}.", param="batch_id", code="batch_not_found"
        )
    return batch_of(row)


def set_batch(connection: sa.Connection, lease: Lease, **values: object) -> None:
    of_batch = BATCHES.c.id == lease.batch_id
    connection.execute(sa.update(BATCHES).where(of_batch).values(values))


def move_batch(
    connection: sa.Connection, lease: Lease, status: BatchStatus, now: float, **values: object
) -> None:
    """To another status, at a time that the batch remembers."""
    stamp = {_STAMPS[status]: int(now)}
    set_batch(connection, lease, **{"status": status.value, **stamp, **values})
