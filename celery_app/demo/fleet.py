"""The demo's processes: each in a process group of its own, its output in a file, none left behind.

Leaving the ``with`` block ends every group (SIGTERM, then SIGKILL). If this process is killed before that, the
leash (:mod:`celery_app.demo.leash`) does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from celery_app.demo import leash

GRACE = 6.0  # seconds between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One process group."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """The id of the main process, which is the id of the group."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether the main process runs (a stopped one counts)."""
        return self.process.poll() is None

    def says(self, text: str) -> bool:
        """Whether its output holds ``text`` so far."""
        return text in self.log.read_text(errors="replace")

    def signal_group(self, number: signal.Signals) -> None:
        """Send a signal to every process of the group; a group that is gone is left in peace."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def tail(self, lines: int = 15) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Fleet:
    """Starts, watches and ends the processes."""

    def __init__(self, folder: Path, env: Mapping[str, str], cwd: Path) -> None:
        self.members: list[Member] = []
        self._folder, self._env, self._cwd = folder, dict(env), cwd
        self._expected: set[int] = set()  # groups whose end is part of the story

    def __enter__(self) -> Fleet:
        self._leash = subprocess.Popen(
            [sys.executable, leash.__file__], stdin=subprocess.PIPE, start_new_session=True, cwd=self._cwd
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop_all()
        finally:
            assert self._leash.stdin is not None
            self._leash.stdin.close()
            self._leash.wait()

    def start(self, name: str, arguments: Sequence[str]) -> Member:
        """Start ``python -m …`` with these arguments in a process group of its own."""
        log = self._folder / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=self._cwd,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.leash(process.pid)
        member = Member(name, process, log)
        self.members.append(member)
        return member

    def leash(self, group: int) -> None:
        """Have ``group`` killed if this process dies; a negative number takes it off again."""
        assert self._leash.stdin is not None
        self._leash.stdin.write(f"{group}\n".encode())
        self._leash.stdin.flush()

    def kill(self, member: Member) -> None:
        """``kill -9`` the whole group, as part of the story."""
        self._expected.add(member.pid)
        member.signal_group(signal.SIGKILL)
        member.process.wait()

    def fallen(self) -> list[Member]:
        """Members that ended though nobody asked them to."""
        return [member for member in self.members if not member.alive() and member.pid not in self._expected]

    def stop_all(self) -> None:
        """End every group and wait for it."""
        for member in self.members:
            member.signal_group(signal.SIGCONT)
            if member.alive():
                member.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        for member in self.members:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(max(0.05, deadline - time.monotonic()))
        for member in self.members:
            member.signal_group(signal.SIGKILL)
            member.process.wait()
            self.leash(-member.pid)
