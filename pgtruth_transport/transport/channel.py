"""The kombu channel: publishing, declaring and acknowledging.

Promises: a task message is a committed row when ``basic_publish`` returns (or it is part of the attempt or the
transaction that publishes it); everything else is a row of ``messages``. Exchanges, queues and bindings are shared by
all processes. A channel that closes gives back what it holds; if its process dies, leases do that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.transport.base import to_rabbitmq_queue_arguments
from kombu.utils.uuid import uuid

from .. import attempts, lifecycle, publish
from ..db import CONNECTION_ERRORS
from ..errors import EventHeldBack
from ..jobs import Lease, Requeue
from ..signals import SignalError
from ..states import Outcome
from . import encoding, messages
from .entities import ttl_of
from .urls import client_url

if TYPE_CHECKING:
    from .transport import Transport

logger = logging.getLogger("kombu.transport.pgtruth")


class _ThisThread(threading.local):
    events: str | None = None


#: ``events``: the exchange of a worker's events, in the thread that runs this worker's event loop.
this_thread = _ThisThread()


class Delivered(virtual.Message):
    """A delivered message; ``held_key`` names the attempt where it is a job."""

    def __init__(self, payload: encoding.Payload, channel: Any = None, **kwargs: Any) -> None:
        super().__init__(payload, channel=channel, **kwargs)
        self.held_key: tuple[str, int] | None = payload.get("held_key")


class Prefetch(virtual.QoS):
    """Prefetch accounting; giving back goes through the channel, fenced."""

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        self.channel.settle(delivery_tag, acknowledge=False, requeue=requeue)
        self._let_go(delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        self.channel.settle(delivery_tag, acknowledge=True, requeue=False)
        self._let_go(delivery_tag)

    def _let_go(self, delivery_tag: str) -> None:
        if delivery_tag not in self._delivered:
            return  # a worker's job: it was never counted here
        self._quick_ack(delivery_tag)
        if self.prefetch_count and self.channel.connection is not None:
            self.channel.connection.freed()

    def restore_unacked(self) -> list[Any]:
        self._flush()
        tags = list(self._delivered)
        self._delivered.clear()
        self.channel.give_back(tags)
        return []


class Channel(virtual.Channel):
    """One channel of a :class:`~pgtruth_transport.transport.transport.Transport`."""

    Message = Delivered
    QoS = Prefetch
    connection: Transport
    supports_fanout = True
    body_encoding = None
    from_transport_options = ()

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self.runtime = connection.runtime
        self.entities = connection.entities
        self.no_ack: dict[str, bool] = {}  # queue -> whether its consumer acknowledges nothing
        self._transient: set[str] = set()  # queues that go with their last consumer here
        self.owner = connection.owner
        self._plain: dict[str, Lease] = {}  # jobs delivered to a consumer that is no Celery worker

    # Publishing.

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        return to_rabbitmq_queue_arguments(arguments or {}, **kwargs)

    def basic_publish(self, message: encoding.Payload, exchange: str, routing_key: str, **kwargs: Any) -> None:
        message["properties"]["delivery_info"].update(exchange=exchange, routing_key=routing_key)
        try:
            self._publish(message, exchange, routing_key)
        except CONNECTION_ERRORS as exc:
            if exchange != this_thread.events or not routing_key.startswith("worker."):
                raise
            # Celery sends its heartbeat again for as long as it gets connection errors, in the loop, which would then
            # never learn that the server is gone. With another error the dispatcher keeps the event for later.
            raise EventHeldBack(f"the database is out of reach: {exc}") from exc

    def _publish(self, message: encoding.Payload, exchange: str, routing_key: str) -> None:
        route = self._route(exchange, routing_key)
        queues = list(route)
        if encoding.is_task(message) and len(queues) <= 1 and not any(route.values()):
            if not queues:
                raise ChannelError(
                    f"no queue is bound to exchange {exchange!r} with key {routing_key!r}: the task was not sent"
                )
            row = encoding.job_row(message, queues[0], self._get_message_priority(message))
            publish.publish(self.runtime.database, self.runtime.signal, [row])
        elif queues:
            message["properties"]["delivery_tag"] = self._next_delivery_tag()
            self._put_message(queues, message)

    def _put_message(self, queues: list[str], message: encoding.Payload) -> None:
        database = self.runtime.database
        with database.connection(patience=self.connection.patience) as conn:
            took = messages.put(conn, database, queues, message)
        try:
            self.runtime.signal.wake({queue: [] for queue in took})
        except SignalError as exc:
            logger.debug("a message is not signalled, polling will find it: %s", exc)

    def _lookup(self, exchange: str, routing_key: str, default: str | None = None) -> list[str]:
        return list(self._route(exchange, routing_key))

    def _route(self, exchange: str, routing_key: str) -> dict[str, bool]:
        if not exchange:
            return self.entities.default_route(routing_key)
        with self.runtime.database.connection(patience=self.connection.patience) as conn:
            return self.entities.route(conn, exchange, routing_key)

    # Consuming.

    def basic_consume(self, queue: str, no_ack: bool, callback: Any, consumer_tag: str, **kwargs: Any) -> None:
        self.no_ack[queue] = no_ack
        super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)

        def deliver(payload: encoding.Payload) -> Any:
            message = self.Message(payload, channel=self)
            mine = message.held_key is not None and self.connection.worker is not None  # then the worker keeps account
            if not no_ack and not mine:
                self.qos.append(message, message.delivery_tag)
            return callback(message)

        self.connection._callbacks[queue] = deliver
        self.connection.consumers_changed()

    def basic_cancel(self, consumer_tag: str) -> None:
        queue = self._tag_to_queue.get(consumer_tag)
        super().basic_cancel(consumer_tag)
        if queue is not None and queue not in self._active_queues:
            self.no_ack.pop(queue, None)
            if queue in self._transient:
                self._transient.discard(queue)
                with suppress(*CONNECTION_ERRORS):  # a consumer can be cancelled without a server: the queue expires
                    self._delete(queue)
        if self.connection is not None:
            self.connection.consumers_changed()

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Delivered | None:
        found = self.connection.get_one(queue, None if no_ack else self.connection.owner)
        if found is None:
            return None
        message = self.Message(found, channel=self)
        if message.held_key is not None:
            self.remember_plain(found)
        if no_ack:
            if message.held_key is not None:
                self.settle(message.delivery_tag, acknowledge=True, requeue=False)
        else:
            self.qos.append(message, message.delivery_tag)
        return message

    def remember_plain(self, payload: encoding.Payload) -> None:
        """Note the lease of a job that goes to a consumer that is no Celery worker."""
        job_id, version = payload["held_key"]
        tag = payload["properties"]["delivery_tag"]
        self._plain[tag] = Lease(job_id, version, self.connection.owner, payload.pop("claimed_at"))

    def settle(self, tag: str, *, acknowledge: bool, requeue: bool) -> None:
        """Acknowledge or reject one delivery, if this connection still holds it."""
        if tag.startswith("m"):
            self._settle_message(int(tag[1:]), requeue)
        elif tag in self._plain:
            self._settle_plain(self._plain.pop(tag), acknowledge, requeue)
        elif self.connection is not None and self.connection.worker is not None:
            worker = self.connection.worker
            job_id, _, version = tag[1:].rpartition(":")
            held = worker.held.get((job_id, int(version)))
            if held is not None:
                worker.acknowledge(held) if acknowledge else worker.reject(held, requeue)

    def _settle_message(self, message_id: int, requeue: bool) -> None:
        database, owner = self.runtime.database, self.owner
        with database.connection() as conn:
            if requeue:
                messages.requeue(conn, database, [message_id], owner)
            else:
                messages.ack(conn, database, [message_id], owner)

    def _settle_plain(self, lease: Lease, acknowledge: bool, requeue: bool) -> None:
        database = self.runtime.database
        with database.connection() as conn:
            if requeue:
                lifecycle.requeue(conn, database, [(lease, Requeue(Outcome.RELEASED))])
            else:
                ending = attempts.ignored() if acknowledge else attempts.failed("rejected by its consumer")
                lifecycle.finish(conn, database, [(lease, ending)])

    def give_back(self, tags: list[str]) -> None:
        """Requeue what was delivered here and not acknowledged; a worker's jobs are its own business."""
        database, owner = self.runtime.database, self.owner
        held = [int(tag[1:]) for tag in tags if tag.startswith("m")]
        plain = [self._plain.pop(tag) for tag in tags if tag in self._plain]
        if not held and not plain:
            return
        with database.connection() as conn:
            if held:
                messages.requeue(conn, database, held, owner)
            if plain:
                lifecycle.requeue(conn, database, [(lease, Requeue(Outcome.RELEASED)) for lease in plain])

    # Entities.

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str | None = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        kind = type or "direct"
        name = exchange or f"amq.{kind}"
        with self._entity_connection() as conn:
            if not passive:
                self.entities.declare_exchange(conn, name, kind, durable, auto_delete)
            elif not self.entities.has_exchange(conn, name):
                raise ChannelError(f"NOT_FOUND - no exchange {name!r}", (50, 10), "Channel.exchange_declare", "404")

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        with self._entity_connection() as conn:
            self.entities.delete_exchange(conn, exchange)

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Any = None,
        **kwargs: Any,
    ) -> Any:
        name = queue or f"amq.gen-{uuid()}"
        size = 0
        with self._entity_connection() as conn:
            if passive:
                if not self.entities.has_queue(conn, name):
                    raise ChannelError(f"NOT_FOUND - no queue {name!r}", (50, 10), "Channel.queue_declare", "404")
                size = self._size(name)
            else:
                transient = auto_delete or exclusive
                self.entities.declare_queue(conn, name, durable, transient, ttl_of(transient, arguments))
                if transient:
                    self._transient.add(name)
        return virtual.base.queue_declare_ok_t(name, size, 0)

    def queue_bind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        with self._entity_connection() as conn:
            self.entities.bind(conn, queue, exchange or "amq.direct", routing_key or "")

    def queue_unbind(
        self, queue: str, exchange: str | None = None, routing_key: str = "", arguments: Any = None, **kwargs: Any
    ) -> None:
        with self._entity_connection() as conn:
            self.entities.unbind(conn, queue, exchange or "amq.direct", routing_key or "")

    def queue_delete(self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any) -> None:
        if if_empty and self._size(queue):
            return
        self._purge(queue)
        self._delete(queue)

    def _delete(self, queue: str, *args: Any, **kwargs: Any) -> None:
        with self._entity_connection() as conn:
            self.entities.delete_queue(conn, queue)

    def _purge(self, queue: str) -> int:
        from .. import endings

        settings, database, signal = self.runtime
        jobs = endings.purge(endings.acting(client_url(self.connection.client), settings), database, signal, queue)
        with database.connection() as conn:
            return jobs + messages.purge(conn, database, queue)

    def _size(self, queue: str) -> int:
        database = self.runtime.database
        with database.connection() as conn:
            return lifecycle.size(conn, database, queue) + messages.size(conn, database, queue)

    def list_bindings(self) -> Iterator[tuple[str, str, str]]:
        with self._entity_connection() as conn:
            yield from self.entities.bindings(conn)

    def _entity_connection(self) -> Any:
        return self.runtime.database.connection(patience=self.connection.patience)
