"""Tasks that need the application's own data: a table ``public.orders``, written in the transaction that enqueues."""

from __future__ import annotations

import psycopg
from celery import Task

from pgtruth_transport import in_transaction
from pgtruth_transport.urls import parse_url
from tests.apps.basic import BROKER, app, recorded


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
