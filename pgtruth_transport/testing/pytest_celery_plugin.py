"""pytest-celery's fixtures, on ``pgtruth://``. In your ``conftest.py``::

    pytest_plugins = ["pgtruth_transport.testing.pytest_celery_plugin"]

Then ``celery_setup`` is one worker, one PostgreSQL that is its broker, and the same one as result backend. The switch
``PGTRUTH_TEST_CONTAINERS`` says what they run in: ``docker`` (real containers), ``local`` (processes of this machine),
or ``auto``, the default: Docker where a daemon answers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import docker  # type: ignore[import-untyped]
import pytest
import pytest_docker_tools.wrappers.container  # type: ignore[import-untyped]
from pytest_docker_tools import build, container, fxtr

from pgtruth_transport.migrate import migrate
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.containers import LocalDocker
from pgtruth_transport.testing.vendors import (
    DOCKERFILE_FOLDER,
    PgTruthTestBackend,
    PgTruthTestBroker,
    PgTruthTestWorker,
    PgTruthWorkerContainer,
    PostgresContainer,
)

SWITCH = "PGTRUTH_TEST_CONTAINERS"


def wants_docker(choice: str | None = None) -> bool:
    """What the switch says; ``auto`` asks for a daemon."""
    match choice or os.environ.get(SWITCH, "auto"):
        case "docker":
            return True
        case "local":
            return False
        case "auto":
            return _daemon_answers()
        case other:
            raise pytest.UsageError(f"{SWITCH}={other!r} is neither docker, local nor auto")


def _daemon_answers() -> bool:
    try:
        client = docker.from_env(timeout=5)
    except docker.errors.DockerException:
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, OSError):
        return False
    finally:
        client.close()


@pytest.fixture(scope="session")
def docker_client() -> Iterator[Any]:
    """Docker's client, or the stand-in that runs processes. Every container of pytest-celery comes from it."""
    client = docker.from_env() if wants_docker() else LocalDocker()
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(client, LocalDocker):  # published ports are this machine's, even where that is a container itself
            patch.setattr(pytest_docker_tools.wrappers.container, "tests_inside_container", lambda: False)
        yield client
    client.close()


@pytest.fixture
def default_pgtruth_postgres_cls() -> type[PostgresContainer]:
    """Override to configure the server."""
    return PostgresContainer


@pytest.fixture
def default_pgtruth_postgres_image(default_pgtruth_postgres_cls: type[PostgresContainer]) -> str:
    return default_pgtruth_postgres_cls.image()


@pytest.fixture
def default_pgtruth_postgres_env(default_pgtruth_postgres_cls: type[PostgresContainer]) -> dict[str, str]:
    return default_pgtruth_postgres_cls.initial_env()


@pytest.fixture
def default_pgtruth_postgres_command(default_pgtruth_postgres_cls: type[PostgresContainer]) -> list[str]:
    return default_pgtruth_postgres_cls.command()


@pytest.fixture
def default_pgtruth_postgres_ports(default_pgtruth_postgres_cls: type[PostgresContainer]) -> dict[str, None]:
    return default_pgtruth_postgres_cls.ports()


default_pgtruth_postgres = container(
    image="{default_pgtruth_postgres_image}",
    command=fxtr("default_pgtruth_postgres_command"),
    environment=fxtr("default_pgtruth_postgres_env"),
    ports=fxtr("default_pgtruth_postgres_ports"),
    network="{default_pytest_celery_network.name}",
    wrapper_class=PostgresContainer,
    timeout=60,
)


@pytest.fixture
def migrated_pgtruth_postgres(default_pgtruth_postgres: PostgresContainer) -> PostgresContainer:
    """The server with the schema in it."""
    migrate(Settings.make(default_pgtruth_postgres.host_url))
    return default_pgtruth_postgres


@pytest.fixture
def celery_pgtruth_broker(migrated_pgtruth_postgres: PostgresContainer) -> Iterator[PgTruthTestBroker]:
    broker = PgTruthTestBroker(migrated_pgtruth_postgres)
    yield broker
    broker.teardown()


@pytest.fixture
def celery_pgtruth_backend(migrated_pgtruth_postgres: PostgresContainer) -> Iterator[PgTruthTestBackend]:
    backend = PgTruthTestBackend(migrated_pgtruth_postgres)
    yield backend
    backend.teardown()


@pytest.fixture
def celery_broker(celery_pgtruth_broker: PgTruthTestBroker) -> PgTruthTestBroker:
    return celery_pgtruth_broker


@pytest.fixture
def celery_backend(celery_pgtruth_backend: PgTruthTestBackend) -> PgTruthTestBackend:
    return celery_pgtruth_backend


celery_base_worker_image = build(
    path=DOCKERFILE_FOLDER,
    tag="pgtruth/worker:test",
    buildargs=fxtr("default_worker_buildargs"),
)


@pytest.fixture(scope="session")
def default_worker_buildargs(default_worker_container_session_cls: type[PgTruthWorkerContainer]) -> dict[str, str]:
    return default_worker_container_session_cls.buildargs()


@pytest.fixture
def default_worker_container_cls() -> type[PgTruthWorkerContainer]:
    return PgTruthWorkerContainer


@pytest.fixture(scope="session")
def default_worker_container_session_cls() -> type[PgTruthWorkerContainer]:
    return PgTruthWorkerContainer


@pytest.fixture
def default_worker_cls() -> type[PgTruthTestWorker]:
    return PgTruthTestWorker
