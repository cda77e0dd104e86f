"""Effects against a gateway that misbehaves: unknown results, crashes, duplicates, conflicts, stale attempts."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from celery.exceptions import Ignore
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport import effects
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, ledger, reconciling
from pgtruth_transport.effects.kinds import Effect, Kind
from pgtruth_transport.effects.states import EffectState
from pgtruth_transport.settings import Settings
from pgtruth_transport.states import Outcome
from tests.support import ROOT
from tests.support_effects import (
    ORDER,
    GatewayProcess,
    attempt_at,
    hold,
    let_go,
    running_gateway,
    states,
    unknown,
)
from tests.support_proxy import Proxy


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    """The gateway as a process; ``tasks.payments`` talks to it."""
    with running_gateway(tmp_path) as process:
        monkeypatch.setenv("GATEWAY_URL", process.url)
        monkeypatch.setenv("GATEWAY_TIMEOUT", "2")
        yield process


@pytest.fixture
def charge() -> Kind:
    """The example's charge, without a tombstone: what a look-up alone can do."""
    from tasks import payments

    return effects.declare(
        "tests.charge", fields=("order_id", "cents", "currency"), reconcile=payments.look_up, in_flight=0
    )


@pytest.mark.parametrize("found", [True, False])
def test_unknown_downstream_result_is_asked_about_and_never_sent_again(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, found: bool
) -> None:
    """E01: the gateway takes the charge and never answers; while it cannot be asked, nobody sends."""
    from tasks import payments

    reachable = False

    def reconcile(effect: Effect) -> Any:
        return payments.look_up(effect) if reachable else effects.STILL_UNKNOWN

    kind = effects.declare("tests.mail", fields=("order_id", "cents", "currency"), reconcile=reconcile, in_flight=0)
    gateway.behave("hang" if found else "down")
    for number in range(3):
        with pytest.raises(effects.EffectUnknown) as caught:
            attempt_at(kind, hold(conn, settings, "job"))
        assert isinstance(caught.value, Ignore)
        assert states(conn) == {"charge:7": "unknown"}, f"after attempt {number + 1}"
        let_go(conn, "job")
    assert gateway.calls("charge:7") == 1
    reachable = True
    receipt = attempt_at(kind, hold(conn, settings, "job"))
    assert states(conn) == {"charge:7": "applied"}
    assert [act["receipt"] for act in gateway.acts()] == [receipt["receipt"]]
    assert gateway.calls("charge:7") == (1 if found else 2)
    assert attempt_at(kind, hold(conn, settings, "job")) == receipt
    assert len(gateway.acts()) == 1


@pytest.mark.parametrize(("behaviour", "acted"), [("hang", 1), ("reset", 1), ("late", 1), ("error", 0), ("down", 0)])
def test_everything_but_an_answer_or_a_refusal_is_unknown(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, charge: Kind, behaviour: str,
    acted: int, eventually: Any,
) -> None:  # fmt: skip
    gateway.behave(behaviour)
    with pytest.raises(effects.EffectUnknown):
        attempt_at(charge, hold(conn, settings, "job"))
    assert states(conn) == {"charge:7": "unknown"}
    eventually(lambda: len(gateway.acts()) == acted)


def test_a_definite_refusal_is_no_effect_and_allows_a_fresh_call(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess
) -> None:
    """The tombstone for the refused call is written before the fresh one is made."""
    from tasks import payments

    gateway.behave("refuse")
    with pytest.raises(effects.NoEffect, match="402") as caught:
        attempt_at(payments.charge, hold(conn, settings, "job"))
    assert caught.value.key == "charge:7"
    assert states(conn) == {"charge:7": "no_effect"}
    receipt = attempt_at(payments.charge, hold(conn, settings, "job"))
    assert [act["receipt"] for act in gateway.acts()] == [receipt["receipt"]]
    with pytest.raises(effects.NoEffect, match="410"):  # a copy of the refused call, arriving late
        payments._send(Effect("charge:7", "charge", ORDER, 1))
    assert len(gateway.acts()) == 1


