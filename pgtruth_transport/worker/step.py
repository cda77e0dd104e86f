"""The consumer bootstep that makes a Celery worker a pgtruth worker, and gives back what it holds when it stops."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from celery import bootsteps
from celery.exceptions import WorkerShutdown
from celery.utils.log import get_logger
from celery.worker.consumer import Gossip, Mingle
from kombu.utils import functional as kombu_functional

from ..db import CONNECTION_ERRORS
from ..errors import SchemaError
from ..migrate import check, migrate
from ..runtime import runtime
from ..settings import Settings, mask_url
from . import inspecting, keeper, trace  # noqa: F401 - inspecting registers commands
from .core import Worker
from .held import Held
from .takeback import keep_sent, was_dropped

logger = get_logger(__name__)

# Both run for the driver types that they name: ours has the fanout exchanges that they need.
Mingle.compatible_transports.add("pgtruth")
Gossip.compatible_transports.add("pgtruth")

DEFAULT_STRATEGY = "celery.worker.strategy:default"
STRATEGY = "pgtruth_transport.worker.request:strategy"


class PgTruthStep(bootsteps.StartStopStep):
    """Claims, leases and fencing for a worker whose broker is ``pgtruth://``.

    Created before Celery builds its strategies, started with each connection, shut down last. Unstarted jobs are
    released as soon as the worker stops consuming; what is still held at the end (a cold shutdown) is released then.
    """

    requires = ("celery.worker.consumer.connection:Connection",)
    name = "PgTruth"

    def __init__(self, c: Any, **kwargs: Any) -> None:
        self.enabled = c.conninfo.transport.driver_type == "pgtruth"
        self.duties: list[keeper.Duty] = []
        if not self.enabled:
            return
        # Celery imports kombu before it patches ``time`` for a green pool: kombu's waits would stop every greenlet
        kombu_functional.sleep = time.sleep
        settings = Settings.from_app(c.app, read=True)
        trace.set_settings(settings)
        c.pgtruth = Worker(c.app, c, settings, *runtime(settings)[1:])
        c.connect = _checked(c.connect, settings)
        for task in c.app.tasks.values():
            if task.Strategy == DEFAULT_STRATEGY:
                task.Strategy = STRATEGY

    def include_if(self, c: Any) -> bool:
        return bool(self.enabled)

    def start(self, c: Any) -> None:
        worker: Worker = c.pgtruth
        worker.settler.begin_anew()
        if self.duties:
            worker.disown()
        worker.demand.learn_tasks()
        if worker.enforces_limits():
            keep_sent(c.pool, lambda: list(worker.held.values()))
        if worker.enforces_limits() and c.restart_count > 1:
            c.pool._pool.maintain_pool()  # Celery cannot watch a child whose end was seen just before the connection's
        c.connection.transport.attach(worker)
        if not self.duties:
            self.duties = keeper.start(worker)

    def stop(self, c: Any) -> None:
        """Celery has stopped consuming: at a shutdown, or because the connection is lost."""
        self._release(c.pgtruth, [held for held in c.pgtruth.unstarted() if was_dropped(held)])

    def close(self, c: Any) -> None:
        c.pgtruth.drain()

    def terminate(self, c: Any) -> None:
        c.pgtruth.drain()

    def shutdown(self, c: Any) -> None:
        worker: Worker = c.pgtruth
        worker.drain()
        for duty in self.duties:
            duty.stop()
        self._release(worker, [held for held in list(worker.held.values()) if not held.concluded])
        try:
            worker.settler.flush_counts()
        except CONNECTION_ERRORS:
            logger.info("this worker's last counts are lost: the database is out of reach")
        worker.settler.close()

    def _release(self, worker: Worker, held: list[Held]) -> None:
        for item in held:
            worker.restore(item)
        if worker.restored:
            # the words of kombu's other transports
            logger.info("Restoring %d unacknowledged message(s)", worker.restored)
            worker.restored = 0
        try:
            worker.settle_now()
        except CONNECTION_ERRORS as exc:
            left = worker.unsettled()
            logger.warning("%d job(s) are left to their leases: %s", left, str(exc).strip().splitlines()[0])


def _checked(connect: Callable[[], Any], settings: Settings) -> Callable[[], Any]:
    """Celery's ``Consumer.connect``, which stops the worker on a wrong schema before anything else uses it.

    The connection does not show its password: kombu keeps the whole URL in ``hostname``, which ``inspect stats`` sends.
    """

    def checked() -> Any:
        try:
            connection = connect()
            if settings.auto_migrate:
                migrate(settings)
            check(settings)
        except SchemaError as exc:
            logger.critical("%s", exc)
            raise WorkerShutdown(os.EX_CONFIG) from None
        info = connection.info
        connection.info = lambda: {**info(), "hostname": mask_url(str(info()["hostname"]))}
        return connection

    return checked
