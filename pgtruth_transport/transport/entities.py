"""Exchanges, queues and bindings: rows that every process shares, so that ``control`` and Flower reach every worker.

    entities = Entities.of(database)         one per process and database; thread-safe; may be used after a fork
    entities.declare_exchange(conn, name, type="direct", durable=True, auto_delete=False)   raises NotEquivalent
    entities.delete_exchange(conn, name)                              and its bindings
    entities.has_exchange(conn, name) -> bool                         (passive declare)
    entities.declare_queue(conn, name, durable=True, auto_delete=False, ttl=None)           ttl: seconds, from x-expires
    entities.delete_queue(conn, name, if_empty=False) -> int          with its messages (their count) and bindings
    entities.has_queue(conn, name) -> bool                            (passive declare)
    entities.touch(conn, names)              call at every poll, best from the lease keeper's thread; costs nothing
                                             until a third of a ttl has passed; restores what was collected meanwhile
    entities.bind(conn, queue, exchange, routing_key);  entities.unbind(conn, queue, exchange, routing_key)
    entities.lookup(conn, exchange, routing_key) -> list[str]
    entities.route(conn, exchange, routing_key) -> dict[str, bool]    the same, and which of them are auto-delete
    entities.bindings(conn) -> list[tuple[str, str, str]]             (queue, exchange, routing_key)
    entities.forget()                        after the tables were rebuilt: declare everything again
    collect_garbage(conn, database, limit=1000) -> int                for the sweep: expired queues and messages
    ttl_of(auto_delete, arguments) -> float | None                    from queue_declare's arguments

Promises: one statement per call and never DDL; declaring a permanent entity again within a minute costs nothing. A
transient queue (with a ttl, or auto-delete) lives as long as its consumer touches it. If the consumer dies, the queue
takes no messages once its ttl is over, and the sweep removes it with all that is in it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from time import monotonic
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from kombu.exceptions import ChannelError
from kombu.transport.virtual.base import NotEquivalentError

from pgtruth_transport.db import Database

from . import messages
from .messages import checked_name

logger = logging.getLogger(__name__)

Connection = psycopg.Connection[Any]
TYPES: Final = ("direct", "topic", "fanout")
MEMORY: Final = 60.0  # seconds until a permanent entity is declared again: the tables may have been rebuilt
AUTO_DELETE_TTL: Final = 3600.0  # seconds that an auto-delete queue without x-expires outlives its consumer's crash
TABLE_MEMORY: Final = 1.0  # seconds that the bindings of a cached exchange are believed
CACHED: Final = frozenset({"celeryev"})  # one lookup per event would be a round trip per event
_MANY: Final = 1000


#: (pattern of the routing key, or none that must match; queue; whether it is auto-delete) of each binding.
_Table = list[tuple[re.Pattern[str] | None, str, bool]]


class NotEquivalent(ChannelError, NotEquivalentError):
    """An exchange exists with another type."""


@dataclass(frozen=True, slots=True)
class _Exchange:
    type: str
    durable: bool
    auto_delete: bool


@dataclass(frozen=True, slots=True)
class _Queue:
    """What this process has declared, to know it and to restore it."""

    durable: bool
    auto_delete: bool
    ttl: float | None
    bindings: frozenset[tuple[str, str]] = frozenset()  # (exchange, routing key)


class Entities:
    """The exchanges, queues and bindings of one database.

    Its memory holds immutable values in plain dicts: threads that race at worst declare the same thing twice.
    """

    def __init__(self, database: Database, cached: frozenset[str] = CACHED) -> None:
        self._db = database
        self._cached = cached
        self.forget()

    @classmethod
    def of(cls, database: Database) -> Entities:
        """This process's entities of ``database``: what one connection has declared, all have."""
        return _registry.setdefault(database, cls(database))

    def forget(self) -> None:
        """Declare everything again, and believe no cached binding."""
        self._exchanges: dict[str, _Exchange] = {}
        self._queues: dict[str, _Queue] = {}
        self._until: dict[tuple[str, ...], float] = {}  # until when a permanent entity needs no statement
        self._touch_at: dict[str, float] = {}
        self._tables: dict[str, tuple[float, _Table]] = {}

    # -- exchanges ------------------------------------------------------------------------------------------------

    def declare_exchange(
        self, conn: Connection, name: str, type: str = "direct", durable: bool = True, auto_delete: bool = False
    ) -> None:
        """Make the exchange if it is not there; raises :class:`NotEquivalent` if it is there with another type."""
        if type not in TYPES:
            raise ChannelError(
                f"exchange {name!r} cannot be of type {type!r}; there are: {', '.join(TYPES)}",
                (40, 10),
                "Channel.exchange_declare",
                "503",
            )
        wanted = _Exchange(type, durable, auto_delete)
        if self._is_fresh("exchange", name) and self._exchanges.get(name) == wanted:
            return
        parameters = {"name": checked_name(name), "type": type, "durable": durable, "auto_delete": auto_delete}
        found = None
        while found is None:  # nothing is found only while another process makes, or deletes, the same exchange
            found = conn.execute(self._db.sql("exchange_declare"), parameters).fetchone()
        if found[0] != type:
            raise NotEquivalent(
                f"exchange {name!r} exists with type {found[0]!r}, so it cannot be declared as {type!r};"
                " delete it or use another name",
                (40, 10),
                "Channel.exchange_declare",
                "406",
            )
        self._exchanges[name] = wanted
        self._keep("exchange", name)

    def has_exchange(self, conn: Connection, name: str) -> bool:
        return conn.execute(self._db.sql("exchange_find"), {"name": checked_name(name)}).fetchone() is not None

    def delete_exchange(self, conn: Connection, name: str) -> None:
        """Delete the exchange and its bindings; its queues stay."""
        self._exchanges.pop(name, None)
        self._until.clear()
        self._tables.pop(name, None)
        for queue, known in list(self._queues.items()):
            kept = frozenset(binding for binding in known.bindings if binding[0] != name)
            self._queues[queue] = replace(known, bindings=kept)
        conn.execute(self._db.sql("exchange_delete"), {"name": checked_name(name)})

    # -- queues ---------------------------------------------------------------------------------------------------

    def declare_queue(
        self,
        conn: Connection,
        name: str,
        durable: bool = True,
        auto_delete: bool = False,
        ttl: float | None = None,
    ) -> None:
        """Make the queue if it is not there. With a ``ttl`` (seconds) it lives on for that long from now."""
        ttl = AUTO_DELETE_TTL if ttl is None and auto_delete else ttl
        known = self._queues.get(name)
        wanted = _Queue(durable, auto_delete, ttl, known.bindings if known else frozenset())
        if self._is_fresh("queue", name) and known == wanted:
            return
        parameters = {"name": checked_name(name), "durable": durable, "auto_delete": auto_delete, "ttl": ttl}
        conn.execute(self._db.sql("queue_declare"), parameters)
        self._queues[name] = wanted
        if ttl is None:
            self._keep("queue", name)
        else:
            self._touch_at[name] = monotonic() + ttl / 3
            self._prune()

    def has_queue(self, conn: Connection, name: str) -> bool:
        return conn.execute(self._db.sql("queue_find"), {"name": checked_name(name)}).fetchone() is not None

    def delete_queue(self, conn: Connection, name: str, if_empty: bool = False) -> int:
        """Delete the queue, its bindings and its messages; return how many messages went with it."""
        if not if_empty:
            self._queues.pop(name, None)
        self._touch_at.pop(name, None)
        self._until.clear()
        self._tables.clear()
        row = conn.execute(self._db.sql("queue_delete"), {"name": checked_name(name), "if_empty": if_empty}).fetchone()
        return int(row[0]) if row else 0

    def touch(self, conn: Connection, names: Iterable[str]) -> None:
        """Keep the transient ones of these queues alive; make again what is gone although it is consumed."""
        now = monotonic()
        due = [name for name in names if self._touch_at.get(name, 0.0) <= now]
        if not due:
            return
        for name, ttl, exists in conn.execute(self._db.sql("queue_touch"), {"names": due}).fetchall():
            self._touch_at[name] = now + (MEMORY if ttl is None else ttl / 3)
            if not exists:
                self._restore(conn, name)

    def _restore(self, conn: Connection, name: str) -> None:
        known = self._queues.get(name)
        if known is None:
            return
        logger.info("queue %r was removed while it is consumed here: declaring it again", name)
        self._until.clear()
        self.declare_queue(conn, name, known.durable, known.auto_delete, known.ttl)
        for exchange, routing_key in sorted(known.bindings):
            made = self._exchanges.get(exchange)
            if made is not None:
                self.declare_exchange(conn, exchange, made.type, made.durable, made.auto_delete)
            self.bind(conn, name, exchange, routing_key)

    # -- bindings -------------------------------------------------------------------------------------------------

    def bind(self, conn: Connection, queue: str, exchange: str, routing_key: str) -> None:
        """Messages published to ``exchange`` with a matching routing key go to ``queue`` as well."""
        known = self._queues.get(queue)
        if self._is_fresh("binding", queue, exchange, routing_key):
            return
        self._change_binding(conn, "binding_add", queue, exchange, routing_key)
        if known is not None:
            self._queues[queue] = replace(known, bindings=known.bindings | {(exchange, routing_key)})
            if known.ttl is None:
                self._keep("binding", queue, exchange, routing_key)

    def unbind(self, conn: Connection, queue: str, exchange: str, routing_key: str) -> None:
        known = self._queues.get(queue)
        if known is not None:
            self._queues[queue] = replace(known, bindings=known.bindings - {(exchange, routing_key)})
        self._until.pop(("binding", queue, exchange, routing_key), None)
        self._change_binding(conn, "binding_delete", queue, exchange, routing_key)

    def _change_binding(self, conn: Connection, statement: str, queue: str, exchange: str, routing_key: str) -> None:
        parameters = {"queue": queue, "exchange": exchange, "routing_key": routing_key}
        for name in parameters.values():
            checked_name(name)
        conn.execute(self._db.sql(statement), parameters)
        self._tables.pop(exchange, None)

    def bindings(self, conn: Connection) -> list[tuple[str, str, str]]:
        """Every binding: (queue, exchange, routing key)."""
        return [(row[0], row[1], row[2]) for row in conn.execute(self._db.sql("binding_list"))]

    def lookup(self, conn: Connection, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message goes to; each once. The default exchange ``""`` leads to the queue of that name."""
        return list(self.route(conn, exchange, routing_key))

    def route(self, conn: Connection, exchange: str, routing_key: str) -> dict[str, bool]:
        """The same queues, each with whether it is auto-delete: such a queue takes messages, never jobs."""
        if not exchange:
            return self.default_route(routing_key)
        until, table = self._tables.get(exchange, (0.0, []))
        if until <= monotonic():
            table = self._table(conn, exchange, routing_key)
        key = f"{routing_key}."
        return {queue: auto for pattern, queue, auto in table if pattern is None or pattern.match(key)}

    def default_route(self, routing_key: str) -> dict[str, bool]:
        """Through the default exchange nobody is asked: auto-delete is what this process has declared so."""
        known = self._queues.get(routing_key)
        return {routing_key: known is not None and known.auto_delete}

    def _table(self, conn: Connection, exchange: str, routing_key: str) -> _Table:
        parameters = {"exchange": checked_name(exchange), "routing_key": checked_name(routing_key)}
        rows = conn.execute(self._db.sql("binding_lookup"), parameters).fetchall()
        table: _Table = [(topic(key) if kind == "topic" else None, queue, auto) for kind, key, queue, auto in rows]
        if exchange in self._cached and all(row[0] != "direct" for row in rows):
            self._tables[exchange] = (monotonic() + TABLE_MEMORY, table)
        return table

    # -- memory ---------------------------------------------------------------------------------------------------

    def _is_fresh(self, *key: str) -> bool:
        return self._until.get(key, 0.0) > monotonic()

    def _keep(self, *key: str) -> None:
        self._until[key] = monotonic() + MEMORY

    def _prune(self) -> None:
        """Forget transient queues that nobody here has touched for three ttls, once there are many."""
        if len(self._queues) <= _MANY:
            return
        now = monotonic()
        for name, known in list(self._queues.items()):
            if known.ttl is not None and self._touch_at.get(name, 0.0) + 3 * known.ttl < now:
                self._queues.pop(name, None)
                self._touch_at.pop(name, None)


_registry: WeakKeyDictionary[Database, Entities] = WeakKeyDictionary()


def collect_garbage(conn: Connection, database: Database, limit: int = 1000) -> int:
    """Delete expired messages, and expired queues with their bindings, about ``limit`` of each; return how many.

    Called by the sweep. Whatever is left over, the next one gets.
    """
    gone = messages.delete_expired(conn, database, limit)
    return gone + conn.execute(database.sql("queue_collect"), {"count": limit}).rowcount


def ttl_of(auto_delete: bool, arguments: Mapping[str, Any] | None) -> float | None:
    """Seconds that a queue outlives its last consumer: ``x-expires`` (milliseconds); None: for ever."""
    expires = (arguments or {}).get("x-expires")
    if expires is None:
        return AUTO_DELETE_TTL if auto_delete else None
    if isinstance(expires, bool) or not isinstance(expires, int | float) or not expires > 0:
        raise ChannelError(
            f"x-expires is {expires!r}; it must be milliseconds above 0", (50, 10), "Channel.queue_declare", "406"
        )
    return float(expires) / 1000.0


@lru_cache(maxsize=1024)
def topic(pattern: str) -> re.Pattern[str]:
    """Matches a routing key and a final dot, by AMQP's rules: ``*`` is one word, ``#`` any number of them, also none.

    kombu's own pattern is not used: there ``a.#`` does not match ``a``.
    """
    words = re.sub(r"(?:^|(?<=\.))#(?:\.#)+(?=\.|$)", "#", pattern).split(".")
    parts = {"*": r"[^.]+\.", "#": r"(?:[^.]*\.)*"}
    return re.compile("".join(parts.get(word, f"{re.escape(word)}\\.") for word in words) + r"\Z")
