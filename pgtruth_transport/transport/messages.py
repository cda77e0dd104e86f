"""Messages that are not tasks: remote control, events, plain kombu. Rows with a lease each; never a job.

    put(conn, db, queues, message) -> list[str]              kombu's message dict; the queues that took it (wake them)
    fetch(conn, db, queues, count, owner=None, lease_seconds=0) -> list[Delivery]   owner None: no_ack, deleted
    ack(conn, db, ids, owner) -> int                         how many were still held
    requeue(conn, db, ids, owner) -> int                     back to their places, redelivered (wake their queues)
    renew(conn, db, ids, owner, lease_seconds) -> frozenset[int]   those still held
    purge(conn, db, queue) -> int;   size(conn, db, queue) -> int  ready ones only
    delete_expired(conn, db, limit=1000) -> int              for the sweep (entities.collect_garbage calls it)

    Delivery(id, queue, redelivered, payload)     payload: what kombu.transport.virtual.Message takes, body = bytes,
                                                  delivery_tag set to "m<id>", delivery_info["redelivered"] set

Promises: a message is delivered in the order priority (9 first), then age, of its queue, and a requeue keeps its place.
A consumer that acknowledges holds it under a lease; if it dies, the lease runs out and the next consumer gets the
message, marked as redelivered. A consumer that does not acknowledge has it deleted by the statement that delivers it:
if it dies then, the message is gone, as in AMQP. An expired message is never delivered. Every statement of a holder
names the owner, so that a late one changes nothing. Bodies are bytes, NUL included. If the *server* crashes, the last
moments of transient queues (remote control, events) may be lost or delivered twice; durable queues lose nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count as counter
from typing import Any, Final

import psycopg
from kombu.exceptions import KombuError
from kombu.utils import json
from psycopg.pq import TransactionStatus

from pgtruth_transport.db import Database
from pgtruth_transport.errors import RefusedMessage

Connection = psycopg.Connection[Any]
MAX_PRIORITY: Final = 9
_PRIORITIES: Final = range(MAX_PRIORITY, -1, -1)
_UNSTORABLE: Final = (TypeError, ValueError, RecursionError, KombuError)
_turn = counter()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message that was handed out."""

    id: int
    queue: str
    redelivered: bool  # somebody has had it before
    payload: dict[str, Any]


def put(conn: Connection, db: Database, queues: Sequence[str], message: Mapping[str, Any]) -> list[str]:
    """Store ``message`` once per queue, in one statement; return the queues that took it.

    A queue whose ttl has run out takes nothing. One that nobody has declared keeps the message for a day. Raises
    :class:`RefusedMessage` for what cannot be stored; then nothing is.
    """
    if not queues:
        return []
    properties = dict(message.get("properties") or {})
    parameters = {
        "queues": [checked_name(queue) for queue in dict.fromkeys(queues)],
        "priority": _priority(properties.get("priority")),
        "expires_in": _expires_in(properties.get("expiration")),
        "headers": _encoded("headers", message.get("headers") or {}),
        "properties": _encoded(
            "properties",
            properties
            | {
                "content_type": message.get("content-type"),
                "content_encoding": message.get("content-encoding"),
            },
        ),
        "body": _bytes(message.get("body")),
        "relax": _may_relax(conn),
    }
    return [row[0] for row in conn.execute(db.sql("message_put"), parameters)]


def fetch(
    conn: Connection,
    db: Database,
    queues: Sequence[str],
    count: int,
    owner: str | None = None,
    lease_seconds: float = 0.0,
) -> list[Delivery]:
    """At most ``count`` messages of ``queues``, each queue in its order; calls begin with another queue each time.

    With an ``owner`` they are held for ``lease_seconds``; without one they are deleted. Messages whose lease has run
    out are delivered again.
    """
    if not queues or count <= 0:
        return []
    start = next(_turn) % len(queues)
    turn = [*queues[start:], *queues[:start]]
    parameters: dict[str, Any] = {
        "queues": [queue for queue in turn for _ in _PRIORITIES],
        "priorities": [*_PRIORITIES] * len(turn),
        "count": count,
        "relax": _may_relax(conn),
    }
    if owner is None:
        rows = conn.execute(db.sql("message_take"), parameters).fetchall()
    else:
        parameters |= {"owner": owner, "lease": lease_seconds}
        rows = conn.execute(db.sql("message_claim"), parameters).fetchall()
    place = {queue: n for n, queue in enumerate(turn)}
    rows.sort(key=lambda row: (place[row[1]], -row[2], row[0]))
    return [_delivery(row) for row in rows]


