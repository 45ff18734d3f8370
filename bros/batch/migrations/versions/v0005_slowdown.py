"""The column `rt_slowdown` of batches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("batches", sa.Column("rt_slowdown", sa.Float))
