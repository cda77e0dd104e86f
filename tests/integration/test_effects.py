"""The effect ledger against a real PostgreSQL and the misbehaving gateway (ADR-007's list of confirmations)."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from celery import Celery
from celery.exceptions import Ignore
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport import attempts, effects
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, codec, commands, flow, kinds, ledger, reconciling, tasks
from pgtruth_transport.effects.kinds import Effect, Kind
from pgtruth_transport.effects.states import MOVES, EffectState
from pgtruth_transport.settings import Settings
from pgtruth_transport.states import Outcome
from tests.support import ROOT
from tests.support_effects import GatewayProcess, Recipient, hold, let_go, states
from tests.support_proxy import Proxy

ORDER = {"order_id": "7", "cents": 1000, "currency": "EUR"}


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GatewayProcess]:
    """The gateway as a process; ``tasks.payments`` talks to it and is quick to give up."""
    process = GatewayProcess(tmp_path).start()
    monkeypatch.setenv("GATEWAY_URL", process.url)
    monkeypatch.setenv("GATEWAY_TIMEOUT", "2")
    yield process
    process.stop()


@pytest.fixture
def charge() -> Kind:
    """The example's charge, without a tombstone: what a look-up alone can do."""
    from tasks import payments

    return effects.declare(
        "tests.charge", fields=("order_id", "cents", "currency"), reconcile=payments.look_up, in_flight=0
    )


def attempt_at(kind: Kind, attempt: Attempt, key: str = "charge:7", payload: Any = None, call: Any = None) -> Any:
    """What one attempt's body does."""
    from tasks import payments

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


# Unknown downstream results.


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


# Crash recovery.

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


# Duplicate delivery, conflicts, and attempts that are too late.


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


# Order.


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


# The ledger itself.


def test_the_database_refuses_every_other_move(conn: psycopg.Connection[Any], settings: Settings) -> None:
    for old, new in product(EffectState, EffectState):
        key = f"{old} to {new}"
        _make(conn, old, key)
        if (old, new) == (EffectState.NO_EFFECT, EffectState.STARTED):
            _change(conn, key, "calls = calls + 1, token = 'new', state = 'started'")
            continue
        since = "clock_timestamp()" if new is EffectState.UNKNOWN else "NULL"
        change = f"state = '{new}', unknown_since = {since}, moved_by = 'me'"
        if new in MOVES[old] or new is old:
            _change(conn, key, change)
            last = book.history(Database.of(settings), key)[-1]
            assert (last.to_state == new and last.who == "me") is (new is not old), key
        else:
            with pytest.raises(psycopg.errors.CheckViolation, match="cannot become"):
                _change(conn, key, change)


def test_what_an_effect_is_never_changes(conn: psycopg.Connection[Any]) -> None:
    _make(conn, EffectState.STARTED, "k")
    for column in ("key", "kind", "fingerprint", "payload", "token"):
        with pytest.raises(psycopg.errors.CheckViolation):
            _change(conn, "k", f"{column} = 'other'")
    for change in ("resource = 'r', fence = 1", "calls = 2"):
        with pytest.raises(psycopg.errors.CheckViolation):
            _change(conn, "k", change)


def _make(conn: psycopg.Connection[Any], state: EffectState, key: str) -> None:
    conn.execute(
        "INSERT INTO pgtruth.effects (key, kind, fingerprint, payload, state, token, owned_by, moved_by, moved_why)"
        " VALUES (%s, 'kind', 'f', '', 'started', 't', 'o', 'o', 'w')",
        (key,),
    )
    if state is not EffectState.STARTED:
        since = "clock_timestamp()" if state is EffectState.UNKNOWN else "NULL"
        _change(conn, key, f"state = '{state}', unknown_since = {since}")


def _change(conn: psycopg.Connection[Any], key: str, change: str) -> None:
    conn.execute(f"UPDATE pgtruth.effects SET {change} WHERE key = %s".encode(), (key,))


def test_an_effect_begins_as_started_and_a_result_is_final(conn: psycopg.Connection[Any]) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match="begins as started"):
        conn.execute(
            "INSERT INTO pgtruth.effects (key, kind, fingerprint, payload, state, token, owned_by, moved_by, moved_why)"
            " VALUES ('k', 'kind', 'f', '', 'applied', 't', 'o', 'o', 'w')"
        )
    _make(conn, EffectState.STARTED, "k")
    conn.execute("UPDATE pgtruth.effects SET state = 'applied', result = '1'")
    with pytest.raises(psycopg.errors.CheckViolation, match="never changes"):
        conn.execute("UPDATE pgtruth.effects SET result = '2'")


