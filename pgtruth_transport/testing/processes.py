"""A process of our own that never outlives us: a server, a worker.

It runs in a session of its own, so that Ctrl-C reaches us first. A leash (a shell that waits for the end of a pipe)
kills it and removes its directory when this process dies, even by SIGKILL.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_LEASH = 'cat >/dev/null; kill -KILL -"$1" 2>/dev/null; [ -n "$2" ] && rm -rf -- "$2"; exit 0'


class ServerError(RuntimeError):
    """A server or worker did not start or stop; the message ends with what it logged."""


class ServerProcess:
    """One run of a server or worker, from start to end, in a process group of its own."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        user: int | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        remove: Path | None = None,
    ) -> None:
        identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd or "/",
                env=dict(env) if env is not None else None,
                **identity,  # type: ignore[call-overload]
            )
        self.pid: int = self._popen.pid
        self._log = log
        self._leash = subprocess.Popen(
            ["sh", "-c", _LEASH, "leash", str(self.pid), str(remove or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def is_running(self) -> bool:
        """Whether it has not ended yet; a stopped (SIGSTOP) process runs."""
        return self._popen.poll() is None

    def wait_until(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait for ``ready``; raises :class:`ServerError` when the process ends first or the time is up."""
        deadline = time.monotonic() + seconds
        while not ready():
            if not self.is_running():
                raise ServerError(f"the process ended with code {self._popen.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"the process was not ready within {seconds:g} s:\n{self.tail()}")
            time.sleep(0.02)

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to the server and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def wait(self, seconds: float) -> int:
        """Wait for the main process to end by itself; its return code (negative: the signal that killed it)."""
        try:
            code: int = self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise ServerError(f"the process did not end within {seconds:g} s:\n{self.tail()}") from None
        return code

    def end(self, number: signal.Signals, seconds: float = 10.0) -> None:
        """Send ``number`` to the main process, wait, and kill the whole group if that was not enough."""
        self.signal_group(signal.SIGCONT)
        with suppress(ProcessLookupError):
            self._popen.send_signal(number)
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(seconds)
        self.signal_group(signal.SIGKILL)
        self._popen.wait(10)
        self._release()

    def tail(self, lines: int = 20) -> str:
        """The last lines of its log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def _release(self) -> None:
        self._leash.kill()
        self._leash.wait()
        if self._leash.stdin is not None:
            self._leash.stdin.close()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now, below the range that outgoing connections are given."""
    for _ in range(200):
        port = random.SystemRandom().randint(20000, 32000)
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError("no free TCP port between 20000 and 32000 on 127.0.0.1")


def remove_tree(path: Path) -> None:
    """Remove a directory; what a dying process still writes there does not matter."""
    shutil.rmtree(path, ignore_errors=True)
