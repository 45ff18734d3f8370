"""The tables of stores, files, batches and rows."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


_NEW_ID = {
    "sqlite": "lower(hex(randomblob(8)))",
    "postgresql": "substr(md5(random()::text || clock_timestamp()::text), 1, 16)",
}


def upgrade() -> None:
    _create_id()
    op.create_table(
        "files",
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
    stamps = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    counts = ("total", "completed", "failed", "prompt_tokens", "cached_tokens", "output_tokens")
    op.create_table(
        "batches",
        sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("served_model", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("input_file_id", sa.Text, nullable=False),
        sa.Column("input_digest", sa.Text, nullable=False),
        sa.Column("window", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False, index=True),
        *(sa.Column(name, sa.Text) for name in ("outcome", "model", "metadata")),
        sa.Column("output_life_s", _BIG),
        *(sa.Column(name, sa.Text) for name in ("errors", "output_file_id", "error_file_id")),
        sa.Column("created_at", _BIG, nullable=False),
        sa.Column("expires_at", _BIG, nullable=False),
        *(sa.Column(f"{name}_at", _BIG) for name in (*stamps, "cancelled", "expected")),
        *(sa.Column(name, _BIG, nullable=False, server_default="0") for name in counts),
        sa.Column("enqueued_tokens", _BIG, nullable=False, server_default="0"),
        sa.Column("lease_owner", sa.Text),
        sa.Column("lease_epoch", _BIG, nullable=False, server_default="0"),
        sa.Column("lease_until", sa.Float, nullable=False, server_default="0"),
    )
    op.create_table(
        "rows",
        sa.Column("batch_id", sa.Text, primary_key=True),
        sa.Column("line", _BIG, primary_key=True, autoincrement=False),
        sa.Column("custom_id", sa.Text, nullable=False),
        *(sa.Column(name, _BIG, nullable=False) for name in ("offset", "length", "rank")),
        sa.Column("ok", sa.Boolean),
        sa.Column("result", sa.Text),
        sa.UniqueConstraint("batch_id", "custom_id", name="uq_rows_custom_id"),
    )
    op.create_index("ix_rows_rank", "rows", ["batch_id", "rank"])


def _create_id() -> None:
    op.create_table("stores", sa.Column("id", sa.Text, primary_key=True))
    op.execute(f"INSERT INTO stores (id) SELECT {_NEW_ID[op.get_bind().dialect.name]}")
