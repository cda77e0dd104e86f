"""The database and the signal that one process shares for one set of settings."""

from __future__ import annotations

import threading
from typing import NamedTuple

from .db import Database
from .settings import Settings
from .signals import Signal, open_signal


class Runtime(NamedTuple):
    """What every part of a process needs; both parts are thread-safe and survive a fork."""

    settings: Settings
    database: Database
    signal: Signal


_runtimes: dict[Settings, Runtime] = {}
_lock = threading.Lock()


def runtime(settings: Settings) -> Runtime:
    """This process's runtime for ``settings``."""
    found = _runtimes.get(settings)
    if found is None:
        with _lock:
            database = Database.of(settings)
            found = _runtimes.setdefault(settings, Runtime(settings, database, open_signal(settings, database)))
    return found
