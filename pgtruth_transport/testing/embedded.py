"""What servers from a wheel have in common: a directory and a process of their own, and faults on request."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, Self

from pgtruth_transport.testing.processes import ServerError, ServerProcess, remove_tree


class EmbeddedServer:
    """Starts, stops, kills and pauses one server. Subclasses say what to run and when it is ready."""

    PREFIX: ClassVar[str]  # of its directory
    FAREWELL: ClassVar[signal.Signals]  # ends it
    READY_WITHIN: ClassVar[float]  # seconds

    user: int | None = None
    env: Mapping[str, str] | None = None
    _base: Path | None = None
    _process: ServerProcess | None = None

    # What a subclass says.

    def command(self, base: Path) -> list[str]:
        """The command that runs it, with what it keeps in ``base``."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it answers."""
        raise NotImplementedError

    def prepare(self, base: Path) -> None:
        """Make what the first start needs in its new directory."""

    def apart(self, pid: int) -> list[int]:
        """Processes of the running server that its process group does not hold."""
        return []

    # What they share.

    def start(self) -> Self:
        """Start it, with nothing in it the first time; returns when it answers."""
        if self._process is not None:
            return self
        if self._base is None:
            self._base = self._made()
        self._process = ServerProcess(
            self.command(self._base), self.log, user=self.user, env=self.env, remove=self._base
        )
        try:
            self._process.wait_until(self.is_ready, self.READY_WITHIN)
        except ServerError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it, drop every connection, and remove its directory."""
        self._end(self.FAREWELL)
        if self._base is not None:
            remove_tree(self._base)
            self._base = None

    def stop_hard(self) -> None:
        """As if the machine had lost power: no farewell to anybody; ``start`` begins with what it has on disk."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start again, on the same port with what it has on disk."""
        self._end(self.FAREWELL)
        self.start()

    def pause(self) -> None:
        """Stop every server process where it is (SIGSTOP): connections stay open and nobody answers."""
        assert self._process is not None
        self._process.signal_group(signal.SIGSTOP)
        _kill(self.apart(self._process.pid), signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        assert self._process is not None
        _kill(self.apart(self._process.pid), signal.SIGCONT)
        self._process.signal_group(signal.SIGCONT)

    @property
    def log(self) -> Path:
        """The server's log; it is gone after :meth:`stop`."""
        assert self._base is not None, "the server has not been started"
        return self._base / "log"

    def _made(self) -> Path:
        base = Path(tempfile.mkdtemp(prefix=self.PREFIX))
        try:
            self.prepare(base)
        except BaseException:
            remove_tree(base)
            raise
        return base

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        apart = self.apart(process.pid)
        _kill(apart, signal.SIGCONT)
        process.end(number)
        _kill(apart, signal.SIGKILL)


def _kill(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
