"""A stand-in for the Docker client: what would be containers are processes of this machine.

It offers what ``pytest_docker_tools`` and ``pytest_celery`` ask of ``docker.from_env()``: networks and volumes by name,
images that cost nothing, containers that can be run, killed, restarted, asked for their logs and removed. A
``postgres`` image becomes an embedded PostgreSQL, a ``redis`` or ``valkey`` image an embedded Valkey, every other image
the container's command in this Python environment, whatever versions its Dockerfile would install. See
:mod:`pgtruth_transport.testing.local_containers` for what such a container is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pgtruth_transport.testing.local_containers import LOCAL, LocalCommand, LocalContainer, LocalPostgres, LocalRedis
from pgtruth_transport.testing.processes import remove_tree

__all__ = ["LOCAL", "LocalDocker"]


class LocalVolume:
    """A temporary folder under a volume's name."""

    def __init__(self, name: str) -> None:
        self.name = self.id = name
        self.folder = Path(tempfile.mkdtemp(prefix="pgtruth-volume-"))
        self.attrs: dict[str, Any] = {"Name": name, "Labels": {}}

    def remove(self, force: bool = False) -> None:
        remove_tree(self.folder)


class LocalNetwork:
    """A name: processes of one machine reach each other as they are."""

    def __init__(self, name: str) -> None:
        self.name = self.id = name
        self.attrs: dict[str, Any] = {"Name": name, "Labels": {}}

    def remove(self) -> None:
        """Nothing is left of it."""


class LocalImage:
    """A name, and the command of a container that is given none: nothing is built or pulled."""

    def __init__(self, name: str, buildargs: Mapping[str, str] | None = None) -> None:
        self.id = name
        self.tags = [name]
        self.command = _worker_command(buildargs or {})


def _worker_command(buildargs: Mapping[str, str]) -> list[str]:
    """What an image of a pytest-celery worker runs by itself; its build arguments say so."""
    if "CELERY_WORKER_NAME" not in buildargs:
        return []
    level, queue = buildargs.get("CELERY_LOG_LEVEL", "INFO"), buildargs.get("CELERY_WORKER_QUEUE", "celery")
    name = f"{buildargs['CELERY_WORKER_NAME']}@%h"
    return ["celery", "-A", "app", "worker", f"--loglevel={level}", "-n", name, "-Q", queue]


class LocalDocker:
    """``docker.from_env()`` for this machine."""

    def __init__(self) -> None:
        self._volumes: dict[str, LocalVolume] = {}
        self._images: dict[str, LocalImage] = {}
        self._containers: dict[str, LocalContainer] = {}
        self.networks = _Networks()
        self.volumes = _Volumes(self._volumes)
        self.images = _Images(self._images)
        self.containers = _Containers(self._containers, self._volumes, self._images)

    def ping(self) -> bool:
        return True

    def close(self) -> None:
        """Remove what tests have left."""
        for container in self._containers.values():
            with suppress(Exception):
                container.remove(force=True)
        for volume in self._volumes.values():
            volume.remove()


class _Networks:
    def create(self, name: str, **options: Any) -> LocalNetwork:
        return LocalNetwork(name)


class _Volumes:
    def __init__(self, known: dict[str, LocalVolume]) -> None:
        self._known = known

    def create(self, name: str, **options: Any) -> LocalVolume:
        return self._known.setdefault(name, LocalVolume(name))


class _Images:
    def __init__(self, known: dict[str, LocalImage]) -> None:
        self._known = known

    def build(
        self, *, tag: str = "local", buildargs: Mapping[str, str] | None = None, **options: Any
    ) -> tuple[LocalImage, Iterator[str]]:
        self._known[tag] = LocalImage(tag, buildargs)
        return self._known[tag], iter(())

    def pull(self, repository: str, **options: Any) -> LocalImage:
        return self.get(repository)

    def get(self, name: str) -> LocalImage:
        return self._known.setdefault(name, LocalImage(name))


class _Containers:
    def __init__(
        self, known: dict[str, LocalContainer], volumes: dict[str, LocalVolume], images: dict[str, LocalImage]
    ) -> None:
        self._known = known
        self._volumes = volumes
        self._images = images

    def create(
        self,
        image: str,
        command: Sequence[str] = (),
        *,
        environment: Mapping[str, Any] | None = None,
        volumes: Mapping[str, Mapping[str, str]] | None = None,
        network: str | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> LocalContainer:
        common: dict[str, Any] = {"network": network, "labels": labels or {}, "name": name}
        container: LocalContainer
        match image.split(":")[0].split("/")[-1]:
            case "postgres":
                container = LocalPostgres(image, command, **common)
            case "redis" | "valkey":
                container = LocalRedis(image, command, **common)
            case _:
                if not command and image in self._images:
                    command = self._images[image].command
                folders = {self._folder(source): bind["bind"] for source, bind in (volumes or {}).items()}
                container = LocalCommand(image, command, environment or {}, folders, **common)
        self._known[container.id] = container
        return container

    def _folder(self, source: str) -> Path:
        """A volume's folder, or the mounted folder of this machine itself."""
        return self._volumes[source].folder if source in self._volumes else Path(source)

    def run(self, image: str, command: Sequence[str] = (), **options: Any) -> LocalContainer:
        container = self.create(image, command, **options)
        container.start()
        return container

    def get(self, name: str) -> LocalContainer:
        return next(c for c in self._known.values() if name in (c.id, c.short_id, c.name))

    def list(self, **options: Any) -> list[LocalContainer]:
        return [c for c in self._known.values() if c.status == "running"]