def test_the_first_caller_and_every_later_one_get_equal_values(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.values", fields=("n",))
    value = {"a": Decimal("1.50"), "at": datetime(2026, 1, 2, tzinfo=UTC), "t": (1, None), "s": "\x00\ud800é"}
    first = attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, lambda effect: value)
    assert attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, lambda effect: 1 / 0) == first
    assert first == {**value, "t": [1, None]}


def test_a_result_that_is_no_json_is_applied_and_an_error_each_time(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.unreadable", fields=("n",))
    for _ in range(2):
        with pytest.raises(effects.ResultUnreadable):
            attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, lambda effect: object())
    assert states(conn) == {"k": "applied"}


def test_an_exception_text_with_nul_and_surrogates_can_be_stored(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.nul", fields=("n",))

    def call(effect: Effect) -> None:
        raise RuntimeError("a\x00b\ud800" + "x" * 5000)

    with pytest.raises(effects.EffectUnknown):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, call)
    assert states(conn) == {"k": "unknown"}


def test_an_interrupted_call_is_unknown_and_the_interruption_goes_on(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    kind = effects.declare("tests.interrupted", fields=("n",))

    def call(effect: Effect) -> None:
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, call)
    assert states(conn) == {"k": "unknown"}


def test_outside_a_task_the_effect_has_a_lease_of_its_own(conn: psycopg.Connection[Any], settings: Settings) -> None:
    kind = effects.declare(
        "tests.outside", fields=("n",), reconcile=lambda effect: effects.Applied("found"), outside_lease=600
    )

    def call(effect: Effect) -> str:
        with pytest.raises(effects.EffectUnknown, match="live attempt") as caught:
            kind.apply("k", {"n": 1}, call, settings=settings)
        assert not isinstance(caught.value, Ignore)
        conn.execute("UPDATE pgtruth.effects SET lease_expires_at = clock_timestamp()")
        return "mine"

    with pytest.raises(effects.EffectUnknown, match="too late"):
        kind.apply("k", {"n": 1}, call, settings=settings)
    assert states(conn) == {"k": "unknown"}
    assert kind.apply("k", {"n": 1}, call, settings=settings) == "found"


def test_a_lost_answer_to_begin_is_recognised_by_its_token(
    conn: psycopg.Connection[Any], settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = effects.declare("tests.token", fields=("n",))
    real = ledger.Ledger._begin

    def lost(self: Any, *arguments: Any) -> Any:
        real(self, *arguments)
        raise psycopg.OperationalError("the answer to COMMIT was lost")

    monkeypatch.setattr(ledger.Ledger, "_begin", lost)
    assert attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}, lambda effect: effect.number) == 1


def test_with_the_database_down_nothing_is_called(settings: Settings, conn: psycopg.Connection[Any]) -> None:
    kind = effects.declare("tests.down", fields=("n",))
    attempt = hold(conn, settings, "job")
    away = Settings.make("pgtruth://postgres@127.0.0.1:1/none?connect_timeout=1")
    with pytest.raises(psycopg.OperationalError):
        attempt_at(kind, Attempt(attempt.lease, away), "k", {"n": 1}, lambda effect: pytest.fail("called"))


# Reconciling by beat and by hand.


