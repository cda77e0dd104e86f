"""A stand-in for the Docker client: what would be containers are processes of this machine.

It offers what ``pytest_docker_tools`` and ``pytest_celery`` ask of ``docker.from_env()``: networks and volumes by name,
images that cost nothing, containers that can be run, killed, restarted, asked for their logs and removed. A
``postgres`` image becomes an embedded PostgreSQL, every other image the container's command in this Python environment.
Like every process of :mod:`pgtruth_transport.testing`, they end with the process that started them, however it dies.
"""

from __future__ import annotations

import io
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from pgtruth_transport.testing.postgres import EmbeddedPostgres
from pgtruth_transport.testing.processes import ServerProcess, remove_tree

#: The label that tells a container of ours from a real one.
LOCAL: Final = "pgtruth.local"


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
    """A name: nothing is built or pulled."""

    def __init__(self, name: str) -> None:
        self.id = name
        self.tags = [name]


class LocalContainer:
    """A container's life, lived by a process."""

    def __init__(self, image: str, network: str | None, labels: Mapping[str, str], name: str | None) -> None:
        self.id = secrets.token_hex(32)
        self.name = name or f"local-{self.id[:8]}"
        self.short_id = self.hostname = self.id[:12]
        self.labels = {**labels, LOCAL: "True"}
        self.image = image
        self.networks = [network] if network else []

    @property
    def attrs(self) -> dict[str, Any]:
        """The part of ``docker inspect`` that is asked for."""
        return {
            "Id": self.id,
            "Config": {"Hostname": self.hostname, "Image": self.image, "Labels": self.labels, "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {n: {"IPAddress": "127.0.0.1"} for n in self.networks}, "Ports": {}},
            "State": {"Status": self.status},
        }

    @property
    def status(self) -> str:
        raise NotImplementedError

    def reload(self) -> None:
        """Nothing is cached."""

    def put_archive(self, path: str, data: Any) -> bool:
        raise FileNotFoundError(f"container {self.name} has no volume at {path}")

    def start(self) -> None:
        raise NotImplementedError

    def kill(self, signal: str | int | None = None) -> None:
        raise NotImplementedError

    def stop(self, timeout: float = 10) -> None:
        raise NotImplementedError

    def restart(self, timeout: float = 10) -> None:
        self.stop(timeout)
        self.start()

    def wait(self, timeout: float = 10) -> dict[str, int]:
        return {"StatusCode": 0}

    def remove(self, force: bool = False, **options: Any) -> None:
        self.stop()


class LocalPostgres(LocalContainer):
    """An embedded PostgreSQL; ``attrs["LocalUrl"]`` is its ``pgtruth://`` URL. A kill keeps its data."""

    def __init__(self, image: str, command: Sequence[str], **options: Any) -> None:
        super().__init__(image, **options)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        self.server = EmbeddedPostgres(options=given)
        self._runs = False

    @property
    def attrs(self) -> dict[str, Any]:
        return {**super().attrs, "LocalUrl": self.server.url}

    @property
    def status(self) -> str:
        return "running" if self._runs else "exited"

    def start(self) -> None:
        self.server.start()
        self._runs = True

    def kill(self, signal: str | int | None = None) -> None:
        self.server.stop_hard()
        self._runs = False

    def stop(self, timeout: float = 10) -> None:
        self.kill()

    def logs(self, **options: Any) -> bytes:
        return self.server.log.read_bytes()

    def remove(self, force: bool = False, **options: Any) -> None:
        self._runs = False
        self.server.stop()


class LocalCommand(LocalContainer):
    """The container's command as a process of this machine, its volumes as folders."""

    def __init__(
        self,
        image: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        volumes: Mapping[Path, str],
        **options: Any,
    ) -> None:
        super().__init__(image, **options)
        self.folders = {bind: folder for folder, bind in volumes.items()}
        self.command = [part.replace("%h", self.hostname) for part in command]
        self.environment = self._environment(dict(environment))
        self._home = Path(tempfile.mkdtemp(prefix="pgtruth-container-"))
        self._process: ServerProcess | None = None

    def _environment(self, given: dict[str, str]) -> dict[str, str]:
        found = {**os.environ, **given, "HOSTNAME": self.hostname}
        found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        paths = [str(self.folders.get(part, part)) for part in given.get("PYTHONPATH", "").split(os.pathsep) if part]
        inherited = os.environ.get("PYTHONPATH", "")
        found["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [inherited])])
        return found

    @property
    def cwd(self) -> Path:
        """The first volume, as an image's WORKDIR would be; else an empty folder."""
        return next(iter(self.folders.values()), self._home)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"container {self.name} was not started"
        return self._process.pid

    @property
    def status(self) -> str:
        if self._process is None:
            return "created"
        return "running" if self._process.is_running() else "exited"

    def start(self) -> None:
        program = [*self.command]
        if program and program[0] in ("celery", "python"):
            program[0:1] = [sys.executable] if program[0] == "python" else [sys.executable, "-m", "celery"]
        self._process = ServerProcess(program, self._home / "log", env=self.environment, cwd=self.cwd)

    def kill(self, signal: str | int | None = None) -> None:
        """Signal the main process, as Docker does; when that is SIGKILL everything in the container dies."""
        number = _number(signal)
        if number == _KILL:
            self._end(number, 0)
        else:
            os.kill(self.pid, number)

    def stop(self, timeout: float = 10) -> None:
        self._end(signal.SIGTERM, timeout)

    def _end(self, number: signal.Signals, timeout: float) -> None:
        if self._process is not None and self._process.is_running():
            self._process.end(number, timeout)

    def wait(self, timeout: float = 10) -> dict[str, int]:
        return {"StatusCode": self._process.wait(timeout) if self._process else 0}

    def logs(self, **options: Any) -> bytes:
        log = self._home / "log"
        return log.read_bytes() if log.exists() else b""

    def exec_run(self, cmd: str | Sequence[str], **options: Any) -> tuple[int, bytes]:
        """Run another command with the container's environment and folder."""
        argv = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
        done = subprocess.run(argv, check=False, capture_output=True, env=self.environment, cwd=self.cwd, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def put_archive(self, path: str, data: Any) -> bool:
        folder = self.folders.get(path)
        if folder is None:
            return super().put_archive(path, data)
        content = data if isinstance(data, bytes) else data.read()
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            archive.extractall(folder, filter="data")
        return True

    def remove(self, force: bool = False, **options: Any) -> None:
        self._end(_KILL if force else signal.SIGTERM, 10)
        remove_tree(self._home)


_KILL: Final = signal.SIGKILL


def _number(given: str | int | None) -> signal.Signals:
    if given is None:
        return _KILL
    if isinstance(given, int):
        return signal.Signals(given)
    return signal.Signals[given if given.startswith("SIG") else f"SIG{given}"]


class LocalDocker:
    """``docker.from_env()`` for this machine."""

    def __init__(self) -> None:
        self._volumes: dict[str, LocalVolume] = {}
        self._containers: dict[str, LocalContainer] = {}
        self.networks = _Networks()
        self.volumes = _Volumes(self._volumes)
        self.images = _Images()
        self.containers = _Containers(self._containers, self._volumes)

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
    def build(self, *, tag: str = "local", **options: Any) -> tuple[LocalImage, Iterator[str]]:
        return LocalImage(tag), iter(())

    def pull(self, repository: str, **options: Any) -> LocalImage:
        return LocalImage(repository)

    def get(self, name: str) -> LocalImage:
        return LocalImage(name)


class _Containers:
    def __init__(self, known: dict[str, LocalContainer], volumes: dict[str, LocalVolume]) -> None:
        self._known = known
        self._volumes = volumes

    def create(
        self,
        image: str,
        command: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        volumes: Mapping[str, Mapping[str, str]] | None = None,
        network: str | None = None,
        labels: Mapping[str, str] | None = None,
        name: str | None = None,
        **options: Any,
    ) -> LocalContainer:
        common: dict[str, Any] = {"network": network, "labels": labels or {}, "name": name}
        container: LocalContainer
        if image.split(":")[0].split("/")[-1] == "postgres":
            container = LocalPostgres(image, command, **common)
        else:
            folders = {self._volumes[v].folder: bind["bind"] for v, bind in (volumes or {}).items()}
            container = LocalCommand(image, command, environment or {}, folders, **common)
        self._known[container.id] = container
        return container

    def run(self, image: str, command: Sequence[str] = (), **options: Any) -> LocalContainer:
        container = self.create(image, command, **options)
        container.start()
        return container

    def get(self, name: str) -> LocalContainer:
        return next(c for c in self._known.values() if name in (c.id, c.short_id, c.name))

    def list(self, **options: Any) -> list[LocalContainer]:
        return [c for c in self._known.values() if c.status == "running"]
