"""Transaction poolers for tests: a server session belongs to a client for the length of one transaction.

``stand-in`` is written here, so that it runs everywhere, and is stricter than PgBouncer: sessions go round among the
clients, so what one transaction leaves in its session is met by somebody else's. ``pgbouncer`` is the real one where
its program is installed (``apt-get install pgbouncer``); then every test with a pooler runs on both.
"""

from __future__ import annotations

import os
import queue
import select
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport.testing.processes import ServerProcess, free_port
from pgtruth_transport.urls import parse_url

PGBOUNCER: Final = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")
POOLERS: Final = ("stand-in", "pgbouncer") if PGBOUNCER else ("stand-in",)

_SSL, _GSS, _CANCEL = 80877103, 80877104, 80877102
_SHOWN: Final = ("server_version", "server_encoding", "client_encoding", "DateStyle", "TimeZone", "integer_datetimes")
_SHOWN_TOO: Final = ("standard_conforming_strings", "IntervalStyle", "is_superuser", "session_authorization")


@contextmanager
def start_pooler(kind: str, url: str, folder: Path, sessions: int = 4) -> Iterator[str]:
    """Start a pooler of ``kind`` in front of a database; the URL that goes through it."""
    if kind == "pgbouncer":
        with _pgbouncer(url, folder, sessions) as port:
            yield _through(url, port)
    else:
        with closing(StandIn(url, sessions)) as pooler:
            yield _through(url, pooler.port)


def _through(url: str, port: int) -> str:
    where = conninfo_to_dict(parse_url(url))
    return url.replace(f"{where['host']}:{where['port']}", f"127.0.0.1:{port}")


@contextmanager
def _pgbouncer(url: str, folder: Path, sessions: int) -> Iterator[int]:
    assert PGBOUNCER is not None
    where = {name: str(value) for name, value in conninfo_to_dict(parse_url(url)).items()}
    port = free_port()
    users = folder / "users.txt"
    users.write_text(f'"{where["user"]}" "{where["password"]}"\n')
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n{where['dbname']} = host={where['host']} port={where['port']}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = plain\n"
        f"auth_file = {users}\npool_mode = transaction\ndefault_pool_size = {sessions}\nmax_client_conn = 200\n"
        f"logfile = {folder / 'pgbouncer.log'}\nserver_round_robin = 1\n"
    )
    user = None
    if os.geteuid() == 0:  # it refuses to run as root
        import pwd

        user = pwd.getpwnam("nobody").pw_uid
        for path in (folder, *folder.parents):
            if path != Path("/") and path.stat().st_uid == 0:
                path.chmod(path.stat().st_mode | 0o011)
        (folder / "pgbouncer.log").touch()
        for path in (users, config, folder / "pgbouncer.log"):
            os.chown(path, user, -1)
    process = ServerProcess([PGBOUNCER, str(config)], folder / "pgbouncer.out", user=user, env=dict(os.environ))

    def accepts() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        process.wait_until(accepts, 20)
        yield port
    finally:
        import signal

        process.end(signal.SIGTERM)


class StandIn:
    """A transaction pooler in threads of this process, in clear text and trusting everybody."""

    def __init__(self, url: str, sessions: int) -> None:
        self._conninfo = parse_url(url)
        self._sessions: queue.Queue[_Session] = queue.Queue()
        for _ in range(sessions):
            self._sessions.put(_Session(self._conninfo))
        self._all_closed = threading.Event()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="pooler-accept", daemon=True).start()

    def close(self) -> None:
        """Refuse new clients and leave the old ones."""
        self._all_closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        while not self._sessions.empty():
            self._sessions.get().close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="pooler", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with client, suppress(OSError, EOFError):
            if _greet(client, self._sessions):
                self._relay(_Messages(client))

    def _relay(self, client: _Messages) -> None:
        """One transaction after the other, each in the session that has been idle for the longest time."""
        while not self._all_closed.is_set():
            if not client.waiting and not select.select([client.socket], [], [], 0.5)[0]:
                continue
            session = self._sessions.get()
            clean = False
            try:
                clean = session.transaction(client)
            finally:
                if clean and not self._all_closed.is_set():
                    self._sessions.put(session)
                else:
                    session.close()
                    if not self._all_closed.is_set():
                        self._sessions.put(_Session(self._conninfo))
            if session.left:
                return


