"""Tables. Migrations bring a store to this shape; a test compares the two."""

from __future__ import annotations

import sqlalchemy as sa

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # SQLite counts up INTEGER only

METADATA = sa.MetaData()

# One row: what tells this store from others.
STORES = sa.Table("stores", METADATA, sa.Column("id", sa.Text, primary_key=True))

# seq: in the order of creation, for pages.
FILES = sa.Table(
    "files",
    METADATA,
    sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False, index=True),
    sa.Column("num_bytes", _BIG, nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG),
)

# served_model: of the servers that may run its rows. outcome: the final status that a batch is
# wound up to. enqueued_tokens: what it counts for in its tenant's quota. lease_*: see Lease;
# lease_until is a Unix time. faults: unexpected ends of work on it since a row was stored.
BATCHES = sa.Table(
    "batches",
    METADATA,
    sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("served_model", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("input_file_id", sa.Text, nullable=False),
    sa.Column("input_digest", sa.Text, nullable=False),
    sa.Column("window", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False, index=True),
    sa.Column("outcome", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("metadata", sa.Text),
    sa.Column("output_life_s", _BIG),
    sa.Column("errors", sa.Text),
    sa.Column("output_file_id", sa.Text),
    sa.Column("error_file_id", sa.Text),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG, nullable=False),
    sa.Column("in_progress_at", _BIG),
    sa.Column("finalizing_at", _BIG),
    sa.Column("completed_at", _BIG),
    sa.Column("failed_at", _BIG),
    sa.Column("expired_at", _BIG),
    sa.Column("cancelling_at", _BIG),
    sa.Column("cancelled_at", _BIG),
    sa.Column("expected_at", _BIG),
    sa.Column("total", _BIG, nullable=False, server_default="0"),
    sa.Column("completed", _BIG, nullable=False, server_default="0"),
    sa.Column("failed", _BIG, nullable=False, server_default="0"),
    sa.Column("prompt_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("cached_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("output_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("enqueued_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("lease_owner", sa.Text),
    sa.Column("lease_epoch", _BIG, nullable=False, server_default="0"),
    sa.Column("lease_until", sa.Float, nullable=False, server_default="0"),
    sa.Column("faults", _BIG, nullable=False, server_default="0"),
)

# Only while a batch is open: the files take over when it is wound up.
ROWS = sa.Table(
    "rows",
    METADATA,
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("line", _BIG, primary_key=True, autoincrement=False),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("offset", _BIG, nullable=False),
    sa.Column("length", _BIG, nullable=False),
    sa.Column("rank", _BIG, nullable=False),
    sa.Column("ok", sa.Boolean),
    sa.Column("result", sa.Text),
    sa.UniqueConstraint("batch_id", "custom_id", name="uq_rows_custom_id"),
    sa.Index("ix_rows_rank", "batch_id", "rank"),
)
