"""Between rows of the database and objects."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import sqlalchemy as sa

from bros.batch.objects import Batch, BatchStatus, LineError, TokenUsage


def errors_json(errors: Sequence[LineError]) -> str:
    return json.dumps([asdict(error) for error in errors])


def batch_of(row: sa.Row[tuple[object, ...]]) -> Batch:
    fields = dict(row._mapping)
    for name in ("seq", "enqueued_tokens", "lease_owner", "lease_epoch", "lease_until"):
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
