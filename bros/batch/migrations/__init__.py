"""How a store gets from one version to the next (Alembic)."""
