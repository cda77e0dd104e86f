"""Exchanges, queues and bindings as rows."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from kombu.exceptions import ChannelError
from kombu.transport.virtual.base import NotEquivalentError

from pgtruth_transport.db import Database
from pgtruth_transport.errors import RefusedMessage
from pgtruth_transport.transport import entities as module
from pgtruth_transport.transport import messages
from pgtruth_transport.transport.entities import Entities, NotEquivalent, collect_garbage, topic, ttl_of
from tests.support_plans import explain

Conn = psycopg.Connection[Any]
MESSAGE = {"body": b"x", "headers": {}, "properties": {}}


class Counting:
    """A connection that counts its statements."""

    def __init__(self, conn: Conn) -> None:
        self._conn = conn
        self.count = 0

    def execute(self, *args: Any) -> Any:
        self.count += 1
        return self._conn.execute(*args)


@pytest.fixture
def entities(db: Database) -> Entities:
    return Entities(db)


@pytest.fixture
def elsewhere(db: Database) -> Entities:
    """The same tables, seen by another process."""
    return Entities(db)


@pytest.fixture
def counting(conn: Conn) -> Iterator[Any]:
    return Counting(conn)


def rows(conn: Conn, table: str) -> int:
    found = conn.execute(f"SELECT count(*) FROM pgtruth.{table}".encode()).fetchone()
    assert found is not None
    return int(found[0])


def age(conn: Conn, queue: str) -> None:
    """Let a queue's ttl run out."""
    conn.execute("UPDATE pgtruth.queues SET expires_at = clock_timestamp() - interval '1 s' WHERE name = %s", [queue])


# -- exchanges ------------------------------------------------------------------------------------------------------


def test_an_exchange_can_be_declared_by_everybody_and_has_one_type(
    conn: Conn, entities: Entities, elsewhere: Entities
) -> None:
    entities.declare_exchange(conn, "e", "topic")
    elsewhere.declare_exchange(conn, "e", "topic", durable=False)
    assert elsewhere.has_exchange(conn, "e")
    with pytest.raises(NotEquivalent, match=r"'e' exists with type 'topic'.*'fanout'") as caught:
        elsewhere.declare_exchange(conn, "e", "fanout")
    assert isinstance(caught.value, ChannelError)
    assert isinstance(caught.value, NotEquivalentError)
    with pytest.raises(NotEquivalent):
        entities.declare_exchange(conn, "e", "direct")
    entities.delete_exchange(conn, "e")
    assert not entities.has_exchange(conn, "e")
    entities.declare_exchange(conn, "e", "fanout")


def test_a_type_that_does_not_exist_is_refused(conn: Conn, entities: Entities) -> None:
    with pytest.raises(ChannelError, match=r"headers.*direct, topic, fanout"):
        entities.declare_exchange(conn, "e", "headers")


def test_deleting_an_exchange_deletes_its_bindings_only(conn: Conn, entities: Entities) -> None:
    entities.declare_queue(conn, "q")
    for exchange in ("e", "f"):
        entities.declare_exchange(conn, exchange)
        entities.bind(conn, "q", exchange, "k")
    entities.delete_exchange(conn, "e")
    assert entities.bindings(conn) == [("q", "f", "k")]
    assert entities.has_queue(conn, "q")
    entities.bind(conn, "q", "e", "k")
    assert entities.lookup(conn, "e", "k") == ["q"]


def test_many_processes_may_declare_at_once(db: Database) -> None:
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def run() -> None:
        try:
            own = Entities(db)
            start.wait()
            with db.connection() as conn:
                for n in range(20):
                    own.declare_exchange(conn, f"e{n}", "topic")
                    own.declare_queue(conn, f"q{n}")
                    own.bind(conn, f"q{n}", f"e{n}", "#")
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


# -- queues ---------------------------------------------------------------------------------------------------------