@pytest.mark.parametrize("answer", [effects.STILL_UNKNOWN, effects.Applied({"r": 1}), RuntimeError("down")])
def test_no_fresh_call_without_a_confirmed_tombstone(
    conn: psycopg.Connection[Any], settings: Settings, answer: Any
) -> None:
    def tombstone(effect: Effect) -> Any:
        assert effect.number == 1
        if isinstance(answer, Exception):
            raise answer
        return answer

    kind = effects.declare("tests.unconfirmed", fields=("n",), tombstone=tombstone)

    def refuses(effect: Effect) -> None:
        raise effects.NoEffect("no")

    with pytest.raises(effects.NoEffect):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, refuses)
    if isinstance(answer, effects.Applied):
        fresh = attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, lambda effect: pytest.fail("called"))
        assert fresh == {"r": 1}
        return
    with pytest.raises(effects.EffectWaiting, match="not confirmed"):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, lambda effect: pytest.fail("called"))
    assert states(conn) == {"k": "unknown"}


def test_not_found_is_not_believed_while_a_request_may_be_on_its_way(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.slow", fields=("n",), reconcile=lambda effect: effects.NO_EFFECT, in_flight=3600)
    unknown(conn, settings, kind, "slow", {"n": 1})
    with pytest.raises(effects.EffectUnknown, match="on its way"):
        attempt_at(kind, hold(conn, settings, "job"), "slow", {"n": 1}, lambda effect: pytest.fail("called"))
    conn.execute("UPDATE pgtruth.effects SET unknown_since = unknown_since - interval '2 hours'")
    assert attempt_at(kind, hold(conn, settings, "job"), "slow", {"n": 1}, lambda effect: effect.number) == 2


def test_a_job_waits_without_spending_retries_and_gives_up_in_the_end(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.never", fields=("n",), give_up_after=3600)
    unknown(conn, settings, kind, "never", {"n": 1})
    attempt = hold(conn, settings, "job")
    with pytest.raises(effects.EffectWaiting, match="a person has to say"):
        attempt_at(kind, attempt, "never", {"n": 1})
    assert attempt.requeue is not None
    assert attempt.requeue.outcome is Outcome.RELEASED
    assert attempt.requeue.retry_count is None
    assert 0.5 < (attempt.requeue.delay or 0) < 2
    assert "never" in (attempt.requeue.error or "")
    conn.execute("UPDATE pgtruth.effects SET unknown_since = unknown_since - interval '50 minutes'")
    attempt = hold(conn, settings, "job")
    with pytest.raises(effects.EffectWaiting):
        attempt_at(kind, attempt, "never", {"n": 1})
    assert attempt.requeue is not None
    assert 40 < (attempt.requeue.delay or 0) < 80  # its waits have grown to a minute
    conn.execute("UPDATE pgtruth.effects SET unknown_since = unknown_since - interval '11 minutes'")
    attempt = hold(conn, settings, "job")
    with pytest.raises(effects.EffectGivenUp, match="effects show never") as caught:
        attempt_at(kind, attempt, "never", {"n": 1})
    assert not isinstance(caught.value, Ignore)
    assert attempt.requeue is None
    assert [row.key for row in book.listed(Database.of(settings), [EffectState.UNKNOWN])] == ["never"]


CRASH = """
import os, sys
from pgtruth_transport import effects
from pgtruth_transport.attempts import Attempt, running
from pgtruth_transport.effects.ledger import Ledger
from pgtruth_transport.jobs import Lease
from pgtruth_transport.settings import Settings
from tasks import payments

url, point, job, version, owner = sys.argv[1:]

def crashing(name):
    real = getattr(Ledger, name)
    def method(self, *args, **kwargs):
        if point == f"before {name}":
            os._exit(9)
        given = real(self, *args, **kwargs)
        if point == f"after {name}":
            os._exit(9)
        return given
    setattr(Ledger, name, method)

crashing("begin")
crashing("finish")

def call(effect):
    if point == "before call":
        os._exit(9)
    answer = payments._send(effect)
    if point == "after call":
        os._exit(9)
    return answer

with running(Attempt(Lease(job, int(version), owner, ""), Settings.make(url))):
    payments.charge.apply("charge:7", {"order_id": "7", "cents": 1000, "currency": "EUR"}, call)
"""


@pytest.mark.parametrize(
    ("point", "calls"),
    [("before begin", 0), ("after begin", 0), ("before call", 0), ("after call", 1), ("before finish", 1),
     ("after finish", 1)],
)  # fmt: skip
def test_crash_recovery_after_a_real_exit_between_two_steps(
    conn: psycopg.Connection[Any],
    settings: Settings,
    database_url: str,
    gateway: GatewayProcess,
    point: str,
    calls: int,
) -> None:
    """E02: the process ends there; the next attempt finds out, and the gateway has charged once."""
    from tasks import payments

    dead = hold(conn, settings, "job")
    command = [sys.executable, "-c", CRASH, database_url, point, "job", str(dead.lease_version), dead.owned_by]
    assert subprocess.run(command, cwd=ROOT, timeout=60, check=False).returncode == 9
    assert gateway.calls("charge:7") == calls
    if point not in ("before begin", "after finish"):
        assert states(conn) == {"charge:7": "started"}
        with pytest.raises(effects.EffectUnknown, match="live attempt"):  # its lease is not over yet
            attempt_at(payments.charge, hold(conn, settings, "another job"))
    receipt = attempt_at(payments.charge, hold(conn, settings, "job"))
    assert [act["receipt"] for act in gateway.acts()] == [receipt["receipt"]]
    assert states(conn) == {"charge:7": "applied"}
    moves = [(move.from_state, move.to_state) for move in book.history(Database.of(settings), "charge:7")]
    if point in ("after call", "before finish"):
        assert moves == [(None, "started"), ("started", "unknown"), ("unknown", "applied")]


def test_the_database_is_cut_off_between_the_answer_and_the_record(
    conn: psycopg.Connection[Any], settings: Settings, database_url: str, gateway: GatewayProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """E02: the answer cannot be written down; the effect is found as unknown and asked about."""
    from tasks import payments

    monkeypatch.setattr(ledger, "PATIENCE", 0.3)
    target = conninfo_to_dict(settings.conninfo)
    host = str(target.get("host") or "127.0.0.1")
    with Proxy(host, int(target.get("port") or 5432)) as proxy:
        url = _through(database_url, proxy)
        attempt = Attempt(hold(conn, settings, "job").lease, Settings.make(url))

        def call(effect: Effect) -> Any:
            answer = payments._send(effect)
            proxy.refuse()
            return answer

        with pytest.raises(effects.EffectWaiting, match="could not be told"):
            attempt_at(payments.charge, attempt, call=call)
    assert states(conn) == {"charge:7": "started"}
    receipt = attempt_at(payments.charge, hold(conn, settings, "job"))
    assert [act["receipt"] for act in gateway.acts()] == [receipt["receipt"]]
    assert gateway.calls("charge:7") == 1


def test_a_connection_lost_while_recording_is_no_loss(
    conn: psycopg.Connection[Any], settings: Settings, database_url: str, gateway: GatewayProcess
) -> None:
    """The answer in hand is offered again; whether the first try was committed does not matter."""
    from tasks import payments

    def call(effect: Effect) -> Any:
        answer = payments._send(effect)
        conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        return answer

    receipt = attempt_at(payments.charge, hold(conn, settings, "job"), call=call)
    assert [act["receipt"] for act in gateway.acts()] == [receipt["receipt"]]
    assert states(conn) == {"charge:7": "applied"}


def _through(url: str, proxy: Proxy) -> str:
    """The same database, by way of the proxy."""
    parts = urlsplit(url)
    user = f"{parts.username or 'postgres'}:{parts.password}@" if parts.password else f"{parts.username or 'postgres'}@"
    return f"pgtruth://{user}{proxy.host}:{proxy.port}{parts.path}"


def test_duplicate_delivery_makes_one_call(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, charge: Kind
) -> None:
    """Two jobs about one order: the second is given the stored receipt."""
    first = attempt_at(charge, hold(conn, settings, "job"))
    assert attempt_at(charge, hold(conn, settings, "its copy")) == first
    assert gateway.calls("charge:7") == 1


def test_same_key_with_other_content_is_refused_in_every_state(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, charge: Kind
) -> None:
    """E04: first unknown, then applied; no second call, both fingerprints on record."""
    other = {**ORDER, "cents": 1200}
    gateway.behave("hang")
    with pytest.raises(effects.EffectUnknown):
        attempt_at(charge, hold(conn, settings, "job"))
    for state in ("unknown", "applied"):
        with pytest.raises(effects.EffectConflict) as caught:
            attempt_at(charge, hold(conn, settings, "other"), payload=other)
        assert caught.value.stored == charge.request("charge:7", ORDER).fingerprint
        assert caught.value.offered == charge.request("charge:7", other).fingerprint
        assert "1200" not in str(caught.value)
        assert states(conn) == {"charge:7": state}
        if state == "unknown":
            attempt_at(charge, hold(conn, settings, "job"))
    assert gateway.calls("charge:7") == 1
    conflicts = [move for move in book.history(Database.of(settings), "charge:7") if "conflict" in move.why]
    assert len(conflicts) == 2
    assert {move.fingerprint for move in conflicts} == {caught.value.offered}
    assert all(caught.value.stored in move.why for move in conflicts)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.key, again.stored, str(again)) == ("charge:7", caught.value.stored, str(caught.value))


def test_conflicts_while_started_and_after_no_effect_and_over_kinds(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    one = effects.declare("tests.one", fields=("n",))
    two = effects.declare("tests.two", fields=("n",))
    seen: list[str] = []

    def call(effect: Effect) -> None:
        with pytest.raises(effects.EffectConflict):
            attempt_at(one, hold(conn, settings, "other"), "k", {"n": 2}, call)
        seen.append("started")
        raise effects.NoEffect("no")

    with pytest.raises(effects.NoEffect):
        attempt_at(one, hold(conn, settings, "job"), "k", {"n": 1}, call)
    assert seen == ["started"]
    with pytest.raises(effects.EffectConflict, match="other content"):
        attempt_at(one, hold(conn, settings, "other"), "k", {"n": 2}, call)
    with pytest.raises(effects.EffectConflict, match=r"already a 'tests\.one' effect"):
        attempt_at(two, hold(conn, settings, "other"), "k", {"n": 1}, call)


def test_a_stale_attempt_cannot_begin_an_effect(
    conn: psycopg.Connection[Any], settings: Settings, gateway: GatewayProcess, charge: Kind
) -> None:
    """E06: the lease is gone, by a newer claim, by time, or with the job's end."""
    stale = hold(conn, settings, "job")
    newer = hold(conn, settings, "job")
    with pytest.raises(effects.StaleAttempt):
        attempt_at(charge, stale)
    assert gateway.calls("charge:7") == 0
    assert states(conn) == {}
    attempt_at(charge, newer)
    with pytest.raises(effects.StaleAttempt):
        attempt_at(charge, stale)
    conn.execute("UPDATE pgtruth.jobs SET lease_expires_at = clock_timestamp() - interval '1 ms'")
    with pytest.raises(effects.StaleAttempt):
        attempt_at(charge, newer, "charge:8")
    let_go(conn, "job")
    with pytest.raises(effects.StaleAttempt):
        attempt_at(charge, newer, "charge:9")
    assert gateway.calls("charge:7") == 1


@pytest.mark.parametrize("refused", [False, True])
def test_an_answer_after_the_lease_was_lost_is_unknown_and_kept_as_evidence(
    conn: psycopg.Connection[Any], settings: Settings, refused: bool
) -> None:
    kind = effects.declare("tests.late", fields=("n",), reconcile=lambda effect: effects.Applied())

    def call(effect: Effect) -> Any:
        let_go(conn, "job")
        if refused:
            raise effects.NoEffect("no")
        return {"receipt": "late"}

    with pytest.raises(effects.StaleAttempt):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, call)
    assert states(conn) == {"k": "unknown"}
    assert "the lease was lost" in book.history(Database.of(settings), "k")[-1].why
    expected = None if refused else {"receipt": "late"}
    assert attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}) == expected