def test_beat_finds_dead_attempts_and_asks_what_is_due(conn: psycopg.Connection[Any], settings: Settings) -> None:
    answers: dict[str, Any] = {"yes": effects.Applied("r"), "no": effects.NO_EFFECT, "what": effects.STILL_UNKNOWN}
    kind = effects.declare("tests.beat", fields=("n",), reconcile=lambda effect: answers[effect.key], in_flight=0)
    for key in answers:
        unknown(conn, settings, kind, key, {"n": 1})
    undeclared = effects.declare("tests.gone", fields=("n",))
    unknown(conn, settings, undeclared, "of another app", {"n": 1})
    del kinds._declared["tests.gone"]
    dead = hold(conn, settings, "dead")
    assert ledger.Ledger(Database.of(settings), dead, owner="t").begin(kind.request("lapsed", {"n": 1}))
    answers["lapsed"] = effects.Applied("after all")
    assert reconciling.reconcile_due(settings) == effects.Reconciled()  # nothing is due yet, the attempt is alive
    let_go(conn, "dead")
    conn.execute("UPDATE pgtruth.effects SET next_check_at = clock_timestamp() WHERE state = 'unknown'")
    assert reconciling.reconcile_due(settings) == effects.Reconciled(1, 2, 1, 1)
    assert states(conn) == {
        "yes": "applied", "no": "no_effect", "what": "unknown", "lapsed": "applied", "of another app": "unknown",
    }  # fmt: skip
    moves = book.history(Database.of(settings), "lapsed")
    assert [move.to_state for move in moves] == ["started", "unknown", "applied"]
    assert all("beat" in move.who for move in moves[1:])
    assert reconciling.reconcile_due(settings) == effects.Reconciled()


def test_each_due_effect_is_given_to_one_asker(conn: psycopg.Connection[Any], settings: Settings) -> None:
    kind = effects.declare("tests.askers", fields=("n",))
    for number in range(40):
        unknown(conn, settings, kind, f"k{number}", {"n": 1})
    conn.execute("UPDATE pgtruth.effects SET next_check_at = clock_timestamp()")
    taken: list[str] = []
    barrier = threading.Barrier(4)

    def ask() -> None:
        barrier.wait(10)
        taken.extend(book.due(Database.of(settings), ["tests.askers"], 20))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(taken) == len(set(taken))
    taken += book.due(Database.of(settings), ["tests.askers"], 40)
    assert sorted(taken) == sorted(f"k{number}" for number in range(40))


def test_an_answer_about_an_earlier_call_settles_nothing(conn: psycopg.Connection[Any], settings: Settings) -> None:
    """A slow asker says "not done" about call 1, while call 2 has become unknown."""
    kind = effects.declare("tests.slow asker", fields=("n",), in_flight=0)
    database = Database.of(settings)
    unknown(conn, settings, kind, "k", {"n": 1})
    book_keeper = ledger.Ledger(database, None, owner="t")
    row = book_keeper.read("k").row
    assert row is not None
    assert reconciling.resolve(database, "k", EffectState.NO_EFFECT, who="me", why="called them")
    unknown(conn, settings, kind, "k", {"n": 1})
    assert not book_keeper.settle(row, EffectState.NO_EFFECT, "old news", result=None, who="slow")
    assert states(conn) == {"k": "unknown"}


