"""Waiting for ends without polling in a tight loop.

Promises: a waiter learns of an end as soon as the worker announces it (about as long as the commit and one signal
take), and at the latest at its next look, which never depends on the signal: half a second where one is listened to,
a tenth growing to half a second where there is none. A waiter that dies leaves a row that expires.
"""

from __future__ import annotations

import os
import select
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from celery.exceptions import TimeoutError

from .db import CONNECTION_ERRORS
from .runtime import Runtime

#: What a result backend knows of one task, as Celery's ``get_task_meta`` returns it.
Meta = dict[str, Any]

#: Seconds between looks at the database while a listener is connected, and the first one where none is.
LOOK, FIRST_LOOK = 0.5, 0.05
#: Seconds after the last waiter that the listener's connection is kept.
KEEP = 30.0


class Interest:
    """Some job ids that one thread waits for. Use as a context manager."""

    def __init__(self, waiting: Waiting, ids: Iterable[str], seconds: float | None) -> None:
        self._waiting = waiting
        self.pending = set(ids)
        self._ids = list(self.pending)
        self._seconds = 3600.0 if seconds is None else seconds + 10
        self._event = threading.Event()
        self._look = FIRST_LOOK

    def __enter__(self) -> Interest:
        self._waiting.add(self)
        try:
            self._waiting.register(self._ids, self._seconds)
        except CONNECTION_ERRORS:
            return self  # nobody will announce these ends; looking finds them
        except BaseException:
            self._waiting.remove(self)
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._waiting.remove(self)
        self._waiting.unregister(self._ids)

    def told(self) -> None:
        """One of the ids has ended, or may have."""
        self._event.set()

    def wait(self, seconds: float | None) -> None:
        """Sleep until something may have ended, or until it is time to look."""
        look = LOOK if self._waiting.hears else self._look
        self._look = min(LOOK, self._look * 1.5)
        if self._event.wait(look if seconds is None else min(look, max(0.0, seconds))):
            self._event.clear()


class Waiting:
    """One process's listener for ends, shared by all of its waiting threads."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._interests: set[Interest] = set()
        self._thread: threading.Thread | None = None
        self.name = f"{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self.hears = False

    def ends(
        self,
        read: Callable[[Iterable[str]], dict[str, Meta]],
        ids: Iterable[str],
        timeout: float | None,
        on_interval: Callable[[], None] | None,
    ) -> Iterator[tuple[str, Meta]]:
        """The ends of ``ids`` as they come; ``read`` returns those that have ended.

        ``timeout`` in seconds, then :class:`celery.exceptions.TimeoutError`; ``on_interval`` is called between looks. A
        database that is away is waited for as long as the caller is prepared to wait.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        pending = dict.fromkeys(ids)
        interest: Interest | None = None
        try:
            while True:
                for job_id, meta in _read_patiently(read, pending, deadline).items():
                    del pending[job_id]
                    yield job_id, meta
                if not pending:
                    return
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError("The operation timed out.")
                if on_interval is not None:
                    on_interval()
                if interest is None:
                    interest = Interest(self, pending, left).__enter__()
                    continue  # it may have ended before the interest was known
                interest.pending = set(pending)
                interest.wait(left)
        finally:
            if interest is not None:
                interest.__exit__()

    def add(self, interest: Interest) -> None:
        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            self._interests.add(interest)
            if self._runtime.signal.name != "silent" and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._listen, name="pgtruth-results", daemon=True)
                self._thread.start()

    def remove(self, interest: Interest) -> None:
        with self._lock:
            self._interests.discard(interest)

    def register(self, ids: list[str], seconds: float) -> None:
        database = self._runtime.database
        with database.connection() as conn:
            params: dict[str, Any] = {"ids": ids, "waiter": self.name, "seconds": seconds}
            conn.execute(database.sql("waiter_add"), params)

    def unregister(self, ids: list[str]) -> None:
        database = self._runtime.database
        try:
            with database.connection() as conn:
                conn.execute(database.sql("waiter_remove"), {"ids": ids, "waiter": self.name})
        except CONNECTION_ERRORS:
            return  # the rows expire by themselves

    def _listen(self) -> None:
        listener = self._runtime.signal.listener()
        listener.watch_results()
        idle_since = time.monotonic()
        try:
            while time.monotonic() - idle_since < KEEP:
                fd = listener.fileno()
                self.hears = fd >= 0
                if self.hears:
                    select.select([fd], [], [], 1.0)
                else:
                    time.sleep(0.05)
                woken = listener.drain()
                with self._lock:
                    interests = list(self._interests)
                if interests:
                    idle_since = time.monotonic()
                for interest in interests:
                    if woken.missed_results or not interest.pending.isdisjoint(woken.job_ids):
                        interest.told()
        finally:
            self.hears = False
            with self._lock:
                self._thread = None
            listener.close()


def _read_patiently(
    read: Callable[[Iterable[str]], dict[str, Meta]], ids: Iterable[str], deadline: float | None
) -> dict[str, Meta]:
    while True:
        try:
            return read(ids)
        except CONNECTION_ERRORS:
            if deadline is None or time.monotonic() > deadline:
                raise
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))