def test_an_answer_for_a_call_that_somebody_else_has_settled_is_noted(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.overtaken", fields=("n",), reconcile=lambda effect: effects.Applied("found"))

    def call(effect: Effect) -> Any:
        newer = hold(conn, settings, "job")
        assert attempt_at(kind, newer, "k", {"n": 1}) == "found"
        return "mine"

    with pytest.raises(effects.StaleAttempt):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, call)
    last = book.history(Database.of(settings), "k")[-1]
    assert (last.from_state, last.to_state) == ("applied", "applied")
    assert "late answer" in last.why


def test_a_late_answer_casts_doubt_on_no_effect(conn: psycopg.Connection[Any], settings: Settings) -> None:
    """An attempt was frozen before its call; meanwhile the effect was believed not to have happened."""
    kind = effects.declare("tests.doubt", fields=("n",), reconcile=lambda effect: effects.NO_EFFECT, in_flight=0)
    database = Database.of(settings)

    def call(effect: Effect) -> Any:
        let_go(conn, "job")
        assert isinstance(reconciling.reconcile(database, "k", "ann"), effects.NotApplied)
        assert states(conn) == {"k": "no_effect"}
        return {"receipt": "late"}

    with pytest.raises(effects.StaleAttempt):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, call)
    assert states(conn) == {"k": "unknown"}
    assert reconciling.resolve(database, "k", EffectState.APPLIED, who="ann", why="it is there")
    assert attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}) == {"receipt": "late"}
