"""Enqueue in the application's own transaction (ADR-007): the job exists if, and only if, the application's data do.

    with in_transaction(session):
        session.add(order)
        send_invoice.delay(order.id)
    session.commit()

Inside the block every publish of this context (``delay``, ``send_task``, a whole group or chord) becomes rows on that
connection, and its id is known at once. The block begins and ends no transaction: it joins the one that is open, or
that the first statement opens. COMMIT makes all of them run; a rollback, also to a savepoint, or a crash before COMMIT
leaves none, and nobody is woken. After COMMIT idle workers are woken; a crash in between, or a signal that cannot be
sent, costs at most one poll interval.

======================================================  ============================================================
``sqlalchemy.orm.Session``, ``scoped_session``           drivers psycopg, psycopg2
``sqlalchemy.ext.asyncio.AsyncSession``                  drivers psycopg, asyncpg
``sqlalchemy.Connection``, ``AsyncConnection``            the same
``psycopg.Connection``, ``psycopg.AsyncConnection``       not in autocommit mode, or inside ``conn.transaction()``
a Django connection alias such as ``"default"``           inside ``transaction.atomic()``
======================================================  ============================================================

**When the rows are written.** Publishes are collected and written, at most 1,000 a statement, before the application's
next statement on that connection, before its COMMIT, and when the block is left, whichever comes first. So savepoints,
a commit inside the block and triggers see them in their place, and a group of 10,000 costs a handful of statements.

**Asynchronous connections** take ``async with``: ``delay()`` itself cannot wait, so the rows are collected and written
at those same points, where the driver can be awaited. A plain ``with`` works as well; what it has collected is then
written with the next statement or the commit.

**Nesting.** The innermost block counts; when it is left, the one around it counts again. Leaving a block by an
exception changes nothing about the transaction: what was published stays part of it, and shares its end.

**Threads and tasks.** A block belongs to its context. Other threads and asyncio tasks do not see it; a task that is
started inside the block joins it as long as the block is open, and publishes at once afterwards.

**Results.** Inside the block nobody can run what it has published: ``get()`` of such a result is refused at once. After
the block, and before the commit, it would wait until its timeout.

**The job's own end.** ``finish_with(session, result)``, last thing in a task's body, ends the job in the same
transaction.

Refused with :class:`~pgtruth_transport.errors.TransactionError`: another database than the broker's, a closed
connection, a transaction that has failed, a connection in autocommit mode outside a transaction, psycopg's pipeline
mode.
"""

from __future__ import annotations

import sys
from typing import Any

from pgtruth_transport.errors import TransactionError
from pgtruth_transport.transactions import bulk
from pgtruth_transport.transactions.scope import Scope

__all__ = ["TransactionError", "finish_with", "finish_with_async", "in_transaction"]

_ALLOWED = (
    "a SQLAlchemy Session, AsyncSession, Connection or AsyncConnection, a psycopg Connection or AsyncConnection,"
    " or the alias of a Django connection"
)


def in_transaction(target: Any) -> Scope:
    """Make every publish in the ``with`` block part of ``target``'s transaction (ADR-007).

    ``target`` is a SQLAlchemy or psycopg connection or session, sync or async, or a Django connection alias; anything
    else, and whatever cannot carry a job, is a :class:`TransactionError`. See the module for what is promised.
    """
    scope = _scope_of(target, "in_transaction")
    bulk.prepare_apps()
    return scope


def finish_with(target: Any, result: Any = None) -> None:
    """Inside a task's body: end its job as done with ``result`` in ``target``'s transaction, right before the commit.

    The work, the job's end and what follows from it commit together; the body's return value is then not looked at.
    ``target`` is as for :func:`in_transaction`, but not asynchronous. Raises :class:`TransactionError` outside a task,
    and where the attempt has lost its lease: roll back then. The job's row is locked until the commit, so make this the
    last statement of the transaction, and of the task.
    """
    from pgtruth_transport.transactions import finish

    scope = _scope_of(target, "finish_with")
    if scope.asynchronous:
        raise TransactionError("finish_with() was given an asynchronous connection; use `await finish_with_async(…)`")
    finish.write(scope, finish.conclude(result))


async def finish_with_async(target: Any, result: Any = None) -> None:
    """:func:`finish_with` on an ``AsyncSession`` or ``AsyncConnection`` of SQLAlchemy."""
    from pgtruth_transport.transactions import finish

    if not hasattr(target, "run_sync"):
        raise TransactionError(
            f"finish_with_async() was given a {type(target).__qualname__}; it takes SQLAlchemy's AsyncSession or"
            " AsyncConnection"
        )
    end = finish.conclude(result)  # here, not below: Celery's current task is not known there
    await target.run_sync(lambda sync: finish.write(_scope_of(sync, "finish_with_async"), end))


def _scope_of(target: Any, caller: str) -> Scope:
    if isinstance(target, str):
        try:
            from pgtruth_transport.transactions.on_django import DjangoScope
        except ImportError as exc:
            raise TransactionError(
                f"{caller}({target!r}): a name is that of a Django connection, and Django is not installed here;"
                f" it takes {_ALLOWED}"
            ) from exc
        return DjangoScope(target)
    # A target's library has been imported by whoever made it: nothing is imported here that is not in use.
    if "sqlalchemy" in sys.modules:
        from pgtruth_transport.transactions import on_sqlalchemy

        if (scope := on_sqlalchemy.scope_of(target)) is not None:
            return scope
    if "psycopg" in sys.modules:
        from pgtruth_transport.transactions import on_psycopg

        if (scope := on_psycopg.scope_of(target)) is not None:
            return scope
    raise TransactionError(f"{caller}() was given a {type(target).__qualname__}; it takes {_ALLOWED}")
