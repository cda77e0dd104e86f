"""Components for pytest-celery: a broker, a backend and a worker on ``pgtruth://``.

Use the fixtures of :mod:`pgtruth_transport.testing.pytest_celery_plugin`, or these classes with container fixtures of
your own. They run in real containers or, through :mod:`pgtruth_transport.testing.containers`, as processes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg
from pytest_celery import (
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestContainer,
    CeleryTestWorker,
    CeleryWorkerContainer,
)
from pytest_docker_tools.exceptions import ContainerFailed  # type: ignore[import-untyped]

from pgtruth_transport.testing.containers import LOCAL
from pgtruth_transport.urls import parse_url

#: Where the image of the worker is built from, and what pip installs in it unless ``PGTRUTH_PKG`` names something else.
DOCKERFILE_FOLDER: Final = str(Path(__file__).parent / "docker")
PACKAGE: Final = "pgtruth-transport[redis]"
_PORT: Final = "5432/tcp"
_PASSWORD: Final = "pgtruth"


class PostgresContainer(CeleryTestContainer):
    """PostgreSQL: from the official image, or an embedded server."""

    @property
    def is_local(self) -> bool:
        return LOCAL in self.attrs["Config"]["Labels"]

    @property
    def url(self) -> str:
        """The ``pgtruth://`` URL for workers."""
        if self.is_local:
            return str(self.attrs["LocalUrl"])
        return f"pgtruth://postgres:{_PASSWORD}@{self.attrs['Config']['Hostname']}:5432/postgres"

    @property
    def host_url(self) -> str:
        """The ``pgtruth://`` URL for the test itself."""
        if self.is_local:
            return self.url
        host, port = self.get_addr(_PORT)
        return f"pgtruth://postgres:{_PASSWORD}@{host}:{port}/postgres"

    @property
    def client(self) -> psycopg.Connection[Any]:
        """A connection in autocommit; the caller closes it."""
        return psycopg.connect(parse_url(self.host_url), autocommit=True, connect_timeout=5)

    @property
    def celeryconfig(self) -> dict[str, str]:
        return {"url": self.url, "host_url": self.host_url}

    def ready(self) -> bool:
        """Whether it accepts connections; an image that initialises itself restarts once before it does."""
        self.reload()
        if self.status == "exited":
            raise ContainerFailed(self, f"container {self.name} has exited before it was ready")
        try:
            self.client.close()
        except (psycopg.OperationalError, IndexError):
            return False
        return True

    @classmethod
    def command(
        cls, *args: str, debugpy: bool = False, wait_for_client: bool = True, **kwargs: dict[str, Any]
    ) -> list[str]:
        return ["postgres", "-c", "max_connections=200", *args]

    @classmethod
    def initial_env(cls) -> dict[str, str]:
        return {"POSTGRES_PASSWORD": _PASSWORD}

    @classmethod
    def image(cls) -> str:
        return "postgres:18"

    @classmethod
    def ports(cls) -> dict[str, None]:
        return {_PORT: None}


class PgTruthTestBroker(CeleryTestBroker):
    """The broker node."""

    @classmethod
    def default_config(cls) -> dict[str, str]:
        return {"url": "pgtruth://postgres@localhost/postgres", "host_url": "pgtruth://postgres@localhost/postgres"}


class PgTruthTestBackend(CeleryTestBackend):
    """The result backend node: the broker's own container, or another database."""

    @classmethod
    def default_config(cls) -> dict[str, str]:
        return {"url": "pgtruth://", "host_url": "pgtruth://"}


class PgTruthWorkerContainer(CeleryWorkerContainer):
    """A worker that has this package installed."""

    @classmethod
    def buildargs(cls) -> dict[str, str]:
        return {**super().buildargs(), "PGTRUTH_PKG": os.environ.get("PGTRUTH_PKG", PACKAGE)}


class PgTruthTestWorker(CeleryTestWorker):
    """The worker node."""

    def get_running_processes_info(
        self, columns: list[str] | None = None, filters: dict[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """As in pytest-celery; where the container is a process, its own tree and not the whole machine."""
        if LOCAL not in self.container.attrs["Config"]["Labels"]:
            found: list[dict[str, Any]] = super().get_running_processes_info(columns, filters)
            return found
        root = psutil.Process(self.container._container.pid)
        infos = [p.as_dict(columns) for p in (root, *root.children(recursive=True))]
        return [i for i in infos if all(i.get(k) == v for k, v in (filters or {}).items())]
