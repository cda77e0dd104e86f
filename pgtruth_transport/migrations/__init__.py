"""The schema's history, as Alembic revisions.

Adding one: write ``versions/NNNN_what.py`` with ``revision = "NNNN_what"`` (the file's name) and ``down_revision`` the
one before, take the schema from ``schema_name()``, and describe the same tables in :mod:`pgtruth_transport.schema`; a
test compares the two. Code of the version before must keep working on the new schema.
"""

from __future__ import annotations

from alembic import op


def schema_name() -> str:
    """The schema that this run of the migrations is about."""
    schema: str | None = op.get_context().version_table_schema
    assert schema is not None
    return schema
