"""Flower on ``pgtruth://``: the broker page and ``/api/queues/length`` answered, and a memory that survives restarts.

``celery -A app pgtruth flower`` is Flower's own command with two things added: its broker class knows our URLs, and its
events object is filled from the tables at start and every few seconds after. In a ``flowerconfig.py`` one line gives
``celery -A app flower`` the first of them::

    from pgtruth_transport.observe.flower import install; install()

If the database cannot be read, the queue list is empty, Flower shows what events told it, and nothing answers 5xx.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import signal
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

import flower.views
from celery.events.state import State
from flower import command
from flower.app import Flower
from flower.events import Events
from flower.utils.broker import Broker
from tornado.ioloop import IOLoop, PeriodicCallback
from tornado.options import options

from pgtruth_transport.db import CONNECTION_ERRORS, Database
from pgtruth_transport.settings import Settings
from pgtruth_transport.urls import SCHEMES

from . import backfill, queries

logger = logging.getLogger(__name__)

#: Seconds between two looks at the rows that changed.
RE_READ: Final = 5.0
#: The most jobs that are read at start (Flower's --max-tasks, if that is less), and of those that wait.
AT_START: Final = 20_000
WAITING_AT_START: Final = 2_000
PATIENCE: Final = 5.0


class QueueLengths:
    """What Flower asks of a broker."""

    def __init__(self, settings: Settings) -> None:
        self.database = Database.of(settings)

    async def queues(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """The depth of each named queue, then of those that hold jobs although no worker works on them.

        Empty where the database cannot be read.
        """
        wanted = list(names)
        return await asyncio.get_running_loop().run_in_executor(None, self._read, wanted)

    def _read(self, names: list[str]) -> list[dict[str, Any]]:
        try:
            with queries.looking(self.database, PATIENCE) as conn:
                found = {depth.queue: depth for depth in queries.queues(conn, self.database)}
        except CONNECTION_ERRORS as exc:
            logger.error("the queue lengths cannot be read: %s", exc)
            return []
        return [_length(name, found.get(name)) for name in [*names, *sorted(found.keys() - set(names))]]


def _length(name: str, depth: queries.QueueDepth | None) -> dict[str, Any]:
    """Flower's columns: ready = due now, unacked = held by workers, messages = all that is open."""
    if depth is None:
        return {"name": name, "messages": 0, "messages_ready": 0, "messages_unacknowledged": 0}
    waiting = (depth.due, depth.scheduled, depth.open, depth.enqueue_failed)
    return {
        "name": name,
        "messages": sum(count.value for count in waiting) + depth.processing.value,
        "messages_ready": depth.due.value,
        "messages_unacknowledged": depth.processing.value,
    }


class TruthBroker(Broker):
    """Flower's factory of broker clients, with ours added."""

    def __new__(cls, broker_url: str, *args: Any, **kwargs: Any) -> Any:
        if broker_url.partition("://")[0] in SCHEMES:
            return QueueLengths(Settings.make(broker_url, kwargs.get("broker_options")))
        return super().__new__(cls, broker_url, *args, **kwargs)


def install() -> None:
    """Teach Flower's broker page and queue-length API our URLs."""
    flower.views.Broker = TruthBroker


class TruthEvents(Events):
    """Flower's events, filled from the tables before it starts and kept in step with them."""

    def __init__(self, database: Database, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.database = database
        self._after: str | None = None
        self._reader = PeriodicCallback(self.re_read, RE_READ * 1000)

    def start(self) -> None:
        limit = min(self.state.max_tasks_in_memory, AT_START)
        try:
            self._show(*backfill.read(self.database, limit=limit, waiting=min(limit, WAITING_AT_START)))
        except CONNECTION_ERRORS as exc:
            logger.error("the jobs from before the start cannot be read: %s", exc)
        super().start()
        self._reader.start()

    def stop(self) -> None:
        self._reader.stop()
        super().stop()

    async def re_read(self) -> None:
        """Bring the state to the rows that changed since the last look."""
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(None, backfill.read, self.database, self._after or backfill.EVER)
            self._show(*found)
        except CONNECTION_ERRORS as exc:
            logger.warning("the jobs that changed cannot be read: %s", exc)
        except Exception:
            logger.exception("the jobs that changed could not be shown")

    def _show(self, jobs: Iterable[backfill.KnownJob], after: str) -> None:
        """Runs in Flower's loop, the only thread that may touch its state."""
        search = getattr(self.state, "search_engine", None)
        for task, evicted in backfill.apply(_Uncounted(self.state), jobs):
            if search is not None:
                if evicted is not None:
                    search.remove(evicted)
                search.upsert(task)
        self._after = after


class _Uncounted:
    """Flower's state, fed without being counted: an event that is made from a row must not show in its metrics."""

    def __init__(self, state: State) -> None:
        self.tasks = state.tasks
        self._state = state

    def event(self, event: dict[str, Any]) -> None:
        State.event(self._state, event)


def run(ctx: Any, tornado_argv: tuple[str, ...], database: Database) -> None:
    """What ``flower.command.flower`` does, with our broker class and our events."""
    install()
    command.warn_about_celery_args_used_in_flower_command(ctx.parent, tornado_argv)
    command.apply_env_options()
    command.apply_options("celery pgtruth flower", tornado_argv)
    command.extract_settings()
    command.setup_logging()
    app = ctx.obj.app
    events = TruthEvents(
        database,
        app,
        db=options.db,
        persistent=options.persistent,
        state_save_interval=options.state_save_interval,
        enable_events=options.enable_events,
        io_loop=IOLoop.current(),
        max_workers_in_memory=options.max_workers,
        max_tasks_in_memory=options.max_tasks,
    )
    served = Flower(capp=app, options=options, events=events, io_loop=events.io_loop, **command.settings)
    atexit.register(served.stop)
    signal.signal(signal.SIGTERM, command.sigterm_handler)
    port = served.start_http_server()
    if not getattr(ctx.obj, "quiet", False):
        command.print_banner(app, "ssl_options" in command.settings, port)
    with suppress(KeyboardInterrupt, SystemExit):
        served.start()