class _Messages:
    """The messages that come from one side. A part of one is kept: its rest may come only after more has been sent."""

    def __init__(self, source: socket.socket) -> None:
        self.socket = source
        self.waiting = bytearray()

    def receive(self) -> None:
        part = self.socket.recv(65536)
        if not part:
            raise EOFError
        self.waiting += part

    def next(self) -> tuple[bytes, bytes] | None:
        """The kind of the next message and all of it; ``None`` while it is not all here."""
        if len(self.waiting) < 5:
            return None
        (length,) = struct.unpack("!i", self.waiting[1:5])
        if len(self.waiting) < length + 1:
            return None
        message = bytes(self.waiting[: length + 1])
        del self.waiting[: length + 1]
        return message[:1], message


class _Session:
    """A session of the server, logged in by psycopg and then spoken to directly."""

    def __init__(self, conninfo: str) -> None:
        self._conn = psycopg.connect(conninfo, autocommit=True, sslmode="disable", application_name="pgtruth:pooled")
        self.socket = socket.socket(fileno=os.dup(self._conn.pgconn.socket))
        self.socket.setblocking(True)
        self._answers = _Messages(self.socket)
        self.left = False  # the client has gone

    def parameters(self) -> Iterator[tuple[str, str]]:
        for name in (*_SHOWN, *_SHOWN_TOO):
            value = self._conn.pgconn.parameter_status(name.encode())
            if value is not None:
                yield name, value.decode()

    def close(self) -> None:
        self.socket.close()
        self._conn.close()

    def transaction(self, client: _Messages) -> bool:
        """Relay until the session is idle again; whether it may be given to somebody else."""
        self.left = False
        awaited, unsynced, status = False, False, b"I"
        while True:
            while not awaited and (found := client.next()) is not None:
                kind, message = found
                if kind == b"X":
                    self.left = True
                    return not unsynced and status == b"I"
                awaited = kind in (b"S", b"Q")
                unsynced = not awaited
                self.socket.sendall(message)
            ready, _, _ = select.select([client.socket, self.socket], [], [], 60)
            if client.socket in ready:
                try:
                    client.receive()
                except (OSError, EOFError):
                    self.left = True
                    return not awaited and not unsynced and status == b"I"
            if self.socket in ready:
                self._answers.receive()
                while (found := self._answers.next()) is not None:
                    kind, message = found
                    if kind == b"A":
                        continue  # a notification for whoever listened in this session once
                    client.socket.sendall(message)
                    if kind == b"Z":
                        awaited, status = False, message[5:6]
                        if status == b"I":
                            return True


def _greet(client: socket.socket, sessions: queue.Queue[_Session]) -> bool:
    while True:
        (length,) = struct.unpack("!i", _exactly(client, 4))
        packet = _exactly(client, length - 4)
        (code,) = struct.unpack("!i", packet[:4])
        if code == _CANCEL:
            return False
        if code not in (_SSL, _GSS):
            break
        client.sendall(b"N")
    session = sessions.get()
    shown = list(session.parameters())
    sessions.put(session)
    answer = _message(b"R", struct.pack("!i", 0))
    for name, value in shown:
        answer += _message(b"S", f"{name}\0{value}\0".encode())
    client.sendall(answer + _message(b"K", struct.pack("!ii", 1, 1)) + _message(b"Z", b"I"))
    return True


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


def _exactly(source: socket.socket, count: int) -> bytes:
    found: Any = bytearray()
    while len(found) < count:
        part = source.recv(count - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