def ack(conn: Connection, db: Database, ids: Iterable[int], owner: str) -> int:
    """Delete these messages; return how many ``owner`` still held."""
    return conn.execute(db.sql("message_ack"), {"ids": list(ids), "owner": owner}).rowcount


def requeue(conn: Connection, db: Database, ids: Iterable[int], owner: str) -> int:
    """Give these messages back, to their old places; return how many ``owner`` still held. Wake their queues."""
    return conn.execute(db.sql("message_requeue"), {"ids": list(ids), "owner": owner}).rowcount


def renew(conn: Connection, db: Database, ids: Iterable[int], owner: str, lease_seconds: float) -> frozenset[int]:
    """Hold these messages for another ``lease_seconds``; return those that ``owner`` still held."""
    parameters = {"ids": list(ids), "owner": owner, "lease": lease_seconds}
    return frozenset(row[0] for row in conn.execute(db.sql("message_renew"), parameters))


def purge(conn: Connection, db: Database, queue: str) -> int:
    """Delete the messages of ``queue`` that no consumer holds; return how many there were."""
    return conn.execute(db.sql("message_purge"), {"queue": checked_name(queue)}).rowcount


def size(conn: Connection, db: Database, queue: str) -> int:
    """How many messages of ``queue`` could be delivered now."""
    row = conn.execute(db.sql("message_count"), {"queue": checked_name(queue)}).fetchone()
    return int(row[0]) if row else 0


def delete_expired(conn: Connection, db: Database, limit: int = 1000) -> int:
    """Delete messages past their expiration, and those of expired queues: about ``limit`` of them, return how many."""
    return conn.execute(db.sql("message_expire"), {"count": limit}).rowcount


def checked_name(name: str) -> str:
    """``name``, if PostgreSQL can store it; raises :class:`RefusedMessage`."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise RefusedMessage(f"the name {name!r} holds half a surrogate pair; use valid Unicode") from None
    if "\0" in name:
        raise RefusedMessage(f"the name {name!r} holds a NUL character; remove it")
    return name


def _may_relax(conn: Connection) -> bool:
    """Whether the statement is its own transaction: a caller's transaction keeps the durability that it was given."""
    return conn.autocommit and conn.pgconn.transaction_status == TransactionStatus.IDLE


def _delivery(row: Sequence[Any]) -> Delivery:
    message_id, queue, _, headers, properties, body, redelivered = row
    known: dict[str, Any] = json.loads(properties)
    content_type, content_encoding = known.pop("content_type", None), known.pop("content_encoding", None)
    known["delivery_tag"] = f"m{message_id}"
    known["delivery_info"] = {**(known.get("delivery_info") or {}), "redelivered": redelivered}
    payload = {
        "body": body,
        "headers": json.loads(headers),
        "properties": known,
        "content-type": content_type,
        "content-encoding": content_encoding,
    }
    return Delivery(message_id, queue, redelivered, payload)


def _priority(value: Any) -> int:
    try:
        return max(0, min(int(value), MAX_PRIORITY))
    except (TypeError, ValueError):
        return 0


def _expires_in(expiration: Any) -> float | None:
    """Seconds, from AMQP's ``expiration``: milliseconds, as text."""
    if expiration is None:
        return None
    try:
        return max(float(expiration), 0.0) / 1000.0
    except (TypeError, ValueError):
        raise RefusedMessage(f"the property expiration is {expiration!r}; it must be milliseconds") from None


def _encoded(part: str, values: Mapping[str, Any]) -> bytes:
    try:
        text: str = json.dumps(values)
        return text.encode()
    except _UNSTORABLE as exc:
        raise RefusedMessage(f"the message's {part} ({', '.join(map(str, values))}) are not JSON: {exc}") from exc


def _bytes(body: Any) -> bytes:
    match body:
        case None:
            return b""
        case str():
            try:
                return body.encode()
            except UnicodeEncodeError as exc:
                raise RefusedMessage(f"the message's body holds half a surrogate pair at {exc.start}") from None
        case bytes() | bytearray() | memoryview():
            return bytes(body)
        case _:
            raise RefusedMessage(f"the message's body is {type(body).__name__}; it must be bytes or text: serialise it")
