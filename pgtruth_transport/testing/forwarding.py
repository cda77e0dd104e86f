"""A published port: what connects to a port of 127.0.0.1 is handed on to a server at another address.

The forwarder lives in threads of the test's own process and ends with it. While the server is down a connection is
accepted and closed at once, as Docker's own proxy does.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Final

_CHUNK: Final = 65536


class PortForwarder:
    """Listens from the moment it is made until :meth:`close`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"forward-{self.port}", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more; links that stand end with their server."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    """Copy one direction; its end ends both, since no server here answers to a half-closed link."""
    with suppress(OSError):
        while data := source.recv(_CHUNK):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
    source.close()
