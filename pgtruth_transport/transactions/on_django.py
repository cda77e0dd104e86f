"""``in_transaction`` on a Django connection alias, inside ``transaction.atomic()``.

Django wraps every statement of a connection (a savepoint is one), so what is collected is written before the next of
them; inside ``atomic()`` no commit can come before the block is left. Workers are woken by ``transaction.on_commit``,
which keeps account of savepoints; ``delay_on_commit`` works as it always does: its publish comes after the block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, transaction
from django.utils.connection import ConnectionDoesNotExist

from pgtruth_transport.db import Database
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.jobs import JobRow
from pgtruth_transport.transactions import identity
from pgtruth_transport.transactions.identity import Identity
from pgtruth_transport.transactions.scope import Scope, Statement, wake_committed


class DjangoScope(Scope):
    """On ``django.db.connections[alias]`` of this thread."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        self.alias = alias
        self._wrapped: Any = None
        try:
            self.connection = connections[alias]
        except ImproperlyConfigured as exc:
            raise TransactionError(
                f"in_transaction({alias!r}): a name is that of a Django connection, and Django has no settings in this"
                " process; set DJANGO_SETTINGS_MODULE, or give it the connection itself"
            ) from exc
        except ConnectionDoesNotExist as exc:
            raise TransactionError(
                f"in_transaction({alias!r}): Django's DATABASES has no such alias, only {', '.join(connections)}"
            ) from exc
        if self.connection.vendor != "postgresql":
            raise TransactionError(
                f"in_transaction({alias!r}): this connection goes to {self.connection.vendor}, not to PostgreSQL"
            )

    def __enter__(self) -> Self:
        if not self.connection.in_atomic_block:
            raise TransactionError(
                f"in_transaction({self.alias!r}) is in no transaction;"
                f" use it inside `with transaction.atomic({self.alias!r}):`"
            )
        super().__enter__()
        self._wrapped = self.connection.execute_wrapper(self._before_statement)
        self._wrapped.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wrapped.__exit__(None, None, None)
        self._close()
        if self.is_idle:
            return
        if self.connection.needs_rollback or self.connection.closed_in_transaction:
            self.drop()
            return
        with transaction.mark_for_rollback_on_error(self.alias):
            self.flush()

    def check(self, database: Database) -> None:
        if not self.connection.in_atomic_block:
            raise TransactionError(
                f"in_transaction({self.alias!r}): the atomic() around the block is over; publish inside it"
            )
        if self.connection.closed_in_transaction:
            raise TransactionError(f"in_transaction({self.alias!r}): the connection was closed inside the transaction")
        if self.connection.needs_rollback:
            raise TransactionError(
                f"in_transaction({self.alias!r}): the transaction has failed; leave its atomic() first"
            )

    def run(self, statement: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement.decode(), parameters)
            return list(cursor.fetchall()) if cursor.description else []

    def write(self) -> None:
        with self.dropping():
            for database in self.databases():
                self._confirm(database)
        super().write()

    def note(self, statement: Statement, new: set[str]) -> None:
        super().note(statement, new)
        self.hook()

    def hook(self) -> None:
        """Leave to ``on_commit``, which keeps account of savepoints, what is to be done after the commit."""
        written, self._written = self._written, []
        calls, self._afterwards = self._afterwards, []
        by_database: dict[Database, list[JobRow]] = {}
        for database, row in written:
            by_database.setdefault(database, []).append(row)
        for database, rows in by_database.items():
            transaction.on_commit(partial(wake_committed, database, rows), using=self.alias, robust=True)
        for call in calls:
            transaction.on_commit(call, using=self.alias, robust=True)

    def afterwards(self, call: Callable[[], None]) -> None:
        super().afterwards(call)
        self.hook()

    def _confirm(self, database: Database) -> None:
        driver = self.connection.connection
        if not identity.is_confirmed(driver, database):
            identity.confirm(driver, database, Identity(*self.run(identity.QUERY, {})[0]))

    def _before_statement(self, execute: Callable[..., Any], *call: Any) -> Any:
        self.flush()
        return execute(*call)
