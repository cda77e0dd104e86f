"""Bringing the database to the schema of this version of the package, and checking that it is there.

``migrate`` runs every missing revision in one transaction under an advisory lock: eight processes may call it at once,
one works and the others find it done. If it dies, nothing of it remains. ``check`` is one small query and raises
:class:`SchemaError` with the command to run.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Final

import psycopg
from psycopg import sql

from pgtruth_transport.db import Connection, Database
from pgtruth_transport.errors import SchemaError
from pgtruth_transport.settings import Settings

COMMAND: Final = "celery -A app pgtruth migrate"


@cache
def revisions() -> tuple[str, ...]:
    """Every revision that this package knows, oldest first: the names of the files in ``migrations/versions``."""
    files = resources.files(__package__).joinpath("migrations", "versions").iterdir()
    return tuple(sorted(file.name.removesuffix(".py") for file in files if file.name[:1].isdigit()))


def head() -> str:
    """The revision that this package works with."""
    return revisions()[-1]


def current(settings: Settings) -> str | None:
    """The revision that the database is at; None where the schema is not there."""
    with Database.of(settings).connection(patience=30) as connection:
        return _revision(connection, settings)


def _revision(connection: Connection, settings: Settings) -> str | None:
    query = sql.SQL("SELECT version_num FROM {}").format(sql.Identifier(settings.schema, "alembic_version"))
    try:
        row = connection.execute(query).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    return row[0] if row else None


def check(settings: Settings) -> None:
    """Raise :class:`SchemaError` unless the database is at exactly this package's revision."""
    found = current(settings)
    if found == head():
        return
    where = f"schema {settings.schema!r} in {settings.masked()}"
    if found is None:
        raise SchemaError(f"there is no {where}; create it with: {COMMAND}")
    if found in revisions():
        raise SchemaError(f"{where} is at {found}, older than this package ({head()}); update it with: {COMMAND}")
    raise SchemaError(
        f"{where} is at {found}, which this package (at {head()}) does not know: a newer version made it;"
        " upgrade this process with: pip install --upgrade pgtruth-transport"
    )


def ensure_present(settings: Settings) -> None:
    """Raise :class:`SchemaError` where the schema is missing, or make it with ``auto_migrate``; asks once per process.

    Which revision it is at concerns workers (:func:`check`): a producer goes on through a rolling upgrade.
    """
    if settings in _present:
        return
    with Database.of(settings).asking() as connection:
        found = _revision(connection, settings)
    if found is None:
        if not settings.auto_migrate:
            check(settings)
        migrate(settings)
    _present.add(settings)


_present: set[Settings] = set()


def migrate(settings: Settings) -> bool:
    """Bring the database to this package's revision; says whether there was anything to do.

    Raises :class:`SchemaError` where the schema is newer than the package.
    """
    found = current(settings)
    if found == head():
        return False
    if found is not None and found not in revisions():
        check(settings)
    _upgrade(settings)
    return True


def _upgrade(settings: Settings) -> None:
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import NullPool, create_engine, text
    from sqlalchemy.schema import CreateSchema

    def connect() -> psycopg.Connection[tuple[object, ...]]:
        connection = Database.of(settings).open("migrate")
        connection.isolation_level = psycopg.IsolationLevel.READ_COMMITTED  # look again after waiting for the lock
        connection.autocommit = False
        return connection

    engine = create_engine("postgresql+psycopg://", creator=connect, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"),
            {"name": f"pgtruth migrate {settings.schema}"},
        )
        exists = connection.scalar(
            text("SELECT true FROM pg_namespace WHERE nspname = :schema"), {"schema": settings.schema}
        )
        if not exists:  # IF NOT EXISTS would ask for the right to create schemas even where there is one
            connection.execute(CreateSchema(settings.schema))
        config = Config()
        config.set_main_option("script_location", "pgtruth_transport:migrations")
        config.attributes.update(connection=connection, schema=settings.schema)
        command.upgrade(config, "head")
