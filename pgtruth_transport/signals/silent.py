"""The signal that never arrives (``silent://``): polling alone. Proves that polling is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from . import Woken, nothing_to_await


class SilentSignal:
    """Sends nothing, and so never fails."""

    name = "silent"

    def wake(self, queues: Mapping[str, Sequence[str]]) -> None:
        """Nothing: polling finds the rows."""

    def notify_channel(self, queue: str) -> None:
        return None

    def send(self, queue: str, job_id: str) -> Callable[[], None]:
        return nothing_to_await

    def announce(self, job_ids: Sequence[str]) -> None:
        """Nothing: whoever waits polls."""

    def listener(self) -> SilentListener:
        return SilentListener()


class SilentListener:
    """Hears nothing."""

    def watch(self, queues: Iterable[str]) -> None:
        """Nothing to subscribe to."""

    def watch_results(self) -> None:
        """Nothing to subscribe to."""

    def fileno(self) -> int:
        return -1

    def drain(self) -> Woken:
        return Woken()

    def close(self) -> None:
        """Nothing to close."""
