"""Messages that are not tasks: order, leases, acknowledgement, expiry."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from kombu.transport import virtual

from pgtruth_transport.db import Database
from pgtruth_transport.errors import RefusedMessage
from pgtruth_transport.transport import messages
from pgtruth_transport.transport.messages import (
    ack,
    delete_expired,
    fetch,
    purge,
    put,
    renew,
    requeue,
    size,
)
from tests.support_plans import explain

Conn = psycopg.Connection[Any]
LEASE = 60.0


def message(body: Any = b"x", **properties: Any) -> dict[str, Any]:
    return {
        "body": body,
        "content-type": "text/plain",
        "content-encoding": "utf-8",
        "headers": {"h": 1},
        "properties": {"delivery_info": {"exchange": "e", "routing_key": "k"}, "delivery_tag": "t", **properties},
    }


def bodies(deliveries: list[messages.Delivery]) -> list[bytes]:
    return [delivery.payload["body"] for delivery in deliveries]


def run_out(conn: Conn) -> None:
    """Let every lease run out."""
    past = "clock_timestamp() - interval '1 s'"
    conn.execute(f"UPDATE pgtruth.messages SET lease_expires_at = {past} WHERE owned_by IS NOT NULL".encode())


def test_what_was_put_can_be_fetched_at_once(conn: Conn, db: Database) -> None:
    assert put(conn, db, ["q"], message("héllo", priority=3, correlation_id="c", custom={"a": [1]})) == ["q"]
    (delivery,) = fetch(conn, db, ["other", "q"], 10)
    assert (delivery.queue, delivery.redelivered) == ("q", False)
    got = delivery.payload
    assert got["body"] == "héllo".encode()
    assert (got["content-type"], got["content-encoding"], got["headers"]) == ("text/plain", "utf-8", {"h": 1})
    assert got["properties"]["delivery_tag"] == f"m{delivery.id}"
    assert got["properties"]["delivery_info"] == {"exchange": "e", "routing_key": "k", "redelivered": False}
    assert (got["properties"]["custom"], got["properties"]["correlation_id"]) == ({"a": [1]}, "c")
    assert fetch(conn, db, ["q"], 10) == []


@pytest.mark.parametrize(
    "body", [b"", b"\0\x01\xff\0", b"x" * 1_000_000, memoryview(b"view"), bytearray(b"array"), None]
)
def test_bodies_are_bytes(conn: Conn, db: Database, body: Any) -> None:
    put(conn, db, ["q"], message(body))
    assert bodies(fetch(conn, db, ["q"], 1)) == [bytes(body or b"")]


def test_kombu_reads_the_payload(conn: Conn, db: Database) -> None:
    class Channel:
        def decode_body(self, body: Any, encoding: Any = None) -> Any:
            return body

    sent = message(json.dumps({"a": "é"}))
    sent["content-type"] = "application/json"
    put(conn, db, ["q"], sent)
    (delivery,) = fetch(conn, db, ["q"], 1)
    received = virtual.Message(delivery.payload, channel=Channel(), accept={"application/json"})
    assert received.payload == {"a": "é"}
    assert received.delivery_tag == f"m{delivery.id}"
    assert received.delivery_info["redelivered"] is False


def test_one_statement_for_all_queues(conn: Conn, db: Database) -> None:
    queues = [f"q{n}" for n in range(50)]
    assert sorted(put(conn, db, [*queues, "q0"], message())) == sorted(queues)
    assert [size(conn, db, queue) for queue in queues] == [1] * 50
    assert put(conn, db, [], message()) == []


def test_nine_first_then_age(conn: Conn, db: Database) -> None:
    for n, priority in enumerate([0, 9, None, 5, 9, 42, -3, "5", "high"]):
        put(conn, db, ["q"], message(str(n), priority=priority))
    assert bodies(fetch(conn, db, ["q"], 4)) == [b"1", b"4", b"5", b"3"]
    assert bodies(fetch(conn, db, ["q"], 10, "me", LEASE)) == [b"7", b"0", b"2", b"6", b"8"]


def test_no_queue_starves_another(conn: Conn, db: Database) -> None:
    for _ in range(20):
        put(conn, db, ["full"], message("full", priority=9))
    put(conn, db, ["small"], message("small"))
    got = [bodies(fetch(conn, db, ["full", "small"], 1))[0] for _ in range(2)]
    assert sorted(got) == [b"full", b"small"]


def test_a_held_message_is_nobody_elses(conn: Conn, db: Database) -> None:
    put(conn, db, ["q"], message())
    (held,) = fetch(conn, db, ["q"], 5, "me", LEASE)
    assert fetch(conn, db, ["q"], 5, "you", LEASE) == []
    assert fetch(conn, db, ["q"], 5) == []
    assert size(conn, db, "q") == 0
    assert ack(conn, db, [held.id], "you") == 0
    assert ack(conn, db, [held.id], "me") == 1
    assert ack(conn, db, [held.id], "me") == 0


def test_a_lease_that_ran_out_passes_the_message_on(conn: Conn, db: Database) -> None:
    put(conn, db, ["q"], message())
    (first,) = fetch(conn, db, ["q"], 1, "dead", LEASE)
    run_out(conn)
    assert size(conn, db, "q") == 1
    (second,) = fetch(conn, db, ["q"], 1, "alive", LEASE)
    assert (second.id, first.redelivered, second.redelivered) == (first.id, False, True)
    assert second.payload["properties"]["delivery_info"]["redelivered"] is True
    # the late one has no say any more
    assert renew(conn, db, [first.id], "dead", LEASE) == frozenset()
    assert requeue(conn, db, [first.id], "dead") == 0
    assert ack(conn, db, [first.id], "dead") == 0
    run_out(conn)
    assert fetch(conn, db, ["q"], 1)[0].redelivered


def test_a_renewed_lease_holds(conn: Conn, db: Database) -> None:
    put(conn, db, ["q"], message())
    put(conn, db, ["q"], message())
    ids = [held.id for held in fetch(conn, db, ["q"], 2, "me", LEASE)]
    run_out(conn)
    assert renew(conn, db, [*ids, 10**12], "me", LEASE) == frozenset(ids)
    assert fetch(conn, db, ["q"], 2, "you", LEASE) == []


def test_a_requeue_keeps_its_place_and_is_marked(conn: Conn, db: Database) -> None:
    for n in range(3):
        put(conn, db, ["q"], message(str(n)))
    held = fetch(conn, db, ["q"], 2, "me", LEASE)
    assert requeue(conn, db, [held[0].id], "me") == 1
    again = fetch(conn, db, ["q"], 5, "you", LEASE)
    assert [(delivery.payload["body"], delivery.redelivered) for delivery in again] == [(b"0", True), (b"2", False)]


def test_purge_counts_and_leaves_held_messages(conn: Conn, db: Database) -> None:
    for _ in range(5):
        put(conn, db, ["q", "other"], message())
    (held,) = fetch(conn, db, ["q"], 1, "me", LEASE)
    assert (purge(conn, db, "q"), purge(conn, db, "q")) == (4, 0)
    assert size(conn, db, "other") == 5
    assert ack(conn, db, [held.id], "me") == 1


def test_an_expired_message_is_never_delivered(conn: Conn, db: Database, eventually: Callable[..., Any]) -> None:
    put(conn, db, ["q"], message("soon", expiration="50"))
    put(conn, db, ["q"], message("late", expiration="60000"))
    put(conn, db, ["q"], message("now", expiration=0))
    eventually(lambda: size(conn, db, "q") == 1)
    assert bodies(fetch(conn, db, ["q"], 5, "me", LEASE)) == [b"late"]
    assert fetch(conn, db, ["q"], 5) == []
    assert (delete_expired(conn, db), delete_expired(conn, db)) == (2, 0)


def test_expired_messages_are_deleted_in_batches(conn: Conn, db: Database) -> None:
    for _ in range(25):
        put(conn, db, ["q"], message(expiration=0))
    assert [delete_expired(conn, db, 10) for _ in range(4)] == [10, 10, 5, 0]


def test_a_queue_that_nobody_declared_keeps_messages_for_a_day(conn: Conn, db: Database) -> None:
    conn.execute("INSERT INTO pgtruth.queues VALUES ('declared', true, false)")
    put(conn, db, ["declared", "not yet"], message())
    lives = conn.execute("SELECT queue, expires_at - clock_timestamp() > '23 h' FROM pgtruth.messages").fetchall()
    assert sorted(lives) == [("declared", None), ("not yet", True)]


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"queues": ["a\0b"]}, "NUL"),
        ({"queues": ["\udc00"]}, "surrogate"),
        ({"body": "\ud800"}, "surrogate"),
        ({"body": {"not": "encoded"}}, "dict.*serialise"),
        ({"properties": {"expiration": "soon"}}, "expiration.*milliseconds"),
        ({"properties": {"x": object()}}, r"properties \(x.*not JSON"),
        ({"headers": {"h": object()}}, r"headers \(h\) are not JSON"),
    ],
)
def test_what_cannot_be_stored_is_refused(conn: Conn, db: Database, wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(RefusedMessage, match=match):
        put(conn, db, wrong.pop("queues", ["q"]), message() | wrong)
    assert size(conn, db, "q") == 0


def test_surrogates_and_nul_in_headers_are_kept(conn: Conn, db: Database) -> None:
    put(conn, db, ["q"], message() | {"headers": {"h": "\0 \ud800", "b": b"\xff"}})
    assert fetch(conn, db, ["q"], 1)[0].payload["headers"] == {"h": "\0 \ud800", "b": b"\xff"}


@pytest.mark.parametrize("acknowledge", [False, True])
def test_many_consumers_share_without_doubling(conn: Conn, db: Database, acknowledge: bool) -> None:
    total = 400
    for n in range(total):
        put(conn, db, [f"q{n % 3}"], message(str(n)))
    got: list[bytes] = []
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            with db.connection() as own:
                while found := fetch(own, db, ["q0", "q1", "q2"], 7, name if acknowledge else None, LEASE):
                    got.extend(bodies(found))
                    if acknowledge:
                        assert ack(own, db, [delivery.id for delivery in found], name) == len(found)
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(f"c{n}",)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    got += bodies(fetch(conn, db, ["q0", "q1", "q2"], total))  # a consumer may end while others hold the last rows
    assert errors == []
    assert sorted(map(int, got)) == list(range(total))


def test_only_what_may_be_lost_is_not_flushed(conn: Conn, db: Database) -> None:
    conn.execute(
        "INSERT INTO pgtruth.queues (name, durable, auto_delete, ttl)"
        " VALUES ('durable', true, false, NULL), ('t1', true, true, 10), ('t2', true, true, 9)"
    )

    def flushed(name: str, queues: list[str]) -> bool:
        parameters = {
            "queues": queues, "priorities": [0] * len(queues), "count": 9, "owner": "me", "lease": 9, "relax": True,
            "priority": 0, "headers": b"", "properties": b"", "body": b"", "expires_in": None,
        }  # fmt: skip
        with conn.transaction(force_rollback=True):
            conn.execute(db.sql(name), parameters)
            return conn.execute("SELECT current_setting('synchronous_commit')").fetchone() == ("on",)

    for queues in (["t1", "t2"], ["t1", "durable"], ["durable"], ["undeclared"]):
        durable = queues != ["t1", "t2"]
        assert flushed("message_put", queues) is durable
        put(conn, db, queues, message())
        assert flushed("message_take", queues) is durable
        assert flushed("message_claim", queues) is False
        purge(conn, db, queues[0])
    with conn.transaction():
        put(conn, db, ["t1"], message())
        fetch(conn, db, ["t1"], 1)
        assert conn.execute("SELECT current_setting('synchronous_commit')").fetchone() == ("on",)


@pytest.mark.parametrize("name", ["message_take", "message_claim"])
@pytest.mark.parametrize("analyzed", [False, True])
@pytest.mark.parametrize("generic", [False, True])
def test_fetching_reads_only_what_it_takes(conn: Conn, db: Database, name: str, analyzed: bool, generic: bool) -> None:
    """Whatever the statistics say: with a backlog in these queues and in others, and with messages that others hold."""
    conn.execute(
        "INSERT INTO pgtruth.messages (queue, priority, headers, properties, body, owned_by, lease_expires_at)"
        " SELECT 'q' || n % 4, n % 10, '{}', '{}', 'x', CASE WHEN n < 40 THEN 'you' END,"
        " CASE WHEN n < 40 THEN now() + interval '1 h' END FROM generate_series(1, 20000) n"
    )
    if analyzed:
        conn.execute("ANALYZE pgtruth.messages")
    queues = [queue for queue in ("empty", "q1", "q2") for _ in range(10)]
    parameters = {"queues": queues, "priorities": [*range(9, -1, -1)] * 3, "count": 10, "owner": "me", "lease": 60}
    parameters["relax"] = True
    plan = explain(conn, db.sql(name), parameters, generic=generic)
    assert "messages_fetch" in plan.indexes("messages"), plan.text
    assert plan.touched("messages") <= 40, plan.text  # ten found, ten written by their key, and a few held ones
    assert plan.sorted() == 0, plan.text
