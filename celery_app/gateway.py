"""A payment and shipping gateway that misbehaves on request: what the effect ledger is shown and tested against.

    python -m celery_app.gateway --port 8555 --db var/gateway.sqlite

It keeps what it did in a SQLite file, one row for each time it acted, so that "once" can be counted at the recipient
and not only in our own tables. Unless it is started with ``--once-per-key`` it acts as often as it is asked.

    POST /acts            {"key", "number", …}    act once; optionally with "resource" and "fence", which must rise
    GET  /acts/KEY        what became of a key; with ?resource=R&fence=N it refuses lower numbers from then on
    PUT  /tombstones      {"key", "number"}       never act on that call or an earlier one; or say that it has acted
    GET  /acts            everything that it did
    POST /admin/behave    {"behaviours": ["hang", …], "key": "…"}  how to treat the next POSTs (of that key)
    POST /admin/release   what is held is acted on now
    GET  /admin/requests  how many POSTs arrived, by key

Behaviours: ``ok``; ``hang`` acts and never answers; ``reset`` acts and cuts the line; ``late`` lets the client give up,
then acts; ``held`` acts when released; ``refuse`` does nothing and says so (402); ``error`` does nothing and says 500;
``down`` does nothing and cuts the line.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import threading
import uuid
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

BEHAVIOURS = ("ok", "hang", "reset", "late", "held", "refuse", "error", "down")
TABLES = """
CREATE TABLE IF NOT EXISTS acts (receipt TEXT PRIMARY KEY, key TEXT, number INT, resource TEXT, fence INT, body TEXT,
    at TEXT DEFAULT CURRENT_TIMESTAMP);
CREATE INDEX IF NOT EXISTS acts_key ON acts (key);
CREATE TABLE IF NOT EXISTS tombstones (key TEXT PRIMARY KEY, number INT);
CREATE TABLE IF NOT EXISTS fences (resource TEXT PRIMARY KEY, last INT);
"""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer: an HTTP status and a body."""

    status: int
    body: Any


class Book:
    """What the gateway did, kept in SQLite; every method is one transaction."""

    def __init__(self, path: str, once_per_key: bool = False) -> None:
        self._once_per_key = once_per_key
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, check_same_thread=False)
        self._db.row_factory = sqlite3.Row
        self._db.executescript(TABLES)

    def act(self, asked: dict[str, Any]) -> Said:
        """Do what was asked, unless a tombstone or a higher fence forbids it."""
        key, number = str(asked.get("key") or ""), int(asked.get("number") or 1)
        resource, fence = asked.get("resource"), asked.get("fence")
        if not key:
            return Said(400, {"error": "a key is needed"})
        with self._lock, self._db:
            if self._once_per_key and (known := self._receipt(key)):
                return Said(200, known)
            buried = self._db.execute("SELECT number FROM tombstones WHERE key = ?", (key,)).fetchone()
            if buried and number <= buried["number"]:
                return Said(410, {"error": "a tombstone forbids this call"})
            if resource is not None and fence is not None and not self._raise_fence(resource, fence, by_call=True):
                return Said(409, {"error": "a higher fence has been seen for this resource"})
            receipt = uuid.uuid4().hex
            self._db.execute(
                "INSERT INTO acts (receipt, key, number, resource, fence, body) VALUES (?, ?, ?, ?, ?, ?)",
                (receipt, key, number, resource, fence, json.dumps(asked, sort_keys=True)),
            )
            return Said(200, {"receipt": receipt, "key": key})

    def look_up(self, key: str, resource: str | None, fence: int | None) -> Said:
        """What became of a key; a fence that comes with the question shuts out lower ones from now on."""
        with self._lock, self._db:
            if resource is not None and fence is not None:
                self._raise_fence(resource, fence, by_call=False)
            found = self._receipt(key)
        return Said(200, found) if found else Said(404, {"error": "nothing was done under this key"})

    def bury(self, asked: dict[str, Any]) -> Said:
        """Promise never to act on this call or an earlier one, or say that one of them has acted."""
        key, number = str(asked["key"]), int(asked["number"])
        with self._lock, self._db:
            if found := self._receipt(key):
                return Said(200, {"applied": found})
            self._db.execute(
                "INSERT INTO tombstones VALUES (?, ?)"
                " ON CONFLICT (key) DO UPDATE SET number = max(number, excluded.number)",
                (key, number),
            )
            return Said(200, {"buried": number})

    def acts(self) -> list[dict[str, Any]]:
        """Everything that the gateway did, in order."""
        with self._lock:
            return [dict(row) for row in self._db.execute("SELECT * FROM acts ORDER BY rowid")]

    def _receipt(self, key: str) -> dict[str, Any] | None:
        row = self._db.execute("SELECT receipt, key FROM acts WHERE key = ? ORDER BY rowid", (key,)).fetchone()
        return dict(row) if row else None

    def _raise_fence(self, resource: str, fence: int, *, by_call: bool) -> bool:
        last = self._db.execute("SELECT last FROM fences WHERE resource = ?", (resource,)).fetchone()
        if last and (fence < last["last"] or (by_call and fence == last["last"])):
            return False
        self._db.execute(
            "INSERT INTO fences VALUES (?, ?) ON CONFLICT (resource) DO UPDATE SET last = excluded.last",
            (resource, fence),
        )
        return True


