"""The table of responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
        sa.Column("id", sa.Text, nullable=False, unique=True),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("served_model", sa.Text, nullable=False),
        sa.Column("previous_id", sa.Text),
        sa.Column("status", sa.Text, nullable=False, index=True),
        sa.Column("background", sa.Boolean, nullable=False),
        sa.Column("created_at", _BIG, nullable=False),
        sa.Column("expires_at", _BIG, nullable=False, index=True),
        sa.Column("deadline_at", sa.Float),
        sa.Column("num_bytes", _BIG, nullable=False),
        sa.Column("input", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("request", sa.Text),
        sa.Column("lease_owner", sa.Text),
        sa.Column("lease_epoch", _BIG, nullable=False, server_default="0"),
        sa.Column("lease_until", sa.Float, nullable=False, server_default="0"),
    )
    op.create_index("ix_responses_room", "responses", ["tenant", "expires_at", "num_bytes"])
