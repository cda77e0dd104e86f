"""Whether a connection leads to the broker's database: the condition for a job and its data to commit together.

A database is known by its name and its server's start time, to the microsecond. Both can be read by everybody, they
hold across sockets, host names and poolers, and they tell a restored or cloned copy from its original. Only a yes is
kept, per driver connection; a no is looked up again each time: a server may have been restarted behind a pooler.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from pgtruth_transport import sql
from pgtruth_transport.db import Database
from pgtruth_transport.errors import TransactionError

#: What to ask on a connection; it names no schema.
QUERY: Final = sql.load("database_identify", "pgtruth")


class Identity(NamedTuple):
    """One database of one running server."""

    name: str
    started: str


_brokers: WeakKeyDictionary[Database, Identity] = WeakKeyDictionary()
_confirmed: WeakKeyDictionary[Any, WeakSet[Database]] = WeakKeyDictionary()


def is_confirmed(connection: object, database: Database) -> bool:
    """Whether this driver connection is known to lead to the broker's database."""
    return database in _confirmed.get(connection, ())


def confirm(connection: object, database: Database, found: Identity) -> None:
    """Remember that ``connection``, which leads to ``found``, leads to the broker's database; refuse it otherwise."""
    if found != _of_broker(database) and found != _of_broker(database, fresh=True):
        raise TransactionError(
            f"in_transaction() was given a connection to database {found.name!r}, which is another database, or on"
            f" another server, than the broker's {database.settings.masked()}; a job can only commit together with data"
            " in the same database: use a connection to that one, or publish outside the block"
        )
    _confirmed.setdefault(connection, WeakSet()).add(database)


def _of_broker(database: Database, *, fresh: bool = False) -> Identity:
    found = None if fresh else _brokers.get(database)
    if found is None:
        with database.connection() as connection:
            row = connection.execute(QUERY).fetchone()
        assert row is not None
        found = _brokers[database] = Identity(*row)
    return found
