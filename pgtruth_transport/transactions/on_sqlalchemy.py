"""``in_transaction`` on SQLAlchemy sessions and connections, sync and async.

SQLAlchemy says by events what is about to happen: before a statement (a savepoint is one) and before a commit, what is
collected is written on the same connection. An asynchronous session or connection raises the same events where its
driver can be awaited, so one implementation serves both. After the commit a session says so; a bare connection does
not, but it is then left by the block, returned to the pool, or begins the next transaction.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, event
from sqlalchemy.exc import InvalidRequestError

from pgtruth_transport.db import Database
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.transactions import identity
from pgtruth_transport.transactions.identity import Identity
from pgtruth_transport.transactions.scope import Scope, flush_in_order

if TYPE_CHECKING:
    from sqlalchemy.orm import Session, SessionTransaction

#: Where a connection or session keeps the hooks that were put on it.
_HOOKS: Final = "pgtruth_hooks"
_PARAMETER: Final = re.compile(r"%\((\w+)\)s|%%")
_IN_ERROR: Final = 3  # libpq's PQTRANS_INERROR, as psycopg and psycopg2 report it


def scope_of(target: Any) -> Scope | None:
    """The scope for a SQLAlchemy connection or session; ``None`` for anything else."""
    orm, asyncio = sys.modules.get("sqlalchemy.orm"), sys.modules.get("sqlalchemy.ext.asyncio")
    if orm and isinstance(target, orm.scoped_session):
        target = target()
    if asyncio and isinstance(target, asyncio.async_scoped_session):
        target = target()
    if isinstance(target, Connection):
        return ConnectionScope(target)
    if orm and isinstance(target, orm.Session):
        return SessionScope(target)
    if asyncio and isinstance(target, asyncio.AsyncConnection):
        if target.closed or target.sync_connection is None:
            raise TransactionError("in_transaction() was given a closed connection; use `async with engine.connect()`")
        return ConnectionScope(target.sync_connection, target)
    if asyncio and isinstance(target, asyncio.AsyncSession):
        return SessionScope(target.sync_session, target)
    return None


@cache
def for_driver(statement: bytes, paramstyle: str) -> tuple[str, tuple[str, ...]]:
    """A statement as a driver wants it, and the order of its parameters (empty: by name)."""
    text = statement.decode()
    if paramstyle == "pyformat":
        return text, ()
    names: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        name = match[1]
        if name is None:
            return "%"
        if name not in names:
            names.append(name)
        return f"${names.index(name) + 1}"

    return _PARAMETER.sub(numbered, text), tuple(names)


class _Scope(Scope):
    """What sessions and connections have in common. ``awaitable`` is the asynchronous target, if it is one."""

    def __init__(self, awaitable: Any) -> None:
        super().__init__()
        self._awaitable = awaitable
        self.asynchronous = awaitable is not None
        self._found: Identity | None = None

    def connection(self) -> Connection:
        """The connection of the transaction; begins one if none is open. Waits."""
        raise NotImplementedError

    def in_progress(self) -> Connection | None:
        """The connection, if its transaction is open already. Does not wait."""
        raise NotImplementedError

    def check_target(self) -> None:
        """Raise if the target itself can carry nothing now."""
        raise NotImplementedError

    def check(self, database: Database) -> None:
        self.check_target()
        connection = self.in_progress() if self.asynchronous else self._joined()
        if connection is None:
            return  # asynchronous, before its first statement: looked at when the rows are written
        driver = _checked(connection)
        if identity.is_confirmed(driver, database):
            return
        if self._found is None and self.asynchronous:
            return
        identity.confirm(driver, database, self._found or _identify(connection))

    def write(self) -> None:
        with self.dropping():
            connection = self._joined()
            driver = _checked(connection)
            for database in self.databases():
                if not identity.is_confirmed(driver, database):
                    identity.confirm(driver, database, _identify(connection))
        super().write()

    def run(self, statement: bytes, parameters: Mapping[str, Any]) -> list[Any]:
        return _execute(self._joined(), statement, parameters)

    async def write_async(self) -> None:
        await self._awaitable.run_sync(lambda _: self.write())

    async def prepare_async(self) -> None:
        # Only inside a transaction: to begin one here would forbid the application's own begin().
        if self.asynchronous and (connection := self.in_progress()) is not None:
            self._found = await self._awaitable.run_sync(lambda _: _identify(connection))

    def _joined(self) -> Connection:
        try:
            connection = self.connection()
        except InvalidRequestError as exc:
            raise TransactionError(f"in_transaction() cannot use this transaction: {exc}") from exc
        _ConnectionHooks.of(connection).add(self)
        return connection

    def over(self) -> None:
        """The transaction has ended."""
        if self.has_written:
            self.ended()


class SessionScope(_Scope):
    """On a ``Session``, or an ``AsyncSession``'s own sync session."""

    def __init__(self, session: Session, awaitable: Any = None) -> None:
        super().__init__(awaitable)
        self.session = session
        self._current: Connection | None = None  # joined, while its transaction is open

    def connection(self) -> Connection:
        if self._current is None:
            self._current = self.session.connection()
        return self._current

    def in_progress(self) -> Connection | None:
        return self._current

    def check_target(self) -> None:
        if not self.session.is_active:
            raise TransactionError("the session's transaction has failed; call rollback() on it, then publish again")

    async def prepare_async(self) -> None:
        if self.asynchronous and self.session.in_transaction():
            self._current = await self._awaitable.run_sync(lambda _: self._joined())
        await super().prepare_async()

    def watch(self) -> None:
        if not self.session.in_transaction():
            self.session.begin()  # as a statement would; without it rollback() does nothing, and says nothing
        _SessionHooks.of(self.session).add(self)

    def enter_savepoint(self, transaction: SessionTransaction) -> None:
        """Write what was published before the savepoint before it; a session opens it as late as it can."""
        if self._current is None and not self.is_idle:
            assert transaction.parent is not None
            self._current = transaction.parent.connection(None)
        self.flush()

    def over(self) -> None:
        self.drop()  # a commit has written it
        if self._current is not None:
            _ConnectionHooks.of(self._current).remove(self)
        self._current = self._found = None
        super().over()
        if not self.open:
            self.left()

    def left(self) -> None:
        if self.is_idle:
            _SessionHooks.of(self.session).remove(self)
            if self._current is not None:
                _ConnectionHooks.of(self._current).remove(self)


