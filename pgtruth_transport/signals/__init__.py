"""Signals: how a committed row wakes an idle worker, and how an end reaches those who wait for a result.

Promises: a signal carries job ids and nothing else, and nothing stays behind where it travels. It is sent after the
commit, never inside the application's transaction. Every signal may be lost, doubled, late or forged: polling finds
every row without it, and whoever forges one makes workers look once in vain. A crash between the commit and the signal
therefore costs at most one poll interval.

``wake`` and ``announce`` may be called from any thread, and after a fork. A listener belongs to one thread.

======================================  ==================================================================
``signal = open_signal(settings, db)``   by ``settings.signal_url``; connects to nothing yet
``signal.wake({queue: [job id, …]})``    within ``settings.signal_timeout``, or SignalError
``signal.send(queue, job id)``           the same for one job; returns the call that awaits the answer
``signal.notify_channel(queue)``         for a NOTIFY by the insert's own commit; None where signals travel elsewhere
``signal.announce([job id, …])``         best effort, never raises; the same bound
``listener = signal.listener()``         connects at the first ``watch*``
``listener.watch(queues)``               replaces the set of watched queues; waits at most 0.2 s for a connection
``listener.watch_results()``             also hear of results
``listener.fileno()``                    to wait on; -1 where there is nothing to wait on. Ask again after each drain
``listener.drain() -> Woken``            what came in; reconnects by itself; never raises, never waits
``listener.close()``
======================================  ==================================================================

A queue is also reported as woken once when its subscription takes effect: what was published just before was not heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import md5
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from pgtruth_transport.errors import PgTruthError, SettingsError

#: Bytes of a payload: NOTIFY takes less than this, and whatever is longer is not ours.
LARGEST: Final = 8000

if TYPE_CHECKING:
    from pgtruth_transport.db import Database
    from pgtruth_transport.settings import Settings

__all__ = [
    "LARGEST",
    "Listener",
    "Signal",
    "SignalError",
    "Woken",
    "nothing_to_await",
    "open_signal",
    "result_payloads",
    "results_channel",
    "wake_channel",
]


class SignalError(PgTruthError):
    """A signal could not be sent in time. The rows are committed; polling and the sweep find them."""


class Woken(NamedTuple):
    """What a listener heard since it was last asked."""

    queues: frozenset[str] = frozenset()  # look for work here
    job_ids: frozenset[str] = frozenset()  # these have ended
    missed_results: bool = False  # ends may have been missed (the link was down): look up what you wait for

    def __bool__(self) -> bool:
        return bool(self.queues or self.job_ids or self.missed_results)


class Listener(Protocol):
    """One process's ear. Not thread-safe."""

    def watch(self, queues: Iterable[str]) -> None:
        """Listen to exactly these queues from now on."""

    def watch_results(self) -> None:
        """Listen to ends of jobs as well."""

    def fileno(self) -> int:
        """Readable when :meth:`drain` has something to say; -1 while there is no connection. Changes at a reconnect."""

    def drain(self) -> Woken:
        """What has come in, without waiting. A lost connection is replaced in the background, with back-off.

        Call it when :meth:`fileno` is readable and at every poll. After a reconnect all watched queues are woken.
        """

    def close(self) -> None:
        """Close the connection. Safe to call twice."""


class Signal(Protocol):
    """One way to say "there is work"."""

    name: str  # "notify", "redis" or "silent"

    def wake(self, queues: Mapping[str, Sequence[str]]) -> None:
        """Say that these queues have these new jobs; raises :class:`SignalError` within ``signal_timeout``."""

    def notify_channel(self, queue: str) -> str | None:
        """The channel on which an insert's own commit may wake the queue; None where signals travel elsewhere."""

    def send(self, queue: str, job_id: str) -> Callable[[], None]:
        """:meth:`wake` for one job, in two halves: the answer is awaited by the call that this returns.

        Either raises :class:`SignalError` within ``signal_timeout``. What is returned must be called.
        """

    def announce(self, job_ids: Sequence[str]) -> None:
        """Say that these jobs have ended. Never raises: whoever waits also polls."""

    def listener(self) -> Listener:
        """A new listener; it connects when it is told what to watch."""


def nothing_to_await() -> None:
    """The second half of :meth:`Signal.send` where the first has done it all."""


@lru_cache(maxsize=1024)
def wake_channel(schema: str, queue: str) -> str:
    """The channel of a queue: short and plain ASCII, however long the queue's name is."""
    name = queue.encode("utf-8", "surrogatepass")
    return f"{schema}_w_{md5(name, usedforsecurity=False).hexdigest()[:16]}"


def results_channel(schema: str) -> str:
    """The channel on which ends are announced; the payload is job ids, one a line."""
    return f"{schema}_r"


def result_payloads(job_ids: Sequence[str]) -> Iterator[str]:
    """Job ids, one a line, in texts of less than 8000 bytes (NOTIFY's limit). An id that is too long is left out."""
    lines: list[str] = []
    size = 0
    for job_id in job_ids:
        length = len(job_id.encode("utf-8", "surrogatepass")) + 1
        if length >= LARGEST:
            continue
        if size + length >= LARGEST:
            yield "\n".join(lines)
            lines, size = [], 0
        lines.append(job_id)
        size += length
    if lines:
        yield "\n".join(lines)


def open_signal(settings: Settings, database: Database) -> Signal:
    """The signal that ``settings.signal_url`` names; LISTEN/NOTIFY where it is None. Nothing is connected yet."""
    url = settings.signal_url
    if url is None:
        from .notify import NotifySignal

        return NotifySignal(settings, database)
    if url.startswith("silent://"):
        from .silent import SilentSignal

        return SilentSignal()
    try:
        from .redis import RedisSignal
    except ImportError as exc:
        raise SettingsError("signal_url needs redis-py: pip install 'pgtruth-transport[redis]'") from exc
    return RedisSignal(settings)