class Gateway(ThreadingHTTPServer):
    """The server; ``stop`` lets go of every request that hangs."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], book: Book, patience: float = 30.0) -> None:
        super().__init__(address, Handler)
        self.book = book
        self.patience = patience  # seconds that "hang" holds the line, and at most the seconds that "late" waits
        self.stopping = threading.Event()
        self.released = threading.Event()
        self.requests: Counter[str] = Counter()
        self._next: defaultdict[str, deque[str]] = defaultdict(deque)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def behave(self, behaviours: list[str], key: str = "*") -> None:
        """Treat the next POSTs (of ``key``) like this, in order."""
        with self._lock:
            self._next[key].extend(behaviours)

    def next_behaviour(self, key: str) -> str:
        """How to treat the POST that has just arrived."""
        with self._lock:
            self.requests[key] += 1
            for name in (key, "*"):
                if self._next[name]:
                    return self._next[name].popleft()
        return "ok"

    def stop(self) -> None:
        """Stop serving and let go of what hangs."""
        self.stopping.set()
        self.released.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Gateway
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path == "/acts":
            self._say(Said(200, self.server.book.acts()))
        elif url.path.startswith("/acts/"):
            fence = int(query["fence"]) if "fence" in query else None
            self._say(self.server.book.look_up(unquote(url.path[len("/acts/") :]), query.get("resource"), fence))
        elif url.path == "/admin/requests":
            self._say(Said(200, dict(self.server.requests)))
        else:
            self._say(Said(404, {"error": "no such page"}))

    def do_PUT(self) -> None:
        asked = self._read()
        self._say(self.server.book.bury(asked) if self.path == "/tombstones" else Said(404, {"error": "no such page"}))

    def do_POST(self) -> None:
        asked = self._read()
        if self.path == "/admin/behave":
            unknown = set(asked["behaviours"]) - set(BEHAVIOURS)
            if unknown:
                self._say(Said(400, {"error": f"unknown {sorted(unknown)}; known: {BEHAVIOURS}"}))
                return
            self.server.behave(asked["behaviours"], asked.get("key", "*"))
            self._say(Said(200, {}))
        elif self.path == "/admin/release":
            self.server.released.set()
            self._say(Said(200, {}))
        elif self.path == "/acts":
            self._act(asked)
        else:
            self._say(Said(404, {"error": "no such page"}))

    def _act(self, asked: dict[str, Any]) -> None:
        server = self.server
        match server.next_behaviour(str(asked.get("key"))):
            case "ok":
                self._say(server.book.act(asked))
            case "hang":
                server.book.act(asked)
                server.stopping.wait(server.patience)
                self._cut()
            case "reset":
                server.book.act(asked)
                self._cut()
            case "late":
                self._until_the_client_gave_up()
                server.book.act(asked)
                self._cut()
            case "held":
                server.released.wait(server.patience)
                server.book.act(asked)
                server.requests["released"] += 1
                self._cut()
            case "refuse":
                self._say(Said(402, {"error": "refused"}))
            case "error":
                self._say(Said(500, {"error": "internal error"}))
            case _:
                self._cut()

    def _until_the_client_gave_up(self) -> None:
        """Wait for the other side to close the line, as a client does that has timed out or been killed."""
        self.connection.settimeout(self.server.patience)
        try:
            while self.connection.recv(1024):
                pass
        except OSError:
            pass

    def _cut(self) -> None:
        self.close_connection = True

    def _read(self) -> dict[str, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        asked: dict[str, Any] = json.loads(self.rfile.read(length) or b"{}")
        return asked

    def _say(self, said: Said) -> None:
        body = json.dumps(said.body).encode()
        self.send_response(said.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: what it did is in its tables."""


def main(argv: list[str] | None = None) -> None:
    """Serve until killed; what was done so far is in the file."""
    parser = argparse.ArgumentParser(prog="python -m celery_app.gateway", description=__doc__.partition("\n")[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8555)
    parser.add_argument("--db", type=Path, default=Path("gateway.sqlite"))
    parser.add_argument("--once-per-key", action="store_true", help="act at most once per key, as some providers do")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds that a hanging request is held")
    given = parser.parse_args(argv)
    given.db.parent.mkdir(parents=True, exist_ok=True)
    server = Gateway((given.host, given.port), Book(str(given.db), given.once_per_key), given.patience)
    print(f"gateway at {server.url}, what it does is in {given.db}", flush=True)
    try:
        server.serve_forever(poll_interval=0.1)
    except KeyboardInterrupt:
        server.stopping.set()


if __name__ == "__main__":
    main()