class ConnectionScope(_Scope):
    """On a ``Connection``, or an ``AsyncConnection``'s own sync connection."""

    def __init__(self, connection: Connection, awaitable: Any = None) -> None:
        super().__init__(awaitable)
        self._connection = connection

    def connection(self) -> Connection:
        return self._connection

    def in_progress(self) -> Connection | None:
        return self._connection if self._connection.in_transaction() else None

    def check_target(self) -> None:
        connection = self._connection
        if connection.closed or connection.invalidated:
            raise TransactionError("the connection given to in_transaction() is closed; publish on an open one")
        for transaction in (connection.get_nested_transaction(), connection.get_transaction()):
            if transaction is not None and not transaction.is_active:
                raise TransactionError("the transaction given to in_transaction() is over; begin a new one")

    def watch(self) -> None:
        if not self._connection.in_transaction():
            self._connection.begin()  # as a statement would; without it commit() does nothing, and says nothing
        _ConnectionHooks.of(self._connection).add(self)
        _on_return(self._connection, self)

    def over(self) -> None:
        super().over()
        if not self.open:
            self.left()

    def left(self) -> None:
        if self.has_written and not self._connection.in_transaction():
            self.ended()
        if self.is_idle:
            _ConnectionHooks.of(self._connection).remove(self)


