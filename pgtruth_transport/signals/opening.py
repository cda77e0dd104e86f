"""Opening something slow (a name look-up, a TCP and TLS handshake) without making the caller wait for it.

The work is done in a daemon thread that ends with it. If the process dies, so does the thread; what it had opened is
closed by the operating system.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Opening(Generic[T]):
    """One try of ``open`` in a thread of its own. ``close`` gets what came of it after :meth:`abandon`."""

    def __init__(self, open: Callable[[], T], close: Callable[[T], object], name: str) -> None:
        self._open = open
        self._close = close
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, well or not; waits at most ``seconds``."""
        return self._done.wait(max(seconds, 0.0))

    def take(self) -> T:
        """What was opened, or its error; only after :meth:`wait` has said True."""
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def abandon(self) -> None:
        """Nobody will take it: close it as soon as it is there."""
        with self._lock:
            self._abandoned = True
            value, self._value = self._value, None
        if value is not None:
            self._close(value)

    def _run(self) -> None:
        try:
            value = self._open()
        except BaseException as exc:  # raised where it is taken
            self._error = exc
        else:
            with self._lock:
                keep = not self._abandoned
                self._value = value if keep else None
            if not keep:
                self._close(value)
        self._done.set()
