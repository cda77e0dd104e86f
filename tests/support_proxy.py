"""A TCP proxy that fails on command: what cut cables, dead hosts and firewalls look like to a client.

with Proxy("127.0.0.1", 5432) as proxy:
    connect to proxy.host, proxy.port
    proxy.cut()      every connection is reset; new ones work
    proxy.hang()     nothing is forwarded any more, and nothing says so; new connections are accepted and hang too
    proxy.refuse()   every connection is reset, new ones are refused
    proxy.heal()     all works again: what hung goes on, in both directions
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

_CHUNK = 65536


class Proxy:
    """Forwards connections to a server at ``target_host:target_port`` (or a Unix socket) until told otherwise."""

    def __init__(self, target_host: str, target_port: int) -> None:
        self._target = (target_host, target_port)
        self._lock = threading.Lock()
        self._pairs: list[_Pair] = []
        self._flowing = threading.Event()
        self._flowing.set()
        self._listening: socket.socket | None = None
        self.host = "127.0.0.1"
        self.port = 0
        self.accepted = 0
        self._listen()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        with self._lock:
            self._pairs = [pair for pair in self._pairs if pair.open]
            return len(self._pairs)

    def cut(self) -> None:
        """Reset every connection; new ones are served."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.reset()

    def hang(self) -> None:
        """Stop forwarding, on old and new connections alike, and keep quiet about it."""
        self._flowing.clear()

    def refuse(self) -> None:
        """Reset every connection and refuse new ones."""
        listening, self._listening = self._listening, None
        if listening is not None:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()
        self.cut()

    def heal(self) -> None:
        """Serve again."""
        self._flowing.set()
        if self._listening is None:
            self._listen()

    def close(self) -> None:
        """Refuse for good."""
        self.refuse()
        self._flowing.set()

    def _listen(self) -> None:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((self.host, self.port))
        listening.listen(128)
        self.port = listening.getsockname()[1]
        self._listening = listening
        threading.Thread(target=self._accept, args=(listening,), name="proxy-accept", daemon=True).start()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            self.accepted += 1
            if self._listening is not listening:
                client.close()
                return
            threading.Thread(target=self._serve, args=(client,), name="proxy", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        self._flowing.wait()
        try:
            server = socket.create_connection(self._target, timeout=10)
        except OSError:
            client.close()
            return
        pair = _Pair(client, server)
        with self._lock:
            self._pairs.append(pair)
        pair.forward(self._flowing)


class _Pair:
    """One connection through the proxy."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._sockets = (client, server)
        self.open = True
        for end in self._sockets:
            end.setblocking(True)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def forward(self, flowing: threading.Event) -> None:
        client, server = self._sockets
        with selectors.DefaultSelector() as selector, suppress(OSError, ValueError):
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while self.open:
                for key, _ in selector.select(timeout=1.0):
                    flowing.wait()
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(_CHUNK)
                    if not data:
                        raise OSError("closed")
                    key.data.sendall(data)
        self._close()

    def reset(self) -> None:
        """Close with RST, as a dead host's kernel answers."""
        for end in self._sockets:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        self.open = False
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            with suppress(OSError):
                end.close()
