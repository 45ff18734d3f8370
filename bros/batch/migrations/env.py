"""Run by Alembic with the connection that `open_database` gives it."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
