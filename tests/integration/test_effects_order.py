"""Effects whose order matters: a late call never overtakes a newer one (ADR-007, the late-worker ordering boundary)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgtruth_transport import effects
from pgtruth_transport.effects.kinds import Effect
from pgtruth_transport.settings import Settings
from tests.support_effects import (
    GatewayProcess,
    Recipient,
    attempt_at,
    hold,
    running_gateway,
    states,
)


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    """The gateway as a process; ``tasks.payments`` talks to it."""
    with running_gateway(tmp_path) as process:
        monkeypatch.setenv("GATEWAY_URL", process.url)
        monkeypatch.setenv("GATEWAY_TIMEOUT", "2")
        yield process


def test_late_worker_ordering_boundary_with_a_fence(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, eventually: Any
) -> None:
    """The first word about an order is on its way when the second is said; it never overtakes it."""
    from tasks import payments

    def say(status: str, job: str) -> Any:
        payload = {"order_id": "7", "status": status}
        return attempt_at(payments.shipping, hold(conn, settings, job), f"shipping:7:{status}", payload)

    gateway.behave("held", key="shipping:7:packed")
    with pytest.raises(effects.EffectUnknown):
        say("packed", "a")
    say("sent", "b")
    say("packed", "a")  # the fence that came with the question shuts the held call out; this one is fresh
    gateway.ask("POST", "/admin/release", {})
    eventually(lambda: gateway.ask("GET", "/admin/requests")["released"] == 1)
    acts = gateway.acts()
    assert [act["key"] for act in acts] == ["shipping:7:sent", "shipping:7:packed"]
    assert [act["fence"] for act in acts] == sorted(act["fence"] for act in acts)


def test_late_worker_ordering_boundary_with_a_tombstone(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, eventually: Any
) -> None:
    """Nothing begins on a resource while an earlier effect there is open; a tombstone ends that one first."""
    from tasks import payments

    kind = effects.declare("tests.ordered", fields=("order_id", "status"), order_by="order_id", tombstone=payments.bury)

    def say(status: str, job: str) -> Any:
        return attempt_at(kind, hold(conn, settings, job), f"say:{status}", {"order_id": "7", "status": status})

    gateway.behave("hang", key="say:packed")
    with pytest.raises(effects.EffectUnknown):
        say("packed", "a")
    say("sent", "b")  # settles the first one by asking for a tombstone: it has acted
    assert states(conn) == {"say:packed": "applied", "say:sent": "applied"}
    gateway.behave("down", key="say:returned")
    with pytest.raises(effects.EffectUnknown):
        say("returned", "c")
    say("refunded", "d")  # the one before was never done and never will be
    assert states(conn)["say:returned"] == "no_effect"
    assert gateway.ask("PUT", "/tombstones", {"key": "say:returned", "number": 1}) == {"buried": 1}
    assert [act["key"] for act in gateway.acts()] == ["say:packed", "say:sent", "say:refunded"]


def test_an_ordered_effect_waits_for_a_live_one_on_its_resource(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    recipient = Recipient("tombstone")
    kind = effects.declare("tests.live", fields=("r", "n"), order_by="r", tombstone=recipient.bury)

    def call(effect: Effect) -> str:
        with pytest.raises(effects.EffectWaiting, match="same resource"):
            attempt_at(kind, hold(conn, settings, "b"), "second", {"r": 1, "n": 2}, call)
        assert attempt_at(kind, hold(conn, settings, "c"), "elsewhere", {"r": 2, "n": 1}, lambda e: "yes") == "yes"
        return "first"

    assert attempt_at(kind, hold(conn, settings, "a"), "first", {"r": 1, "n": 1}, call) == "first"
    assert attempt_at(kind, hold(conn, settings, "b"), "second", {"r": 1, "n": 2}, lambda e: "second") == "second"


def test_fences_rise_under_many_writers(conn: psycopg.Connection[Any], settings: Settings) -> None:
    kind = effects.declare("tests.fences", fields=("r", "n"), order_by="r", fence=True)
    fences: list[int] = []
    lock = threading.Lock()

    def call(effect: Effect) -> None:
        with lock:
            assert effect.fence is not None
            fences.append(effect.fence)

    def work(writer: int) -> None:
        for number in range(25):
            kind.apply(f"f-{writer}-{number}", {"r": "same", "n": [writer, number]}, call, settings=settings)

    threads = [threading.Thread(target=work, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(fences) == len(set(fences)) == 100
