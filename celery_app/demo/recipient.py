"""A small HTTP server that takes the demo's webhooks and counts them by key."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def recipient() -> Iterator[tuple[str, Counter[str]]]:
    """The address, and how often each ``Idempotency-Key`` came in."""
    seen: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            seen[self.headers["Idempotency-Key"]] += 1
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet: the screen belongs to the demo."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="webhook-recipient", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/orders", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