def test_declaring_again_costs_nothing(counting: Any, entities: Entities) -> None:
    def declare() -> int:
        before = counting.count
        entities.declare_exchange(counting, "e")
        entities.declare_queue(counting, "q")
        entities.bind(counting, "q", "e", "k")
        return int(counting.count) - before

    assert declare() == 3
    assert declare() == 0
    entities.declare_queue(counting, "transient", ttl=10)
    assert declare() == 0
    entities.delete_queue(counting, "q")
    assert declare() == 3
    entities.forget()
    assert declare() == 3


def test_a_flush_of_the_tables_is_survived(conn: Conn, entities: Entities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MEMORY", 0.0)
    entities.declare_queue(conn, "q")
    conn.execute("TRUNCATE pgtruth.queues, pgtruth.exchanges, pgtruth.bindings")
    entities.declare_queue(conn, "q")
    assert entities.has_queue(conn, "q")


def test_a_permanent_queue_stays(conn: Conn, db: Database, entities: Entities) -> None:
    entities.declare_queue(conn, "q")
    entities.touch(conn, ["q", "never declared"])
    assert collect_garbage(conn, db) == 0
    assert entities.has_queue(conn, "q")


def test_a_transient_queue_lives_as_long_as_it_is_touched(
    conn: Conn, db: Database, entities: Entities, counting: Any
) -> None:
    entities.declare_queue(conn, "q", auto_delete=True, ttl=30)
    entities.touch(counting, ["q"])
    assert counting.count == 0  # a third of its ttl has not passed
    entities._touch_at.clear()
    age(conn, "q")
    entities.touch(counting, ["q"])
    entities.touch(counting, ["q"])
    assert counting.count == 1
    assert entities.has_queue(conn, "q")
    age(conn, "q")
    assert not entities.has_queue(conn, "q")
    entities.declare_queue(conn, "q", auto_delete=True, ttl=30)
    assert entities.has_queue(conn, "q")


def test_garbage_is_an_expired_queue_with_its_bindings_and_messages(
    conn: Conn, db: Database, entities: Entities, elsewhere: Entities
) -> None:
    entities.declare_exchange(conn, "e", "fanout")
    for queue, ttl in (("dead", 10.0), ("live", 10.0), ("durable", None)):
        entities.declare_queue(conn, queue, ttl=ttl)
        entities.bind(conn, queue, "e", "")
        assert messages.put(conn, db, [queue], MESSAGE) == [queue]
    age(conn, "dead")
    assert sorted(elsewhere.lookup(conn, "e", "")) == ["durable", "live"]
    assert messages.put(conn, db, ["dead", "live"], MESSAGE) == ["live"]
    assert collect_garbage(conn, db) == 2
    assert (rows(conn, "queues"), rows(conn, "bindings"), rows(conn, "messages")) == (2, 2, 3)
    assert collect_garbage(conn, db) == 0


def test_garbage_is_collected_in_batches(conn: Conn, db: Database, entities: Entities) -> None:
    entities.declare_queue(conn, "q", ttl=10)
    for _ in range(25):
        messages.put(conn, db, ["q"], MESSAGE)
    age(conn, "q")
    assert [collect_garbage(conn, db, 10) for _ in range(4)] == [10, 10, 6, 0]


def test_what_was_collected_while_it_is_consumed_is_made_again(
    conn: Conn, db: Database, entities: Entities, elsewhere: Entities
) -> None:
    entities.declare_exchange(conn, "e", "topic", durable=False)
    entities.declare_queue(conn, "mine", auto_delete=True, ttl=10)
    entities.bind(conn, "mine", "e", "a.*")
    age(conn, "mine")
    collect_garbage(conn, db)
    conn.execute("TRUNCATE pgtruth.queues, pgtruth.exchanges, pgtruth.bindings")
    entities._touch_at.clear()
    entities.touch(conn, ["mine", "unknown"])
    assert elsewhere.lookup(conn, "e", "a.b") == ["mine"]
    assert elsewhere.lookup(conn, "e", "b") == []
    entities.delete_queue(conn, "mine")
    entities.touch(conn, ["mine"])
    assert not entities.has_queue(conn, "mine")


def test_deleting_a_queue_takes_its_messages_and_bindings(conn: Conn, db: Database, entities: Entities) -> None:
    entities.declare_queue(conn, "q")
    entities.bind(conn, "q", "e", "k")
    for _ in range(3):
        messages.put(conn, db, ["q", "other"], MESSAGE)
    assert entities.delete_queue(conn, "q", if_empty=True) == 0
    assert entities.has_queue(conn, "q")
    assert entities.delete_queue(conn, "q") == 3
    assert (rows(conn, "queues"), rows(conn, "bindings"), rows(conn, "messages")) == (0, 0, 3)
    assert entities.delete_queue(conn, "q") == 0
    entities.declare_queue(conn, "q")
    entities.delete_queue(conn, "q", if_empty=True)
    assert not entities.has_queue(conn, "q")


def test_many_transient_queues_do_not_fill_the_memory(
    conn: Conn, entities: Entities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MANY", 20)
    for n in range(100):
        entities.declare_queue(conn, f"reply-{n}", auto_delete=True, ttl=0.001)
    assert len(entities._queues) < 60
    assert len(entities._touch_at) < 60


def test_the_ttl_of_a_queue() -> None:
    assert ttl_of(False, None) is None
    assert ttl_of(False, {"x-max-priority": 9}) is None
    assert ttl_of(False, {"x-expires": 1500}) == 1.5
    assert ttl_of(True, {"x-expires": 10_000}) == 10.0
    assert ttl_of(True, {}) == module.AUTO_DELETE_TTL
    for wrong in (0, -5, "soon", True):
        with pytest.raises(ChannelError, match="x-expires"):
            ttl_of(False, {"x-expires": wrong})


@pytest.mark.parametrize("name", ["a\0b", "half \ud800"])
def test_names_that_cannot_be_stored_are_refused(conn: Conn, entities: Entities, name: str) -> None:
    for call in (
        lambda: entities.declare_exchange(conn, name),
        lambda: entities.declare_queue(conn, name),
        lambda: entities.bind(conn, "q", "e", name),
        lambda: entities.lookup(conn, "e", name),
        lambda: entities.delete_queue(conn, name),
    ):
        with pytest.raises(RefusedMessage, match="the name"):
            call()


# -- lookup ---------------------------------------------------------------------------------------------------------


def test_the_default_exchange_leads_to_the_queue_of_that_name(counting: Any, entities: Entities) -> None:
    assert entities.lookup(counting, "", "anything") == ["anything"]
    assert counting.count == 0


@pytest.mark.parametrize("type", ["direct", "undeclared"])
def test_direct(conn: Conn, entities: Entities, elsewhere: Entities, type: str) -> None:
    if type == "direct":
        entities.declare_exchange(conn, "e", "direct")
    for queue, key in (("q1", "k"), ("q2", "k"), ("q2", "other"), ("q3", "#")):
        entities.declare_queue(conn, queue)
        entities.bind(conn, queue, "e", key)
    assert sorted(elsewhere.lookup(conn, "e", "k")) == ["q1", "q2"]
    assert elsewhere.lookup(conn, "e", "nothing") == []
    entities.unbind(conn, "q1", "e", "k")
    assert elsewhere.lookup(conn, "e", "k") == ["q2"]


def test_fanout_reaches_each_queue_once(conn: Conn, entities: Entities, elsewhere: Entities) -> None:
    entities.declare_exchange(conn, "e", "fanout")
    for queue, key in (("q1", ""), ("q1", "again"), ("q2", "x")):
        entities.bind(conn, queue, "e", key)
    assert sorted(elsewhere.lookup(conn, "e", "whatever")) == ["q1", "q2"]


def test_topic(conn: Conn, entities: Entities, elsewhere: Entities) -> None:
    entities.declare_exchange(conn, "e", "topic")
    for queue, key in (("all", "#"), ("tasks", "task.#"), ("one", "task.*"), ("one", "worker.*"), ("exact", "task.x")):
        entities.bind(conn, queue, "e", key)
    assert sorted(elsewhere.lookup(conn, "e", "task.x")) == ["all", "exact", "one", "tasks"]
    assert sorted(elsewhere.lookup(conn, "e", "task")) == ["all", "tasks"]
    assert elsewhere.lookup(conn, "e", "other") == ["all"]


@pytest.mark.parametrize(
    ("pattern", "matching", "different"),
    [
        ("a.b", ["a.b"], ["a", "a.b.c", "a.bc", "ab", "a+b", ""]),
        ("*", ["a", "é"], ["", "a.b"]),
        ("#", ["", "a", "a.b", "..."], []),
        ("a.*", ["a.b"], ["a", "a.", "a.b.c"]),
        ("a.#", ["a", "a.b", "a.b.c"], ["ab", "b.a", ""]),
        ("#.z", ["z", "y.z", "x.y.z"], ["z.y", "yz"]),
        ("a.#.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "z", "az", "a.zz"]),
        ("*.#", ["a", "a.b", "a.b.c"], [""]),
        ("#.#.*.#", ["a", "a.b"], [""]),
        ("*.stock.#", ["us.stock", "us.stock.x.y"], ["stock", "us.eu.stock"]),
        ("a*.b#", ["a*.b#"], ["ax.b", "a.b"]),
        ("(a|b).[c]", ["(a|b).[c]"], ["a.c"]),
        ("", [""], ["a"]),
    ],
)
def test_topic_patterns_by_the_rules_of_amqp(pattern: str, matching: list[str], different: list[str]) -> None:
    found = [key for key in [*matching, *different] if topic(pattern).match(f"{key}.")]
    assert found == matching


def test_the_event_exchange_is_looked_up_once_a_second(
    conn: Conn, entities: Entities, elsewhere: Entities, counting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    entities.declare_exchange(conn, "celeryev", "topic")
    assert [elsewhere.lookup(counting, "celeryev", f"task.{n}") for n in range(100)] == [[]] * 100
    assert counting.count == 1
    entities.bind(conn, "flower", "celeryev", "#")
    assert entities.lookup(conn, "celeryev", "task.1") == ["flower"]  # its own bindings it knows at once
    monkeypatch.setattr(module, "TABLE_MEMORY", -1.0)
    elsewhere._tables.clear()  # a second later
    assert elsewhere.lookup(counting, "celeryev", "task.1") == ["flower"]
    assert elsewhere.lookup(counting, "celeryev", "task.1") == ["flower"]
    assert counting.count == 3


def test_other_topic_exchanges_are_exact(conn: Conn, entities: Entities, elsewhere: Entities) -> None:
    """What was bound before a publish gets the message, whoever bound it."""
    entities.declare_exchange(conn, "e", "topic")
    assert elsewhere.lookup(conn, "e", "a") == []
    entities.bind(conn, "q", "e", "a")
    assert elsewhere.lookup(conn, "e", "a") == ["q"]


def test_a_forked_child_knows_what_its_parent_declared(db: Database) -> None:
    entities = Entities.of(db)
    assert Entities.of(db) is entities
    with db.connection() as conn:
        entities.declare_queue(conn, "q")
    child = os.fork()
    if not child:
        code = 1
        try:
            with db.connection() as own:
                entities.declare_queue(own, "q")
                entities.declare_queue(own, "r")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with db.connection() as conn:
        assert entities.has_queue(conn, "r")


@pytest.mark.parametrize("generic", [False, True])
def test_looking_up_reads_only_what_it_needs(conn: Conn, db: Database, generic: bool) -> None:
    """A direct exchange with 20,000 bindings is looked up by its key."""
    conn.execute("INSERT INTO pgtruth.exchanges VALUES ('e', 'direct', true, false)")
    conn.execute("INSERT INTO pgtruth.queues SELECT 'q' || n, true, false FROM generate_series(1, 20000) n")
    conn.execute("INSERT INTO pgtruth.bindings SELECT 'e', 'k' || n, 'q' || n FROM generate_series(1, 20000) n")
    for analyzed in (False, True):
        if analyzed:
            conn.execute("ANALYZE pgtruth.bindings, pgtruth.queues, pgtruth.exchanges")
        parameters = {"exchange": "e", "routing_key": "k77"}
        plan = explain(conn, db.sql("binding_lookup"), parameters, generic=generic)
        assert plan.touched("bindings") <= 2, plan.text
        assert plan.touched("queues") <= 2, plan.text
