"""What the ledger keeps and refuses, whoever writes to it; results, leases, indexes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from decimal import Decimal
from itertools import product
from typing import Any

import psycopg
import pytest
from celery import Celery
from celery.exceptions import Ignore

from pgtruth_transport import effects
from pgtruth_transport.attempts import Attempt
from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, codec, flow, ledger
from pgtruth_transport.effects.kinds import Effect
from pgtruth_transport.effects.states import MOVES, EffectState
from pgtruth_transport.settings import Settings
from tests.support_effects import (
    attempt_at,
    hold,
    states,
    unknown,
)


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


def test_hot_statements_use_their_indexes(conn: psycopg.Connection[Any], settings: Settings) -> None:
    conn.execute(
        "INSERT INTO pgtruth.effects (key, kind, fingerprint, payload, state, token, owned_by, moved_by, moved_why)"
        " SELECT 'k' || n, 'kind', 'f', '', 'started', 't', 'o', 'o', 'w' FROM generate_series(1, 20000) n"
    )
    conn.execute("UPDATE pgtruth.effects SET state = 'applied' WHERE key <> 'k7'")
    held = {"job_id": "j", "lease_version": 1, "owned_by": "o", "key": "k9"}
    who = {"who": "w", "why": "y", "delay": 1, "limit": 10, "kinds": ["kind"]}
    given = {**held, **who, "token": "t", "calls": 1, "state": "applied", "result": None, "error": None}
    given |= {"resource": "r", "fence": 1, "fingerprint": "f", "kind": "kind", "payload": b"", "exclusive": True}
    given |= {"refused": False, "outside_lease": 1}
    names = ("effect_read", "effect_finish", "effect_lapse", "effect_settle", "effect_postpone", "effect_lapse_due")
    for analysed in (False, True):
        if analysed:
            conn.execute("ANALYZE pgtruth.effects")
        for name in (
            *names,
            "effect_due",
            "effect_blockers",
            "effect_note",
            "effect_begin",
            "effect_late",
            "effect_refence",
        ):
            statement = b"EXPLAIN " + Database.of(settings).sql(name)
            plan = "\n".join(row[0] for row in conn.execute(statement, given).fetchall())
            assert "Seq Scan on effects" not in plan, f"{name}:\n{plan}"


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


def test_settled_effects_can_be_deleted_with_their_history(conn: psycopg.Connection[Any], settings: Settings) -> None:
    kind = effects.declare("tests.prune", fields=("n",))
    attempt_at(kind, hold(conn, settings, "job"), "old", {"n": 1}, lambda effect: 1)
    attempt_at(kind, hold(conn, settings, "job"), "new", {"n": 1}, lambda effect: 1)
    unknown(conn, settings, kind, "unknown", {"n": 1})
    conn.execute("UPDATE pgtruth.effects SET updated_at = updated_at - interval '9 days' WHERE key <> 'new'")
    assert book.prune(Database.of(settings), 8 * 86_400) == 1
    assert set(states(conn)) == {"new", "unknown"}
    assert book.history(Database.of(settings), "old") == []
