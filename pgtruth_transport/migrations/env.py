"""What Alembic runs around the revisions: one transaction on the connection that :mod:`pgtruth_transport.migrate` made.

No configuration file is read and no logging is changed.
"""

from __future__ import annotations

from alembic import context

from pgtruth_transport.schema import build

connection = context.config.attributes["connection"]
schema: str = context.config.attributes["schema"]

context.configure(
    connection=connection,
    target_metadata=build(schema),
    version_table_schema=schema,
    include_schemas=True,
    include_name=lambda name, kind, _parents: kind != "schema" or name == schema,
    compare_server_default=True,
)
context.run_migrations()
