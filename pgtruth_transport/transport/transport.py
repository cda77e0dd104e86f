"""The kombu transport: what wakes a consumer; what it is given then is :mod:`~pgtruth_transport.transport.fetching`.

Promises: an idle consumer sleeps on the signal and on a timer of ``poll_interval``, never in a tight loop, and either
alone is enough to find every row. In Celery's event loop everything runs from the loop's own callbacks; elsewhere
``drain_events`` waits with a real time-out. If the database goes away, its connection errors reach Celery, which
reconnects; what a worker holds and what has ended in it survives that.
"""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kombu.exceptions import OperationalError
from kombu.transport import virtual
from kombu.transport.base import Transport as BaseTransport

from ..db import CONNECTION_ERRORS
from ..errors import Stopping
from ..jobs import Job
from ..migrate import ensure_present
from ..runtime import runtime
from ..settings import Settings
from . import channel as channels
from . import encoding
from .entities import Entities
from .fetching import Fetcher
from .urls import client_url

#: Seconds for which a busy worker does not listen: what it cannot take now, it will look for when it can.
DEAF = 0.1


class Transport(virtual.Transport):
    """``pgtruth://`` for kombu and Celery."""

    Channel = channels.Channel
    can_parse_url = True
    default_port = 5432
    driver_type = "pgtruth"
    driver_name = "psycopg"
    connection_errors = (*BaseTransport.connection_errors, *CONNECTION_ERRORS, OperationalError)
    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset({"direct", "topic", "fanout"}), heartbeats=False
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.settings = Settings.make(client_url(client), client.transport_options or {})
        self.runtime = runtime(self.settings)
        self.entities = Entities.of(self.runtime.database)
        self.owner = f"kombu:{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.patience = float(self.settings.connect_timeout)
        self.worker: Any = None  # the Celery worker that consumes here, if one does
        self.listener: Any = None
        self.loop: Any = None
        self._loop_thread: int | None = None
        self._fd = -1
        self._turn_at: float | None = None
        self._in_turn = self._again = False  # a turn that is asked for meanwhile follows at once
        self._deaf = self._closed = False
        self._poll_at = 0.0
        self.fetcher = Fetcher(self)
        self._poke: tuple[socket.socket, socket.socket] | None = None

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        return client_url(self.client) if include_password else self.settings.masked()

    def driver_version(self) -> str:
        import psycopg

        return psycopg.__version__

    # Connecting.

    def establish_connection(self) -> Transport:
        if self.runtime.database.given_up:
            # no connection error: Celery's heartbeat, which the end of a green worker waits for, would try for ever
            raise Stopping("PostgreSQL did not answer, and this process is stopping")
        ensure_present(self.settings)
        with self.runtime.database.asking():
            pass  # reachable; raises the database's error at once where it is not
        self._closed = False
        self._avail_channels.append(self.create_channel(self))
        return self

    def close_connection(self, connection: Any) -> None:
        if self.worker is not None:
            self.worker.deliver = self.worker.request_turn = None
            self.worker = None
            channels.this_thread.events = None
        self._closed = True  # consumers that go with their channels change nothing any more
        self._unlisten()
        super().close_connection(connection)

    def attach(self, worker: Any) -> None:
        """Let ``worker`` claim and settle through this connection's loop."""
        self.worker = worker
        worker.deliver = self._deliver_job
        worker.request_turn = self._request_turn
        worker.transient_queues = lambda: list(self._callbacks)
        if worker.consumer.hub is not None:
            channels.this_thread.events = worker.app.conf.event_exchange
        self.consumers_changed()
        self._request_turn(0)  # what has ended while there was no connection

    # Who consumes what.

    def consumers_changed(self) -> None:
        """A consumer was added or cancelled."""
        if self._closed:
            return
        queues = self.fetcher.consumed()
        if self.worker is not None:
            self.worker.consume(q for q, channel in queues.items() if not channel.no_ack.get(q))
        if queues or self.listener is not None:
            if self.listener is None:
                self.listener = self.runtime.signal.listener()
                self.runtime.database.consumers += 1
            self.listener.watch(queues)
            self._listen()
        self.fetcher.look()
        if self.loop is not None and queues:
            self.loop.call_soon(self.fetcher.fetch_messages)

    def _unlisten(self) -> None:
        if self.loop is not None and self._fd >= 0:
            self.loop.remove(self._fd)
        self._fd = -1
        if self.listener is not None:
            self.listener.close()
            self.listener = None
            self.runtime.database.consumers -= 1
        if self._poke is not None:
            if self.loop is not None:
                self.loop.remove(self._poke[0])
            for end in self._poke:
                end.close()
            self._poke = None

    # In Celery's event loop.

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        self.loop, self._loop_thread = loop, threading.get_ident()
        loop.add_reader(self._poked(), self._forget_poke)
        loop.call_repeatedly(self.settings.poll_interval * random.uniform(0.9, 1.0), self._poll)
        self._listen()
        loop.call_soon(self.fetcher.fetch_messages)  # what came before

    def _listen(self) -> None:
        """Have the loop watch the listener's socket, whichever it is now."""
        if self.loop is None or self.listener is None or self._deaf:
            return
        fd = self.listener.fileno()
        if fd != self._fd:
            if self._fd >= 0:
                self.loop.remove(self._fd)
            self._fd = fd
            if fd >= 0:
                self.loop.add_reader(fd, self._on_readable)

    def _on_readable(self, *_: Any) -> None:
        self._in_turn, self._again = True, False
        try:
            self._hear()
        finally:
            self._in_turn = False
        if self._again:
            self._turn()  # now: what the loop does before it comes to it takes as long again
        if self.worker is not None and self.worker.busy() and self._fd >= 0:
            self._deaf = True
            self.loop.remove(self._fd)
            self._fd = -1
            self.loop.call_later(DEAF, self._undeaf)

    def _undeaf(self) -> None:
        self._deaf = False
        if self.listener is not None:
            self._hear()

    def _hear(self) -> None:
        heard = self.listener.fileno() >= 0
        woken = self.listener.drain()
        self._listen()
        if heard and self.listener.fileno() < 0 and self.worker is not None:
            self.worker.check_server()  # before Celery's heartbeat, which would wait for the server in the loop
        if not woken.queues:
            return
        jobs = frozenset() if self.worker is None else woken.queues.intersection(self.worker.queues)
        self.fetcher.jobs_due = True
        if len(jobs) < len(woken.queues):  # else only tasks; a stray message in a worker's queue waits for the poll
            self.fetcher.messages_due = True
            if self.loop is not None:
                self.fetcher.fetch_messages()  # before a turn: a revoke counts for what is published after it
        if self.worker is not None:
            self.worker.hungry(woken=bool(jobs))

    def _poll(self) -> None:
        if self.worker is not None:
            self.worker.check_server()
        if self.listener is not None and not self._deaf:
            self._hear()
        self.fetcher.look()
        self.fetcher.fetch_messages()
        self.fetcher.touch()
        if self.worker is not None:
            self.worker.give_back_waiting()
            self.worker.hungry()

    def _request_turn(self, delay: float) -> None:
        when = time.monotonic() + delay
        if self._in_turn and not delay:
            self._again = True
            return
        if self._turn_at is not None and self._turn_at <= when:
            return
        self._turn_at = when
        if self.loop is None:
            self._interrupt()
        else:
            self._call_later(delay, self._turn)

    def _call_later(self, delay: float, callback: Callable[[], Any]) -> None:
        """Have the loop call it in ``delay`` seconds; from any thread."""
        if threading.get_ident() == self._loop_thread:
            self.loop.call_later(delay, callback)  # timers fire before the loop sleeps again
        else:
            self.loop.call_soon(self.loop.call_later, delay, callback)
            self._interrupt()  # older kombus only note the call: the loop would come to it when it wakes

    def _turn(self) -> None:
        worker, self._turn_at = self.worker, None
        if worker is None:
            return
        self._in_turn, again = True, True
        try:
            while again:
                self._again = False
                worker.turn()
                again = self._again
        finally:
            self._in_turn = False
        if worker.next_due is not None:
            due, worker.next_due = worker.next_due, None
            if due < self.settings.poll_interval:
                self.loop.call_later(max(0.0, due), worker.hungry)

    # Without an event loop.

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver something, or raise ``socket.timeout`` after ``timeout`` seconds (``None``: wait for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._pump():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError
            wake_at = min([t for t in (deadline, self._poll_at, self._turn_at) if t is not None])
            self._sleep(max(0.0, wake_at - now))

    def _pump(self) -> bool:
        now = time.monotonic()
        if self.listener is not None:
            self._hear()
        if now >= self._poll_at:
            hears = self.listener is not None and self.listener.fileno() >= 0
            interval = self.settings.poll_interval if hears or self.worker else min(0.1, self.settings.poll_interval)
            self._poll_at = now + interval * random.uniform(0.9, 1.0)
            self.fetcher.look()
            self.fetcher.touch()
            if self.worker is not None:
                self.worker.give_back_waiting()
                self.worker.hungry()
        delivered = 0
        if self.worker is not None:
            if self._turn_at is not None and now >= self._turn_at:
                self._turn_at = None
            delivered += self.worker.turn() if self._turn_at is None else 0
            if self.worker.next_due is not None:
                self._poll_at = min(self._poll_at, now + max(0.0, self.worker.next_due))
                self.worker.next_due = None
        elif self.fetcher.jobs_due:
            delivered += self.fetcher.fetch_plain_job()
        return bool(delivered + self.fetcher.fetch_messages())

    def _sleep(self, seconds: float) -> None:
        poked = self._poked()
        fds: list[Any] = [poked]
        if self.listener is not None and self.listener.fileno() >= 0:
            fds.append(self.listener.fileno())
        ready, _, _ = select.select(fds, [], [], seconds)
        if poked in ready:
            self._forget_poke()

    def _poked(self) -> socket.socket:
        """What becomes readable when another thread wants this one."""
        if self._poke is None:
            self._poke = socket.socketpair()
            for end in self._poke:
                end.setblocking(False)
        return self._poke[0]

    def _forget_poke(self) -> None:
        if self._poke is not None:
            with suppress(BlockingIOError):
                self._poke[0].recv(4096)

    def _interrupt(self) -> None:
        """Wake the loop, or a sleeping ``drain_events``; from any thread."""
        poke = self._poke
        if poke is not None:
            try:
                poke[1].send(b"\0")
            except OSError:
                return  # full: it is awake already; closed: nobody sleeps

    # Delivering.

    def _deliver_job(self, job: Job) -> None:
        callback = self._callbacks.get(job.queue)
        if callback is None:  # the queue was cancelled in this very turn
            self.worker.release(self.worker.held[(job.id, job.lease_version)])
            return
        callback(encoding.payload(job))

    def freed(self) -> None:
        """A consumer has acknowledged: there is room for another message within its prefetch count."""
        self.fetcher.messages_due = True
        if self.loop is not None:
            self._call_later(0, self.fetcher.fetch_messages)

    def get_one(self, queue: str, owner: str | None) -> encoding.Payload | None:
        """One message or job of a queue, for ``basic_get``."""
        return self.fetcher.get_one(queue, owner)