def test_a_decision_by_hand_needs_a_reason_and_respects_tombstones(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    recipient = Recipient("tombstone")
    kind = effects.declare("tests.hand", fields=("n",), tombstone=recipient.bury)
    database = Database.of(settings)
    unknown(conn, settings, kind, "k", {"n": 1})
    recipient.receive(Effect("k", "tests.hand", {}, 1))
    with pytest.raises(effects.EffectError, match="say why"):
        reconciling.resolve(database, "k", EffectState.APPLIED, who="me", why=" ")
    with pytest.raises(effects.EffectError, match="says that it has acted"):
        reconciling.resolve(database, "k", EffectState.NO_EFFECT, who="me", why="I think so")
    assert reconciling.resolve(database, "k", EffectState.APPLIED, who="me", why="saw it", result={"r": 1})
    assert attempt_at(kind, hold(conn, settings, "job"), "k", {"n": 1}) == {"r": 1}
    with pytest.raises(effects.EffectError, match="is not unknown, it is applied"):
        reconciling.resolve(database, "k", EffectState.APPLIED, who="me", why="again")
    with pytest.raises(effects.EffectError, match="there is no effect"):
        reconciling.reconcile(database, "nothing", "me")
    last = book.history(database, "k")[-1]
    assert (last.who, last.why) == ("me", "decided by hand: saw it")


def test_a_reconciler_that_fails_or_answers_nonsense_leaves_it_unknown(
    conn: psycopg.Connection[Any], settings: Settings
) -> None:
    answers: list[Any] = [RuntimeError("down"), None, True, effects.Applied(object())]

    def reconcile(effect: Effect) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    kind = effects.declare("tests.nonsense", fields=("n",), reconcile=reconcile, in_flight=0)
    unknown(conn, settings, kind, "k", {"n": 1})
    for text in ("could not be asked", "returned NoneType", "returned bool", "could not be asked"):
        answer = reconciling.reconcile(Database.of(settings), "k", "me")
        assert isinstance(answer, effects.StillUnknown)
        assert text in answer.why
        assert "asked by hand" in book.history(Database.of(settings), "k")[-1].why
    assert states(conn) == {"k": "unknown"}


def test_settled_effects_can_be_deleted_with_their_history(conn: psycopg.Connection[Any], settings: Settings) -> None:
    kind = effects.declare("tests.prune", fields=("n",))
    attempt_at(kind, hold(conn, settings, "job"), "old", {"n": 1}, lambda effect: 1)
    attempt_at(kind, hold(conn, settings, "job"), "new", {"n": 1}, lambda effect: 1)
    unknown(conn, settings, kind, "unknown", {"n": 1})
    conn.execute("UPDATE pgtruth.effects SET updated_at = updated_at - interval '9 days' WHERE key <> 'new'")
    assert book.prune(Database.of(settings), 8 * 86_400) == 1
    assert set(states(conn)) == {"new", "unknown"}
    assert book.history(Database.of(settings), "old") == []


def test_hot_statements_use_their_indexes(conn: psycopg.Connection[Any], settings: Settings) -> None:
    conn.execute(
        "INSERT INTO pgtruth.effects (key, kind, fingerprint, payload, state, token, owned_by, moved_by, moved_why)"
        " SELECT 'k' || n, 'kind', 'f', '', 'started', 't', 'o', 'o', 'w' FROM generate_series(1, 20000) n"
    )
    conn.execute("UPDATE pgtruth.effects SET state = 'applied' WHERE key <> 'k7'")
    held = {"job_id": "j", "lease_version": 1, "owned_by": "o", "key": "k9"}
    who = {"who": "w", "why": "y", "delay": 1, "limit": 10, "kinds": ["kind"]}
    given = {**held, **who, "token": "t", "calls": 1, "state": "applied", "result": None, "error": None}
    given |= {"resource": "r", "fence": 1, "fingerprint": "f"}
    names = ("effect_read", "effect_finish", "effect_lapse", "effect_settle", "effect_postpone", "effect_lapse_due")
    for analysed in (False, True):
        if analysed:
            conn.execute("ANALYZE pgtruth.effects")
        for name in (*names, "effect_due", "effect_blockers", "effect_note"):
            statement = b"EXPLAIN " + Database.of(settings).sql(name)
            plan = "\n".join(row[0] for row in conn.execute(statement, given).fetchall())
            assert "Seq Scan on effects" not in plan, f"{name}:\n{plan}"


# The command line, and the how-to.


@pytest.fixture
def cli(database_url: str) -> Iterator[Callable[..., str]]:
    """Run ``celery -A app pgtruth effects …`` in this process."""
    app = Celery("tests", broker=database_url, set_as_current=False)

    def run(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(commands.effects, arguments, obj=SimpleNamespace(app=app))
        assert done.exit_code == code, done.output
        return done.output

    yield run
    app.close()


def test_the_command_line_lists_asks_and_decides(
    conn: psycopg.Connection[Any], settings: Settings, cli: Callable[..., str]
) -> None:
    answers: list[Any] = [effects.STILL_UNKNOWN, effects.NO_EFFECT, effects.Applied({"r": 1})]
    kind = effects.declare("tests.cli", fields=("n",), reconcile=lambda effect: answers.pop(0), in_flight=0)
    assert "0 effect(s), unknown" in cli("list")
    attempt_at(kind, hold(conn, settings, "job"), "[bold]fine", {"n": 1}, lambda effect: 1)
    for key in ("a", "b", "c"):
        unknown(conn, settings, kind, key, {"n": 1})
    assert [json.loads(line)["key"] for line in cli("list", "--json").splitlines()] == ["a", "b", "c"]
    assert "[bold]fine" in cli("list", "--all")
    assert "[bold]fine" not in cli("list", "--state", "unknown", "--kind", "tests.cli")
    assert "2 effect(s), unknown, more may exist" in cli("list", "--limit", "2")
    assert "a: still unknown" in cli("reconcile", "a", "--who", "ann", code=1)
    assert "a: no effect" in cli("reconcile", "a", "--who", "ann")
    assert "b: applied" in cli("reconcile", "b")
    assert "is not unknown" in cli("reconcile", "b", code=1)
    assert "or say --due" in cli("reconcile", code=2)
    assert "lapsed: 0, applied: 0, no effect: 0, still unknown: 0" in cli("reconcile", "--due")
    assert "not JSON" in cli("resolve", "c", "applied", "--why", "x", "--result", "{", code=2)
    assert "'applied' only" in cli("resolve", "c", "no_effect", "--why", "x", "--result", "1", code=2)
    assert "say why" in cli("resolve", "c", "applied", "--why", "", code=1)
    assert "decided by bob" in cli("resolve", "c", "applied", "--why", "rang", "--who", "bob", "--result", '{"r": 2}')
    shown = json.loads(cli("show", "c", "--json"))
    assert shown["result"] == {"r": 2}
    assert shown["fields"] == {"n": 1}
    assert [(move["to_state"], move["who"]) for move in shown["history"]][-1] == ("applied", "bob")
    assert "asked by hand" in cli("show", "a")
    assert "ann" in cli("show", "a")
    assert "there is no effect" in cli("show", "nothing", code=1)
    assert "0 effect(s) deleted" in cli("prune", "--older-than", "30", "--yes")


def test_the_how_to_runs(settings: Settings, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python blocks, in order, with a gateway that does what it is asked."""
    monkeypatch.setattr(kinds, "_declared", {})
    done: dict[str, Any] = {}

    def act(order_id: str, cents: int, idempotency_key: str) -> dict[str, Any]:
        return {"declined": True} if order_id == "declined" else done.setdefault(idempotency_key, {"id": order_id})

    def tell(payload: Any, resource: str, fence: int) -> str:
        return f"{resource} {fence}"

    gateway = SimpleNamespace(charge=act, tell=tell, find=lambda key, **_: done.get(key))
    text = (ROOT / "docs/how-to/effects.md").read_text()
    app = Celery("tests", broker=database_url)
    names: dict[str, Any] = {"gateway": gateway}
    try:
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(compile(block, "effects.md", "exec"), names)
            app.set_current()
        assert names["pay"]("7", 100) == names["pay"]("7", 100) == "7"
        assert "pgtruth.reconcile" in names["app"].conf.beat_schedule
        rows = book.listed(Database.of(settings), list(EffectState))
        assert {row.key: row.state for row in rows} == {
            "charge:declined": "no_effect", "shipping:7:sent": "applied", "charge:7": "applied",
        }  # fmt: skip
    finally:
        app.close()


def test_codec_keeps_what_postgres_cannot() -> None:
    assert codec.readable("a\x00\ud800") == "a�?"
    assert codec.readable(None) is None
    assert codec.decode(codec.encode("\ud800")) == "\ud800"


def test_here_is_the_apps_database_outside_a_task(settings: Settings, database_url: str) -> None:
    app = Celery("tests", broker=database_url, set_as_current=True)
    try:
        assert flow.here()._db.settings.conninfo == settings.conninfo
    finally:
        app.close()
    assert str(os.getpid()) in flow.owner()


def test_the_first_declaration_gives_apps_the_task_and_a_beat_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with our broker, whether they are finalized already or not; what the user has scheduled stays."""
    monkeypatch.setattr(kinds, "_declared", {})
    ours, later, foreign, own = (
        Celery(name, broker=broker, set_as_current=False)
        for name, broker in (("a", "pgtruth://h/d"), ("b", "pgtruth://h/d"), ("c", "memory://"), ("d", "pgtruth://h/d"))
    )
    own.conf.beat_schedule = {"mine": {"task": tasks.TASK, "schedule": 7}}
    ours.finalize()
    effects.declare("tests.first", fields=("a",))
    for app in (ours, later, foreign, own):
        app.finalize()
        assert (tasks.TASK in app.tasks) is (app is not foreign)
        app.close()
    assert ours.conf.beat_schedule[tasks.TASK]["schedule"] == later.conf.beat_schedule[tasks.TASK]["schedule"] == 30
    assert list(own.conf.beat_schedule) == ["mine"]
    tasks.register(ours, every=5)
    assert ours.conf.beat_schedule[tasks.TASK]["schedule"] == 5
