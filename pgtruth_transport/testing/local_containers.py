"""What would be a container is a process of this machine: PostgreSQL, Redis, or a command in this Python environment.

Each offers what ``pytest_docker_tools`` asks of a container of Docker's client. Like every process of
:mod:`pgtruth_transport.testing`, they end with the process that started them, however it dies; and as in Docker, all
that a container runs ends with its main process. What differs: they share this machine's files (``/tmp`` too), users
and Python packages.
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
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from pgtruth_transport.testing.forwarding import PortForwarder
from pgtruth_transport.testing.postgres import EmbeddedPostgres
from pgtruth_transport.testing.processes import ServerError, ServerProcess, remove_tree
from pgtruth_transport.testing.valkey import EmbeddedValkey

#: The label that tells a container of ours from a real one.
LOCAL: Final = "pgtruth.local"
#: Seconds between two signals to one process: Python runs the handler of two that come together only once.
_BETWEEN_SIGNALS: Final = 0.5


class LocalContainer:
    """A container's life, lived by a process."""

    def __init__(self, image: str, network: str | None, labels: Mapping[str, str], name: str | None) -> None:
        self.id = secrets.token_hex(32)
        self.name = name or f"local-{self.id[:8]}"
        self.short_id = self.hostname = self.id[:12]
        self.address = "127.0.0.1"
        self.published: dict[str, list[dict[str, str]]] = {}
        self.labels = {**labels, LOCAL: "True"}
        self.image = image
        self.networks = [network] if network else []

    @property
    def attrs(self) -> dict[str, Any]:
        """The part of ``docker inspect`` that is asked for."""
        networks = {name: {"IPAddress": self.address} for name in self.networks}
        return {
            "Id": self.id,
            "Config": {"Hostname": self.hostname, "Image": self.image, "Labels": self.labels, "Env": []},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": networks, "Ports": self.published},
            "State": {"Status": self.status, "ExitCode": self.exit_code},
        }

    @property
    def status(self) -> str:
        raise NotImplementedError

    @property
    def exit_code(self) -> int:
        """As in Docker: 0 while it runs, 128 and the signal's number when one has killed it."""
        return 0

    def reload(self) -> None:
        """Nothing is cached."""

    def exec_run(self, cmd: str | Sequence[str], **options: Any) -> tuple[int, bytes]:
        """Run another command as the container would."""
        return _run(cmd, dict(os.environ), Path("/"))

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
        return {"StatusCode": self.exit_code}

    def remove(self, force: bool = False, **options: Any) -> None:
        self.stop()


class LocalServer(LocalContainer):
    """An embedded server in a container's place."""

    server: EmbeddedPostgres | EmbeddedValkey
    _runs = False

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


class LocalPostgres(LocalServer):
    """An embedded PostgreSQL; ``attrs["LocalUrl"]`` is its ``pgtruth://`` URL. A kill keeps its data."""

    def __init__(self, image: str, command: Sequence[str], **options: Any) -> None:
        super().__init__(image, **options)
        given = dict(part.split("=", 1) for part in command if "=" in part)
        self.server = EmbeddedPostgres(options=given)

    @property
    def attrs(self) -> dict[str, Any]:
        return {**super().attrs, "LocalUrl": self.server.url}


