"""Sending once for many threads: what is asked for while a signal is on its way travels together in the next one.

An idle sender sends at once, so nobody ever waits on purpose. Each caller learns whether what it asked for was sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from time import monotonic

from . import SignalError


class _Batch:
    """Queues that travel together, each with one of its new jobs."""

    __slots__ = ("error", "queues", "sent")

    def __init__(self) -> None:
        self.queues: dict[str, str] = {}
        self.sent = False
        self.error: SignalError | None = None


class Batcher:
    """Calls ``send(queue -> job id, deadline)`` from one thread at a time; ``lock`` is held meanwhile."""

    def __init__(self, send: Callable[[Mapping[str, str], float], None], lock: threading.Lock) -> None:
        self._send = send
        self._sending = lock
        self._mutex = threading.Lock()
        self._next = _Batch()

    def __call__(self, queues: Mapping[str, str], timeout: float) -> None:
        """Return when ``queues`` have been signalled; raises :class:`SignalError` when they were not in time."""
        deadline = monotonic() + timeout
        with self._mutex:
            batch = self._next
            batch.queues.update(queues)
        if not self._sending.acquire(timeout=timeout):
            raise SignalError(f"no signal within {timeout:g} s: another thread is still sending")
        try:
            if not batch.sent:
                self._lead(batch, deadline)
        finally:
            self._sending.release()
        if batch.error is not None:
            raise batch.error

    def _lead(self, batch: _Batch, deadline: float) -> None:
        with self._mutex:
            self._next = _Batch()
        batch.sent = True
        try:
            self._send(batch.queues, deadline)
        except SignalError as exc:
            batch.error = exc
        except BaseException:
            batch.error = SignalError("the thread that was sending was interrupted")
            raise
