"""The column `reasoning_tokens` of batches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column(
        "batches", sa.Column("reasoning_tokens", _BIG, nullable=False, server_default="0")
    )