class _Hooks:
    """The scopes that a connection or session must tell of what happens; listeners stay as long as it lives."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    @classmethod
    def of(cls, target: Any) -> Any:
        found = vars(target).get(_HOOKS)
        if found is None:
            found = vars(target)[_HOOKS] = cls()
            for name in (item for item in vars(cls) if not item.startswith("_")):
                event.listen(target, name, getattr(found, name))
        return found

    def add(self, scope: Any) -> None:
        if scope not in self.scopes:
            self.scopes.append(scope)

    def remove(self, scope: Any) -> None:
        if scope in self.scopes:
            self.scopes.remove(scope)


class _ConnectionHooks(_Hooks):
    """Each public method is the listener of the event of its name."""

    def before_cursor_execute(self, *_: object) -> None:
        flush_in_order(self.scopes)

    def commit(self, _: Connection) -> None:
        flush_in_order(self.scopes)

    def rollback(self, _: Connection) -> None:
        for scope in list(self.scopes):
            scope.forget()

    def rollback_savepoint(self, *_: object) -> None:
        for scope in self.scopes:
            scope.drop()

    def begin(self, _: Connection) -> None:
        for scope in list(self.scopes):
            if isinstance(scope, ConnectionScope):
                scope.over()


class _SessionHooks(_Hooks):
    """Each public method is the listener of the event of its name."""

    def after_begin(self, _: Session, __: SessionTransaction, connection: Connection) -> None:
        for scope in self.scopes:
            _ConnectionHooks.of(connection).add(scope)

    def after_transaction_create(self, session: Session, transaction: SessionTransaction) -> None:
        if transaction.nested and self.scopes:
            for scope in list(self.scopes):
                scope.enter_savepoint(transaction)
            session.connection()  # opens it, so that its rollback is one

    def before_commit(self, session: Session) -> None:
        if not session.in_nested_transaction():
            flush_in_order(self.scopes)

    def after_soft_rollback(self, _: Session, transaction: SessionTransaction) -> None:
        if transaction.nested:  # perhaps one that was never opened, because nothing was asked of it
            for scope in self.scopes:
                scope.drop()

    def after_transaction_end(self, _: Session, transaction: SessionTransaction) -> None:
        if transaction.parent is None:
            for scope in list(self.scopes):
                scope.over()


def _on_return(connection: Connection, scope: ConnectionScope) -> None:
    """Have ``scope`` told when the connection goes back to its pool: its transaction has ended by then."""
    engine = connection.engine
    if not event.contains(engine, "checkin", _returned):
        event.listen(engine, "checkin", _returned)
    scopes = connection.info.setdefault(_HOOKS, [])
    if scope not in scopes:
        scopes.append(scope)


def _returned(_: object, record: Any) -> None:
    for scope in record.info.pop(_HOOKS, ()):
        scope.over()


def _checked(connection: Connection) -> Any:
    """The driver's own connection, if it can carry a job now."""
    dialect = connection.dialect
    if dialect.name != "postgresql" or dialect.paramstyle not in ("pyformat", "numeric_dollar"):
        raise TransactionError(
            f"in_transaction() was given a {dialect.name}+{dialect.driver} connection;"
            " it takes postgresql with psycopg, psycopg2 or asyncpg"
        )
    fairy = connection.connection
    if getattr(fairy.dbapi_connection, "autocommit", False):
        raise TransactionError("in_transaction() was given a connection in AUTOCOMMIT mode; use one with transactions")
    driver = fairy.driver_connection
    if getattr(getattr(driver, "info", None), "transaction_status", None) == _IN_ERROR:
        raise TransactionError("the transaction given to in_transaction() has failed; roll back first")
    return driver


def _identify(connection: Connection) -> Identity:
    return Identity(*_execute(connection, identity.QUERY, {})[0])


def _execute(connection: Connection, statement: bytes, parameters: Mapping[str, Any]) -> list[Any]:
    text, names = for_driver(statement, connection.dialect.paramstyle)
    values: Any = tuple(parameters[name] for name in names) if names else dict(parameters)
    result = connection.exec_driver_sql(text, values or None)
    return list(result.fetchall()) if result.returns_rows else []
