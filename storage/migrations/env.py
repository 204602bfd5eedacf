"""What Alembic runs before the revisions: `storage.database` lends its connection and its transaction."""

from alembic import context

from storage.tables import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata, transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
