"""Kills what the demo leaves behind when the demo itself is killed: a child that waits for the end of a pipe.

Standard input names process groups, one a line (``-123`` takes group 123 off the list). When the other end closes,
whatever the reason, every group still on the list gets SIGKILL, which also ends stopped processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Read until the pipe ends, then kill what is left."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        number = int(line)
        if number > 0:
            groups.add(number)
        else:
            groups.discard(-number)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
