"""The URL that a kombu connection was given, whichever shape kombu has left it in. Pure."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote


def client_url(client: Any) -> str:
    """The broker URL of a ``kombu.Connection``.

    kombu keeps it raw in ``hostname``; it strips the scheme of ``pgtruth+postgresql://``, and splits the URL into its
    parts at a failover (``switch``).
    """
    hostname = str(client.hostname or "")
    if "://" in hostname:
        return hostname if hostname.startswith("pgtruth") else f"pgtruth+{hostname}"
    user = quote(client.userid, safe="") if client.userid else ""
    password = client.password() if callable(client.password) else client.password
    secret = f":{quote(password, safe='')}" if password else ""
    port = f":{client.port}" if client.port else ""
    database = quote((client.virtual_host or "").lstrip("/"), safe="?=&/,")
    return f"pgtruth://{user}{secret}{'@' if user else ''}{hostname}{port}/{database}"
