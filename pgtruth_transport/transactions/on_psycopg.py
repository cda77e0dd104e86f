"""``in_transaction`` on psycopg connections, sync and async.

psycopg has no events. But whatever it sends (a statement, BEGIN, SAVEPOINT, COMMIT, ROLLBACK) it sends under
``connection.lock``; so while a block has something to do, a gate stands in front of that lock: what is collected is
written before anything else is sent, and when the transaction is over, workers are woken. Then the gate goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from pgtruth_transport.db import Database
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.transactions import identity
from pgtruth_transport.transactions.identity import Identity
from pgtruth_transport.transactions.scope import Scope, flush_in_order


def scope_of(target: object) -> Scope | None:
    """The scope for a psycopg connection; ``None`` for anything else."""
    if isinstance(target, psycopg.Connection):
        return PsycopgScope(target)
    if isinstance(target, psycopg.AsyncConnection):
        return AsyncPsycopgScope(target)
    return None


class _Gate:
    """Stands in front of a connection's lock as long as a block has something to do there."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.lock = connection.lock
        self.scopes: list[_PsycopgScope] = []

    @classmethod
    def of(cls, connection: Any) -> _Gate:
        """The gate of a connection, put up now if there is none."""
        found = getattr(connection, "lock", None)
        if isinstance(found, cls):
            return found
        if found is None:
            raise TransactionError(f"in_transaction() does not know psycopg {psycopg.__version__}; use 3.2 or 3.3")
        gate = connection.lock = cls(connection)
        return gate

    def remove(self, scope: _PsycopgScope) -> None:
        if scope in self.scopes:
            self.scopes.remove(scope)
        if not self.scopes and self.connection.lock is self:
            self.connection.lock = self.lock

    def locked(self) -> bool:
        return bool(self.lock.locked())

    # psycopg takes the lock of a sync connection by ``with``, that of an async one by ``async with``.

    def __enter__(self) -> None:
        flush_in_order(self.scopes)
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()
        self._look()

    async def __aenter__(self) -> None:
        for scope in list(self.scopes):
            if scope.busy:  # it is its own statement that comes by
                break
            await scope.flush_async()
        await self.lock.acquire()

    async def __aexit__(self, *error: object) -> None:
        self.lock.release()
        self._look()

    def _look(self) -> None:
        if self.connection.pgconn.transaction_status in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN):
            for scope in list(self.scopes):
                scope.over()


class _PsycopgScope(Scope):
    def __init__(self, connection: Any) -> None:
        super().__init__()
        self.connection = connection

    def check(self, database: Database) -> None:
        if self.connection.closed:
            raise TransactionError("the connection given to in_transaction() is closed; publish on an open one")
        pgconn = self.connection.pgconn
        if pgconn.pipeline_status != PipelineStatus.OFF:
            raise TransactionError("in_transaction() does not work in psycopg's pipeline mode; leave the pipeline")
        if pgconn.transaction_status == TransactionStatus.INERROR:
            raise TransactionError("the transaction given to in_transaction() has failed; roll back first")
        if pgconn.transaction_status == TransactionStatus.IDLE and self.connection.autocommit:
            raise TransactionError(
                "the connection given to in_transaction() is in autocommit mode and in no transaction;"
                " publish inside `with connection.transaction():`"
            )

    def watch(self) -> None:
        gate = _Gate.of(self.connection)
        if self not in gate.scopes:
            gate.scopes.append(self)

    def over(self) -> None:
        """The transaction has ended; the gate calls this."""
        if self.has_written:
            self.ended()
        if not self.open:
            self.left()

    def left(self) -> None:
        gate = self.connection.lock
        if isinstance(gate, _Gate) and (self.is_idle or self.connection.closed):
            gate.remove(self)


class PsycopgScope(_PsycopgScope):
    """On a ``psycopg.Connection``."""

    def check(self, database: Database) -> None:
        super().check(database)
        if not identity.is_confirmed(self.connection, database):
            identity.confirm(self.connection, database, Identity(*self.run(identity.QUERY, {})[0]))

    def run(self, statement: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        with psycopg.Cursor(self.connection, row_factory=tuple_row) as cursor:
            cursor.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []


class AsyncPsycopgScope(_PsycopgScope):
    """On a ``psycopg.AsyncConnection``."""

    asynchronous = True
    _found: Identity | None = None

    async def prepare_async(self) -> None:
        # Only inside a transaction: to begin one here would turn the application's own into a savepoint.
        if not self.connection.closed and self.connection.pgconn.transaction_status == TransactionStatus.INTRANS:
            self._found = await self._identify()

    def check(self, database: Database) -> None:
        super().check(database)
        if self._found is not None and not identity.is_confirmed(self.connection, database):
            identity.confirm(self.connection, database, self._found)

    async def write_async(self) -> None:
        for database in self.databases():
            if not identity.is_confirmed(self.connection, database):
                with self.dropping():
                    identity.confirm(self.connection, database, await self._identify())
        async with psycopg.AsyncCursor(self.connection, row_factory=tuple_row) as cursor:
            for statement in self.take():
                await cursor.execute(statement.database.sql(statement.name), statement.parameters)
                self.note(statement, {row[0] for row in await cursor.fetchall()} if statement.rows else set())

    async def _identify(self) -> Identity:
        async with psycopg.AsyncCursor(self.connection, row_factory=tuple_row) as cursor:
            row = await (await cursor.execute(identity.QUERY)).fetchone()
        assert row is not None
        return Identity(*row)
