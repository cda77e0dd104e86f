"""Tasks that need the application's own data: a table ``public.orders``, written in the transaction that enqueues."""

from __future__ import annotations

import asyncio
import os
import signal

import psycopg
import sqlalchemy as sa
from celery import Task
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from pgtruth_transport.transactions import finish_with, finish_with_async, in_transaction
from pgtruth_transport.urls import parse_url
from tests.apps.basic import BROKER, app, recorded
from tests.support_transactions import sqlalchemy_url


@app.task(bind=True)
def ship(self: Task, order: int) -> int:
    """Recorded; fails where the order is not there."""
    with recorded(self), psycopg.connect(parse_url(BROKER), autocommit=True) as connection:
        done = connection.execute("UPDATE public.orders SET shipped = shipped + 1 WHERE id = %s", (order,))
        if done.rowcount != 1:
            raise LookupError(f"there is no order {order}")
        return order


@app.task(bind=True)
def place(self: Task, order: int, fail: bool = False) -> str:
    """Writes an order, and asks for its shipping, in one transaction."""
    with recorded(self), psycopg.connect(parse_url(BROKER)) as connection, in_transaction(connection):
        connection.execute("INSERT INTO public.orders (id) VALUES (%s)", (order,))
        asked = ship.delay(order)
        if fail:
            raise ValueError("no")
        return str(asked.id)


@app.task
def total(orders: list[int]) -> int:
    """The body of a chord."""
    return sum(orders)


def _die_once(task: Task) -> None:
    with psycopg.connect(parse_url(BROKER), autocommit=True) as connection:
        row = connection.execute("SELECT retry_count FROM pgtruth.jobs WHERE id = %s", (task.request.id,)).fetchone()
    if row == (0,):
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def finish(self: Task, order: int, kind: str = "psycopg", die: str = "") -> str:
    """Ships an order and ends itself in one transaction; dies around its COMMIT, or rolls back, if asked to."""
    update = f"UPDATE public.orders SET shipped = shipped + 1 WHERE id = {order}"
    with recorded(self):
        if kind == "psycopg":
            with psycopg.connect(parse_url(BROKER)) as connection:
                connection.execute(update)
                finish_with(connection, order)
                if die == "before":
                    _die_once(self)
                connection.rollback() if die == "rollback" else connection.commit()
        elif kind == "session":
            engine = sa.create_engine(sqlalchemy_url(BROKER, "psycopg2"))
            with Session(engine) as session, session.begin():
                session.execute(sa.text(update))
                finish_with(session, order)
            engine.dispose()
        elif kind == "connection":
            engine = sa.create_engine(sqlalchemy_url(BROKER, "psycopg"))
            with engine.begin() as core, in_transaction(core):
                core.execute(sa.text(update))
                ship.delay(order)
                finish_with(core, order)
            engine.dispose()
        else:
            asyncio.run(_finish_async(update, order))
        if die == "after":
            os.kill(os.getpid(), signal.SIGKILL)
    return "what the body returns"


async def _finish_async(update: str, order: int) -> None:
    engine = create_async_engine(sqlalchemy_url(BROKER, "asyncpg"))
    async with AsyncSession(engine) as session, session.begin():
        await session.execute(sa.text(update))
        await finish_with_async(session, order)
    await engine.dispose()
