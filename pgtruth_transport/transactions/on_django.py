"""``in_transaction`` on a Django connection alias, inside ``transaction.atomic()``.

Django wraps every statement of a connection (a savepoint is one), so what is collected is written before the next of
them; inside ``atomic()`` no commit can come before the block is left. Workers are woken by ``transaction.on_commit``,
which keeps account of savepoints; ``delay_on_commit`` works as it always does: its publish comes after the block.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Self

from django.db import connections, transaction
from django.utils.connection import ConnectionDoesNotExist

from pgtruth_transport.db import Database
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.transactions import identity
from pgtruth_transport.transactions.identity import Identity
from pgtruth_transport.transactions.scope import Scope, wake_committed


class DjangoScope(Scope):
    """On ``django.db.connections[alias]`` of this thread."""

    def __init__(self, alias: str) -> None:
        super().__init__()
        self.alias = alias
        self._wrapped: Any = None
        try:
            self.connection = connections[alias]
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

    def write(self) -> None:
        with self.connection.cursor() as cursor:
            for database in self.databases():
                self._confirm(cursor, database)
            for statement in self.take():
                cursor.execute(statement.database.sql(statement.name).decode(), statement.parameters)
                found = {row[0] for row in cursor.fetchall()} if statement.rows else set()
                self.note(statement, found)
                new = [row for row in statement.rows if row.id in found]
                if new:
                    wake = partial(wake_committed, statement.database, new)
                    transaction.on_commit(wake, using=self.alias, robust=True)
        self._written.clear()  # on_commit has them

    def _confirm(self, cursor: Any, database: Database) -> None:
        driver = self.connection.connection
        if not identity.is_confirmed(driver, database):
            with self.dropping():
                cursor.execute(identity.QUERY.decode())
                identity.confirm(driver, database, Identity(*cursor.fetchone()))

    def _before_statement(self, execute: Callable[..., Any], *call: Any) -> Any:
        self.flush()
        return execute(*call)