class LocalRedis(LocalServer):
    """An embedded Valkey on the image's own port of a loopback address of its own, which is its host name too.

    A port of 127.0.0.1 is published for it. It keeps nothing over a restart. Needs a machine where all of 127.0.0.0/8
    is loopback, as on Linux.
    """

    PORT: Final = 6379

    def __init__(self, image: str, command: Sequence[str], **options: Any) -> None:
        super().__init__(image, **options)
        self.address = self.hostname = ".".join(["127", *(str(1 + secrets.randbelow(254)) for _ in range(3))])
        self.server = EmbeddedValkey(host=self.address, port=self.PORT, options=_directives(command))
        self._forwarder = PortForwarder((self.address, self.PORT))
        self.published = {f"{self.PORT}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(self._forwarder.port)}]}

    def remove(self, force: bool = False, **options: Any) -> None:
        self._forwarder.close()
        super().remove(force, **options)


class LocalCommand(LocalContainer):
    """The container's command as a process of this machine, its volumes as folders."""

    def __init__(
        self,
        image: str,
        command: Sequence[str],
        environment: Mapping[str, Any],
        volumes: Mapping[Path, str],
        **options: Any,
    ) -> None:
        super().__init__(image, **options)
        self.folders = {bind: folder for folder, bind in volumes.items()}
        self.command = [part.replace("%h", self.hostname) for part in command]
        self.environment = self._environment({name: str(value) for name, value in environment.items()})
        self._home = Path(tempfile.mkdtemp(prefix="pgtruth-container-"))
        self._process: ServerProcess | None = None
        self._code: int | None = None
        self._signalled = 0.0

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
        return "exited" if self._has_ended() else "running"

    @property
    def exit_code(self) -> int:
        code = self._code or 0
        return code if code >= 0 else 128 - code

    def start(self) -> None:
        if not self.command:
            raise ServerError(f"image {self.image} has no command that could run here without Docker")
        self._process, self._code = ServerProcess(self._program(), self._log, env=self.environment, cwd=self.cwd), None

    def _program(self) -> list[str]:
        """The command in this Python environment; by the ``celery`` script, which names the processes as in Docker."""
        name, *arguments = self.command
        script = Path(sys.executable).parent / name
        if name == "python":
            return [sys.executable, *arguments]
        if name == "celery":
            return [str(script), *arguments] if script.exists() else [sys.executable, "-m", "celery", *arguments]
        return [name, *arguments]

    def kill(self, signal: str | int | None = None) -> None:
        """Signal the main process, as Docker does; when that is SIGKILL everything in the container dies."""
        number = _number(signal)
        if number == _KILL:
            self._end(number, 0)
            return
        time.sleep(max(0.0, self._signalled + _BETWEEN_SIGNALS - time.monotonic()))
        os.kill(self.pid, number)
        self._signalled = time.monotonic()

    def stop(self, timeout: float = 10) -> None:
        self._end(signal.SIGTERM, timeout)

    def _has_ended(self) -> bool:
        """Whether the main process has; then whatever it left behind ends too."""
        assert self._process is not None
        if self._code is None and not self._process.is_running():
            self._end(_KILL, 0)
        return self._code is not None

    def _end(self, number: signal.Signals, timeout: float) -> None:
        if self._process is not None and self._code is None:
            self._process.end(number, timeout)
            self._code = self._process.wait(0)

    def wait(self, timeout: float = 10) -> dict[str, int]:
        if self._process is not None:
            self._process.wait(timeout)
            self._has_ended()
        return {"StatusCode": self.exit_code}

    @property
    def _log(self) -> Path:
        return self._home / "log"

    def logs(self, **options: Any) -> bytes:
        return self._log.read_bytes() if self._log.exists() else b""

    def exec_run(self, cmd: str | Sequence[str], **options: Any) -> tuple[int, bytes]:
        """Run another command with the container's environment and folder."""
        return _run(cmd, self.environment, self.cwd)

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


def _run(cmd: str | Sequence[str], environment: Mapping[str, str], cwd: Path) -> tuple[int, bytes]:
    argv = shlex.split(cmd) if isinstance(cmd, str) else list(cmd)
    done = subprocess.run(argv, check=False, capture_output=True, env=environment, cwd=cwd, timeout=60)
    return done.returncode, done.stdout + done.stderr


def _number(given: str | int | None) -> signal.Signals:
    if given is None:
        return _KILL
    if isinstance(given, int):
        return signal.Signals(given)
    return signal.Signals[given if given.startswith("SIG") else f"SIG{given}"]


def _directives(command: Sequence[str | None]) -> dict[str, str]:
    """The ``--name value`` pairs of a ``redis-server`` command; a configuration file of the image is not there."""
    words = [word or "" for word in command]  # pytest_docker_tools makes None of an empty word
    return {
        name.removeprefix("--"): value
        for name, value in pairwise(words)
        if name.startswith("--") and not value.startswith("--")
    }
