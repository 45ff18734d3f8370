"""The column `result_bytes` of batches."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"

_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.add_column("batches", sa.Column("result_bytes", _BIG, nullable=False, server_default="0"))
    op.execute(
        "UPDATE batches SET result_bytes = coalesce("
        "(SELECT sum(length(result)) FROM rows WHERE rows.batch_id = batches.id), 0)"
    )
