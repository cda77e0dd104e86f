"""A small HTTP server for Prometheus: ``/metrics``, and ``/health`` for load balancers and container checks.

It holds one database connection, reads only, and needs no worker. Killing it loses nothing but its histograms' start.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from pgtruth_transport.db import CONNECTION_ERRORS, Database

from . import queries
from .metrics import PATIENCE, JobCollector

logger = logging.getLogger(__name__)

StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def application(database: Database, window: float = 300) -> Callable[[dict[str, Any], StartResponse], Iterable[bytes]]:
    """The WSGI application; mount it in a server of your own where you like."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(JobCollector(database, window))
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: StartResponse) -> Iterable[bytes]:
        match environ.get("PATH_INFO", "/"):
            case "/metrics":
                page: Iterable[bytes] = metrics(environ, start)
                return page
            case "/health":
                return _health(database, start)
            case "/":
                start("200 OK", [("Content-Type", "text/plain; charset=utf-8")])
                return [b"pgtruth exporter: /metrics /health\n"]
            case _:
                start("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
                return [b"not here: /metrics /health\n"]

    return answer


def _health(database: Database, start: StartResponse) -> Iterable[bytes]:
    try:
        with queries.looking(database, PATIENCE) as conn:
            queries.clock(conn, database)
    except CONNECTION_ERRORS as exc:
        logger.warning("the database cannot be read: %s", exc)
        start("503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"the database cannot be read\n"]
    start("200 OK", [("Content-Type", "text/plain; charset=utf-8")])
    return [b"ok\n"]


def serve(database: Database, host: str, port: int, window: float = 300) -> WSGIServer:
    """Bind and start answering in a thread; ``server.server_port`` is the port (0 asks for a free one)."""
    server = make_server(
        host, port, application(database, window), server_class=ThreadingWSGIServer, handler_class=_Quiet
    )
    threading.Thread(target=server.serve_forever, name="pgtruth-exporter", daemon=True).start()
    return server
