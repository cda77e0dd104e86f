"""Finding out: by beat, by hand, on the command line; and the how-to, run."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from celery import Celery
from click.testing import CliRunner

from pgtruth_transport import effects
from pgtruth_transport.db import Database
from pgtruth_transport.effects import book, commands, kinds, ledger, reconciling, tasks
from pgtruth_transport.effects.kinds import Effect
from pgtruth_transport.effects.states import EffectState
from pgtruth_transport.settings import Settings
from tests.support import ROOT
from tests.support_effects import (
    Recipient,
    attempt_at,
    hold,
    let_go,
    states,
    unknown,
)


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


@pytest.fixture
def cli(database_url: str) -> Iterator[Callable[..., str]]:
    """Run ``celery -A app pgtruth effects …`` in this process."""
    app = Celery("tests", broker=database_url, set_as_current=False)

    def run(*arguments: str, code: int = 0, columns: int = 80) -> str:
        env = {"COLUMNS": str(columns)}
        done = CliRunner().invoke(commands.effects, arguments, obj=SimpleNamespace(app=app), env=env)
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


def test_the_command_line_cuts_no_key_on_80_columns(
    conn: psycopg.Connection[Any], settings: Settings, cli: Callable[..., str]
) -> None:
    kind = effects.declare("tests.a_kind_with_a_long_name", fields=("n",), reconcile=lambda effect: None, in_flight=0)
    keys = ["[x]", "charge:3db5d166-15b8-4cae-82ad-f830bfed74f4", "k" * 100]
    for key in keys:
        unknown(conn, settings, kind, key, {"n": 1})
    header, *lines = cli("list").splitlines()
    assert header.split() == ["KEY", "STATE", "AGE", "CALLS", "ASKED", "KIND"]
    assert {line.split()[0] for line in lines[:-1]} == set(keys)
    assert lines[-1] == "3 effect(s), unknown"
    assert "LATEST WORD" in cli("list", columns=200)
    assert cli("list", "--all").endswith("3 effect(s), in any state\n")
    shown = cli("show", keys[0])
    assert "         key  [x]\n" in shown
    assert "AT (UTC)" in shown
    assert all(len(line) <= 80 for line in cli("show", keys[1]).partition("\n\n")[2].splitlines())


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
