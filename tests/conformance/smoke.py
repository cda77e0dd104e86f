"""A pytest plugin for Celery's ``t/smoke``: our pytest-celery components instead of its Redis and RabbitMQ.

Loaded by ``PYTEST_PLUGINS`` after :mod:`pgtruth_transport.testing.pytest_celery_plugin`, so that its fixtures stand
before pytest-celery's own; the suite's ``conftest.py`` still stands before both, and keeps its own worker classes.
With ``PGTRUTH_CONFORMANCE_CONTROL`` set, broker and backend are pytest-celery's Redis, to compare.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytest_celery import RedisTestBroker

import pgtruth_transport.worker.step  # noqa: F401 - some tests play a worker, and every worker on our URL loads it
from pgtruth_transport.testing.vendors import PgTruthTestBroker

SIGNAL_URL = os.environ.get("TEST_SIGNAL", "")
VENDOR = "redis" if os.environ.get("PGTRUTH_CONFORMANCE_CONTROL") else "pgtruth"
#: Slots of a worker whose test does not say: the cores of a machine that the suite is usually run on.
SLOTS = 4
#: Tests that cut every connection on the broker's side, by a command that they have for Redis and RabbitMQ only.
CUTS = "test_worker_queue_alias_reconnect"
#: Where a task of the suite notes that it has killed its process once. In a container the file is new for each test.
MARKER = Path("/tmp/kill_child_process_once")


class CutBroker(PgTruthTestBroker, RedisTestBroker):
    """Runs what is Redis's command for that as a restart of the server: one that is only cut off reconnects unseen."""

    def __init__(self, container: Any) -> None:
        super().__init__(container)
        container.exec_run = self._cut

    def _cut(self, command: list[str]) -> tuple[int, bytes]:
        assert command == ["redis-cli", "CLIENT", "KILL", "TYPE", "normal"]
        self.container.restart()
        return 0, b""


@pytest.fixture
def celery_broker(request: pytest.FixtureRequest) -> Any:
    """One broker for every test, instead of the matrix of Redis and RabbitMQ."""
    broker = request.getfixturevalue(f"celery_{VENDOR}_broker")
    cuts = VENDOR == "pgtruth" and request.cls is not None and request.cls.__name__ == CUTS
    return CutBroker(broker.container) if cuts else broker


@pytest.fixture
def celery_backend(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(f"celery_{VENDOR}_backend")


@pytest.fixture
def default_worker_app(default_worker_app: Any) -> Any:
    """What is set here reaches the test's app and its workers: in Redis mode, who wakes them.

    Some tests start three jobs and mean all of them to run. With as many slots as this machine has cores that may be
    too few, and a job that no slot is free for stays in its queue here.
    """
    default_worker_app.conf.worker_concurrency = max(SLOTS, os.cpu_count() or 1)
    if SIGNAL_URL and VENDOR == "pgtruth":
        default_worker_app.conf.broker_transport_options = {"signal_url": SIGNAL_URL}
    return default_worker_app


@pytest.fixture(autouse=True)
def no_marker() -> Iterator[None]:
    """No test finds what another has left in ``/tmp``."""
    MARKER.unlink(missing_ok=True)
    yield
    MARKER.unlink(missing_ok=True)
