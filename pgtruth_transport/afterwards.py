"""Users' functions that an end calls in this process: errbacks that take the request and the exception.

Promises: they are called once the transaction of that end has committed, outside any transaction and any attempt, so
they hold no row, see the end written, and change nothing of it by raising. Where many jobs end (a sweep, a worker's
main process) one thread calls them, one after the other: a slow one holds up other errbacks only, and a normal exit
of the process waits for it. A crash between the COMMIT and the call loses the call. Errbacks that are tasks are rows
of the same transaction, and are never lost.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable

from . import attempts

logger = logging.getLogger(__name__)

Call = Callable[[], object]


def call_now(calls: Iterable[Call]) -> None:
    """Call them here, one after the other."""
    with attempts.outside():
        for call in calls:
            try:
                call()
            except Exception:
                logger.exception("a call that follows from the end of a job has failed; the end stands")


class _Line:
    """Calls that wait for their turn, and the thread that makes them for as long as there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._busy = False

    def put(self, calls: Iterable[Call]) -> None:
        with self._lock:
            self._waiting.extend(calls)
            if self._busy or not self._waiting:
                return
            self._busy = True
        try:
            threading.Thread(target=self._run, name="pgtruth errbacks").start()  # no daemon: an exit waits for it
        except RuntimeError:  # no thread can be had, or the interpreter is going
            self._run()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call_now([call])

    def _next(self) -> Call | None:
        with self._lock:
            self._busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None


_line = _Line()


def call_later(calls: Iterable[Call]) -> None:
    """Have them called in this process's thread for that."""
    _line.put(calls)


def _after_fork_in_child() -> None:
    global _line
    _line = _Line()  # what waits is the parent's to call


os.register_at_fork(after_in_child=_after_fork_in_child)
