"""What the tests of effects share: attempts without a worker, and recipients that count what they really did."""

from __future__ import annotations

import itertools
import json
import signal
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgtruth_transport import attempts, effects
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.effects.kinds import Effect, Kind
from pgtruth_transport.jobs import Lease
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.processes import ServerProcess, free_port
from tasks import payments
from tests.support import ROOT

ORDER = {"order_id": "7", "cents": 1000, "currency": "EUR"}
HOLD = """
INSERT INTO pgtruth.jobs AS j (id, status, task, queue, owned_by, lease_expires_at, lease_version, claimed_at)
VALUES (%(id)s, 'processing', 'tests.effect', 'tests', %(owner)s, clock_timestamp() + %(seconds)s * interval '1 second',
    1, clock_timestamp())
ON CONFLICT (id) DO UPDATE SET lease_version = j.lease_version + 1, status = 'processing', owned_by = excluded.owned_by,
    lease_expires_at = excluded.lease_expires_at
RETURNING lease_version, claimed_at::text
"""
_owners = itertools.count(1)


def hold(conn: psycopg.Connection[Any], settings: Settings, job_id: str, seconds: float = 60.0) -> Attempt:
    """Claim a job as a worker does, taking it from whoever holds it; the new attempt."""
    owner = f"owner-{next(_owners)}"
    found = conn.execute(HOLD, {"id": job_id, "owner": owner, "seconds": seconds}).fetchone()
    assert found is not None
    return Attempt(Lease(job_id, found[0], owner, found[1]), settings)


def let_go(conn: psycopg.Connection[Any], job_id: str) -> None:
    """The lease ends, as after a crash and a sweep."""
    conn.execute(
        "UPDATE pgtruth.jobs SET status = 'queued', owned_by = NULL, lease_expires_at = NULL, claimed_at = NULL,"
        " lease_version = lease_version + 1 WHERE id = %s",
        (job_id,),
    )


def states(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """Every effect's state."""
    return dict(conn.execute("SELECT key, state FROM pgtruth.effects").fetchall())


class GatewayProcess:
    """``celery_app.gateway`` as a process of its own: what it says it did, and how it is told to misbehave."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder, self._arguments = folder, arguments
        self._process: ServerProcess | None = None

    def start(self) -> GatewayProcess:
        """Start it, on what it did before."""
        command = [sys.executable, str(ROOT / "celery_app" / "gateway.py"), "--port", str(self.port)]
        command += ["--db", str(self._folder / "gateway.sqlite"), *self._arguments]
        self._process = ServerProcess(command, self._folder / "gateway.log", cwd=self._folder)
        self._process.wait_until(lambda: "gateway at" in (self._folder / "gateway.log").read_text(), 15)
        return self

    def stop(self) -> None:
        """It is down."""
        if self._process is not None:
            self._process.end(signal.SIGKILL)

    def behave(self, *behaviours: str, key: str = "*") -> None:
        """How to treat the next calls."""
        self.ask("POST", "/admin/behave", {"behaviours": behaviours, "key": key})

    def acts(self, key: str | None = None) -> list[dict[str, Any]]:
        """What it did, in order."""
        acts: list[dict[str, Any]] = self.ask("GET", "/acts")
        return [act for act in acts if key is None or act["key"] == key]

    def calls(self, key: str) -> int:
        """How often it was asked to act."""
        return int(self.ask("GET", "/admin/requests").get(key, 0))

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)


@dataclass(slots=True)
class Recipient:
    """The other side, in this process: what it did stands in ``acts``, in order.

    ``guard`` is what it offers: ``lookup`` acts as often as it is asked; ``once`` acts once per key; ``tombstone`` can
    be told never to act; ``fence`` refuses numbers that do not rise.
    """

    guard: str
    acts: list[tuple[str, int]] = field(default_factory=list)
    in_flight: list[Effect] = field(default_factory=list)
    buried: dict[str, int] = field(default_factory=dict)
    last: dict[str | None, int] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def receive(self, effect: Effect) -> dict[str, Any]:
        """Act, or raise ``NoEffect``."""
        with self.lock:
            if self.guard == "once" and self._acted(effect.key):
                return {"receipt": effect.key}
            if effect.number <= self.buried.get(effect.key, 0):
                raise effects.NoEffect("buried")
            if self.guard == "fence":
                assert effect.fence is not None
                if effect.fence <= self.last.get(effect.resource, 0):
                    raise effects.NoEffect("overtaken")
                self.last[effect.resource] = effect.fence
            self.acts.append((effect.key, effect.number))
            return {"receipt": effect.key}

    def deliver(self) -> None:
        """What was on its way arrives."""
        arrived, self.in_flight = self.in_flight, []
        for effect in arrived:
            with suppress(effects.NoEffect):
                self.receive(effect)

    def look_up(self, effect: Effect) -> Any:
        """A reconciler."""
        with self.lock:
            if self.guard == "fence":
                assert effect.fence is not None
                self.last[effect.resource] = max(self.last.get(effect.resource, 0), effect.fence)
            return effects.Applied({"receipt": effect.key}) if self._acted(effect.key) else effects.NO_EFFECT

    def bury(self, effect: Effect) -> Any:
        """A tombstone operation."""
        with self.lock:
            if self._acted(effect.key):
                return effects.Applied({"receipt": effect.key})
            self.buried[effect.key] = max(effect.number, self.buried.get(effect.key, 0))
            return effects.NO_EFFECT

    def count(self, key: str) -> int:
        """How often it really acted for ``key``."""
        return sum(1 for acted, _ in self.acts if acted == key)

    def _acted(self, key: str) -> bool:
        return any(acted == key for acted, _ in self.acts)


def kind_for(
    recipient: Recipient, name: str, ask: Callable[[Callable[[Effect], Any], Effect], Any], *, ordered: bool
) -> Kind:
    """The declaration that suits a recipient; every question goes through ``ask``."""

    def reconcile(effect: Effect) -> Any:
        return ask(recipient.look_up, effect)

    def tombstone(effect: Effect) -> Any:
        return ask(recipient.bury, effect)

    return effects.declare(
        name,
        fields=("order", "amount"),
        reconcile=reconcile,
        tombstone=tombstone if recipient.guard == "tombstone" else None,
        order_by="order" if ordered else None,
        fence=ordered and recipient.guard == "fence",
        in_flight=0 if recipient.guard in ("tombstone", "fence") else 3600,
        outside_lease=60,
    )


def attempt_at(kind: Kind, attempt: Attempt, key: str = "charge:7", payload: Any = None, call: Any = None) -> Any:
    """What one attempt's body does."""
    with attempts.running(attempt):
        return kind.apply(key, ORDER if payload is None else payload, call or payments._send)


def unknown(conn: psycopg.Connection[Any], settings: Settings, kind: Kind, key: str, payload: Any = None) -> None:
    """An effect that nobody knows about."""

    def fails(effect: Effect) -> None:
        raise TimeoutError("no answer")

    with pytest.raises(effects.EffectUnknown):
        attempt_at(kind, hold(conn, settings, f"job of {key}"), key, payload, fails)
    let_go(conn, f"job of {key}")
    assert states(conn)[key] == "unknown"


@contextmanager
def running_gateway(folder: Path) -> Iterator[GatewayProcess]:
    """The gateway process, for as long as the block lasts."""
    process = GatewayProcess(folder).start()
    try:
        yield process
    finally:
        process.stop()
