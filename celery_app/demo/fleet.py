"""The demo's processes: each in a process group of its own, its output in a file, none left behind.

Leaving the ``with`` block ends every group. If this process is killed before that, each group's leash does it
(:mod:`pgtruth_transport.testing.processes`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pgtruth_transport.testing.processes import ServerProcess

GRACE = 6.0  # seconds between SIGTERM and SIGKILL, for all of them together


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One process group."""

    name: str
    process: ServerProcess
    log: Path

    @property
    def pid(self) -> int:
        """The id of the main process, which is the id of the group."""
        return self.process.pid

    def alive(self) -> bool:
        """Whether the main process runs (a stopped one counts)."""
        return self.process.is_running()

    def says(self, text: str) -> bool:
        """Whether its output holds ``text`` so far."""
        return text in self.log.read_text(errors="replace")


class Fleet:
    """Starts, watches and ends the processes."""

    def __init__(self, folder: Path, env: Mapping[str, str], root: Path) -> None:
        self.members: list[Member] = []
        self._folder, self._env, self._root = folder, dict(env), root

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_all()

    def start(self, name: str, arguments: Sequence[str]) -> Member:
        """Start ``python -m …`` with these arguments."""
        log = self._folder / f"{name}.log"
        member = Member(
            name, ServerProcess([sys.executable, "-m", *arguments], log, env=self._env, cwd=self._root), log
        )
        self.members.append(member)
        return member

    def kill(self, member: Member) -> None:
        """``kill -9`` the whole group, as part of the story."""
        self.members.remove(member)
        member.process.end(signal.SIGKILL)

    def fallen(self) -> list[Member]:
        """Members that ended though nobody asked them to."""
        return [member for member in self.members if not member.alive()]

    def stop_all(self) -> None:
        """Ask all of them to end, then make them."""
        for member in self.members:
            member.process.signal_group(signal.SIGCONT)
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE
        while self.members:
            self.members.pop().process.end(signal.SIGTERM, max(0.05, deadline - time.monotonic()))
