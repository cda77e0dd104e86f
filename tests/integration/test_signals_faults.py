"""Signals when servers refuse, hang, vanish or fill up, on real servers behind a proxy that fails on command."""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import redis

from pgtruth_transport.db import Database
from pgtruth_transport.errors import SettingsError
from pgtruth_transport.settings import Settings
from pgtruth_transport.signals import (
    Listener,
    Signal,
    SignalError,
    Woken,
    listening,
    open_signal,
    result_payloads,
    wake_channel,
)
from pgtruth_transport.signals.listening import LinkListener
from tests.support_proxy import Proxy

Open = Callable[[str], Signal]
TOLERANCE = 0.3  # seconds: two busy cores


@pytest.fixture
def open_with() -> Open:
    """Open a Redis signal by its URL. It has nothing to do with the database, which is not there."""

    def make(signal_url: str) -> Signal:
        settings = Settings.make("pgtruth://nobody@127.0.0.1:1/nowhere", {"signal_url": signal_url})
        return open_signal(settings, Database.of(settings))

    return make


@pytest.fixture
def redis_proxy(redis_url: str) -> Iterator[Proxy]:
    parts = urlsplit(redis_url)
    with Proxy(parts.hostname or "", parts.port or 6379) as proxy:
        yield proxy


@pytest.fixture
def postgres_proxy(database_url: str) -> Iterator[Proxy]:
    parts = urlsplit(database_url)
    with Proxy(parts.hostname or "", parts.port or 5432) as proxy:
        yield proxy


@pytest.fixture(params=["notify", "redis"])
def link(request: pytest.FixtureRequest, database_url: str) -> Iterator[tuple[Signal, Signal, Proxy]]:
    """A signal that goes through a proxy, one that does not, and the proxy."""
    options: dict[str, str | None] = {"signal_url": None}
    behind = database_url
    if request.param == "redis":
        proxy: Proxy = request.getfixturevalue("redis_proxy")
        options["signal_url"] = request.getfixturevalue("redis_url")
        through = Settings.make(database_url, {"signal_url": f"redis://127.0.0.1:{proxy.port}/0"})
    else:
        proxy = request.getfixturevalue("postgres_proxy")
        parts = urlsplit(database_url)
        behind = database_url.replace(f":{parts.port}/", f":{proxy.port}/")
        through = Settings.make(behind, options)
    direct = Settings.make(database_url, options)
    databases = [Database(through), Database(direct)]
    yield open_signal(through, databases[0]), open_signal(direct, databases[1]), proxy
    proxy.cut()
    for database in databases:
        database.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link may be silent for 0.3 s only."""
    monkeypatch.setattr(listening, "QUIET", 0.3)
    monkeypatch.setattr(listening, "ANSWER", 0.3)


def drain(listener: Listener) -> Woken:
    """Drain, and make sure that it did not take long."""
    start = time.monotonic()
    woken = listener.drain()
    assert time.monotonic() - start < 0.2
    return woken


def hear(listener: Listener, enough: Callable[[Woken], Any], timeout: float = 15.0) -> Woken:
    """What one drain says, once it is enough."""
    deadline = time.monotonic() + timeout
    while not enough(woken := drain(listener)):
        assert time.monotonic() < deadline
        select.select([listener.fileno()] if listener.fileno() >= 0 else [], [], [], 0.02)
    return woken


def follow(signal: Signal, *queues: str) -> LinkListener:
    listener = signal.listener()
    assert isinstance(listener, LinkListener)
    listener.watch_results()
    listener.watch(queues)
    seen: set[str] = set()
    while seen != set(queues):
        seen |= hear(listener, lambda w: w.queues).queues
    return listener


def failing(signal: Signal, within: float) -> float:
    """How long a wake takes to fail."""
    start = time.monotonic()
    with pytest.raises(SignalError) as caught:
        signal.wake({"q": ["1"]})
    took = time.monotonic() - start
    assert took < within, caught.value
    return took


def test_a_listener_comes_back_after_a_cut_and_wakes_everything(
    link: tuple[Signal, Signal, Proxy], caplog: pytest.LogCaptureFixture
) -> None:
    signal, other, proxy = link
    caplog.set_level(logging.INFO, "pgtruth_transport")
    listener = follow(signal, "a", "b")
    for _ in range(3):
        proxy.cut()
        hear(listener, lambda w: listener.fileno() < 0)
        assert hear(listener, lambda w: w.queues == {"a", "b"}).missed_results
        other.wake({"b": ["1"]})
        assert hear(listener, lambda w: w.queues).queues == {"b"}
    said = [record.message for record in caplog.records if "hearing signals" in record.message]
    assert len(said) == 6, said
    assert "polling until it is back" in said[0]
    listener.close()


def test_a_listener_whose_server_refuses_does_not_wait_and_comes_back(link: tuple[Signal, Signal, Proxy]) -> None:
    signal, other, proxy = link
    proxy.refuse()
    listener = signal.listener()
    start = time.monotonic()
    listener.watch(["q"])
    assert time.monotonic() - start < 0.2 + TOLERANCE
    assert (listener.fileno(), drain(listener)) == (-1, Woken())
    proxy.heal()
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    other.wake({"q": ["1"]})
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    listener.close()


def test_a_listener_drops_a_link_that_swallows_everything(link: tuple[Signal, Signal, Proxy], impatient: None) -> None:
    signal, _, proxy = link
    listener = follow(signal, "q")
    proxy.hang()
    hear(listener, lambda w: listener.fileno() < 0)
    for _ in range(50):  # a connection is being opened that never will be
        assert drain(listener) == Woken()
    start = time.monotonic()
    for _ in range(50):
        listener.watch(["q", "r"])
    assert time.monotonic() - start < 0.2
    proxy.heal()
    assert hear(listener, lambda w: {"q", "r"} <= w.queues).missed_results
    listener.close()


def test_a_quiet_link_gives_signs_of_life(link: tuple[Signal, Signal, Proxy], impatient: None) -> None:
    signal, other, proxy = link
    listener = follow(signal, "q")
    accepted, until = proxy.accepted, time.monotonic() + 2.0
    while time.monotonic() < until:
        assert drain(listener) == Woken()
        select.select([listener.fileno()], [], [], 0.05)
    assert proxy.accepted == accepted
    other.wake({"q": ["1"]})
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    listener.close()


def test_back_off_between_reconnects(link: tuple[Signal, Signal, Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    signal, _, proxy = link
    listener = follow(signal, "q")
    monkeypatch.setattr(proxy, "_serve", lambda client: client.close())  # accepts and closes at once
    before, until = proxy.accepted, time.monotonic() + 2.0
    proxy.cut()
    while time.monotonic() < until:
        drain(listener)
        select.select([], [], [], 0.01)
    assert 2 <= proxy.accepted - before <= 10  # 0.2, 0.4, 0.8 ... (libpq may try twice, for TLS)
    monkeypatch.undo()
    hear(listener, lambda w: w.queues)
    listener.close()


def test_a_wake_fails_in_time_when_the_server_hangs(link: tuple[Signal, Signal, Proxy]) -> None:
    signal, _, proxy = link
    signal.wake({"q": ["0"]})
    proxy.hang()
    failing(signal, 0.5 + TOLERANCE)


# -- Redis ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["refuse", "hang"])
def test_a_thousand_wakes_with_redis_down_are_quick(redis_proxy: Proxy, open_with: Open, fault: str) -> None:
    signal = open_with(f"redis://127.0.0.1:{redis_proxy.port}/0")
    signal.wake({"q": ["0"]})
    getattr(redis_proxy, fault)()
    first = failing(signal, 0.5 + TOLERANCE)
    start = time.monotonic()
    for _ in range(999):
        failing(signal, 0.05 + TOLERANCE)
        signal.announce(["x"])
    assert first + time.monotonic() - start < 2.0
    redis_proxy.heal()
    _until_it_works(signal)


@pytest.mark.parametrize("fault", ["refuse", "hang"])
def test_the_first_wake_of_a_process_fails_in_time_as_well(redis_proxy: Proxy, open_with: Open, fault: str) -> None:
    getattr(redis_proxy, fault)()
    signal = open_with(f"redis://127.0.0.1:{redis_proxy.port}/0")
    failing(signal, 0.5 + TOLERANCE)
    failing(signal, TOLERANCE)
    redis_proxy.heal()
    _until_it_works(signal)


def test_an_answer_that_does_not_come_is_a_failure_in_time(redis_proxy: Proxy, open_with: Open) -> None:
    signal = open_with(f"redis://127.0.0.1:{redis_proxy.port}/0")
    signal.wake({"q": ["0"]})
    redis_proxy.hang()
    answer = signal.send("q", "1")
    start = time.monotonic()
    with pytest.raises(SignalError):
        answer()
    assert time.monotonic() - start < 0.5 + TOLERANCE
    redis_proxy.heal()
    _until_it_works(signal)
    redis_proxy.hang()  # else the answer may be back before the cut
    answer = signal.send("q", "2")
    redis_proxy.cut()
    redis_proxy.heal()
    signal.wake({"q": ["3"]})  # on another connection
    with pytest.raises(SignalError, match="was lost"):
        answer()


def test_after_a_failure_hardly_any_call_waits(redis_proxy: Proxy, open_with: Open) -> None:
    signal = open_with(f"redis://127.0.0.1:{redis_proxy.port}/0")
    redis_proxy.hang()
    failing(signal, 0.5 + TOLERANCE)
    waited, until = 0.0, time.monotonic() + 4.0
    while time.monotonic() < until:
        took = failing(signal, TOLERANCE)
        waited += took if took > 0.03 else 0.0
        select.select([], [], [], 0.01)
    assert waited < 0.6


def test_a_paused_redis_fails_in_time_three_times(redis_url: str, open_with: Open) -> None:
    signal = open_with(redis_url)
    with redis.Redis.from_url(redis_url) as client:
        client.client_pause(2500, all=True)
    start = time.monotonic()
    for _ in range(3):
        failing(signal, 0.5 + TOLERANCE)
        select.select([], [], [], 0.2)
    _until_it_works(signal)
    assert time.monotonic() - start > 2.0


def test_a_connection_that_redis_has_closed_is_noticed_before_it_is_used(redis_proxy: Proxy, open_with: Open) -> None:
    signal = open_with(f"redis://127.0.0.1:{redis_proxy.port}/0")
    for n in range(3):
        signal.wake({"q": [str(n)]})
        redis_proxy.cut()
        select.select([], [], [], 0.05)  # the reset is on its way
    assert redis_proxy.accepted == 3


def test_a_full_redis_still_signals_and_nothing_is_ever_stored(redis_url: str, open_with: Open) -> None:
    signal = open_with(redis_url)
    listener = follow(signal, "q")
    with redis.Redis.from_url(redis_url) as client:
        signal.wake({"q": ["1"]})
        signal.announce([str(n) for n in range(1000)])
        assert client.dbsize() == 0
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(redis.exceptions.OutOfMemoryError):
                client.set("filler", "x" * 1000)
            hear(listener, lambda w: w.queues)
            signal.wake({"q": ["2"]})
            assert hear(listener, lambda w: w.queues).queues == {"q"}
            fresh = follow(open_with(redis_url), "q")
            fresh.close()
        finally:
            client.config_set("maxmemory", "0")
        assert client.dbsize() == 0
    listener.close()


def test_flushing_redis_does_not_deafen_anybody(redis_url: str, open_with: Open) -> None:
    signal = open_with(redis_url)
    listener = follow(signal, "q")
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    signal.wake({"q": ["1"]})
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    listener.close()


@pytest.mark.parametrize(
    "junk", [b"\xff\xfe\x00", b"x" * 5_000_000, b"\r\n*3\r\n$7\r\nmessage\r\n"], ids=["binary", "huge", "protocol"]
)
def test_garbage_in_the_channels_is_ignored(
    redis_url: str, open_with: Open, junk: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "pgtruth_transport")
    signal = open_with(redis_url)
    listener = follow(signal, "q")
    with redis.Redis.from_url(redis_url) as client:
        for channel in ("pgtruth_r", wake_channel("pgtruth", "q")):
            for _ in range(3):
                client.publish(channel, junk)
    signal.announce(["good"])
    heard = hear(listener, lambda w: w.job_ids and "good" in w.job_ids)
    assert all(len(job_id) < 100 for job_id in heard.job_ids)
    if junk[0] != 13:
        assert heard == Woken(frozenset(), frozenset({"good"}))
        assert any("not ours" in record.message for record in caplog.records)
    listener.close()


def test_refused_commands_are_a_clear_error(redis_url: str, open_with: Open) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.acl_setuser("mute", enabled=True, passwords=["+pw"], commands=["+ping", "+select", "+client"])
        try:
            signal = open_with(redis_url.replace("redis://", "redis://mute:pw@"))
            with pytest.raises(SignalError, match=r"mute:\*\*@.*publish") as caught:
                signal.wake({"q": ["1"]})
            assert "pw@" not in str(caught.value)
            answer = open_with(redis_url.replace("redis://", "redis://mute:pw@")).send("q", "1")
            with pytest.raises(SignalError, match="publish"):
                answer()
        finally:
            client.acl_deluser("mute")


@pytest.mark.parametrize("url", ["redis://host:port/0", "redis://h:1/0?nonsense=1", "redis://:secret@h:x/0"])
def test_a_bad_signal_url_is_refused_at_once(open_with: Open, url: str) -> None:
    with pytest.raises(SettingsError, match="signal_url") as caught:
        open_with(url)
    assert "secret" not in str(caught.value)


# -- PostgreSQL ----------------------------------------------------------------------------------------------------


def test_a_terminated_listener_comes_back(settings: Settings, db: Database, conn: psycopg.Connection[Any]) -> None:
    listener = follow(open_signal(settings, db), "q")
    killed = conn.execute(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE application_name = 'pgtruth:listen' AND datname = current_database()"
    ).fetchone()
    assert killed == (1,)
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    listener.close()


def test_listen_without_effect_is_said_once(
    pg_server: Any, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As through a transaction pooler: LISTEN is accepted, and what is sent arrives elsewhere."""
    settings = Settings.make(database_url, {"listen_url": pg_server.url})
    database = Database(settings)
    signal = open_signal(settings, database)
    listener = signal.listener()
    listener.watch(["q"])
    hear(listener, lambda w: "LISTEN has no effect" in caplog.text)
    assert (listener.fileno(), drain(listener)) == (-1, Woken())
    second = signal.listener()
    second.watch(["q"])
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        assert (drain(second), second.fileno()) == (Woken(), -1)
        select.select([], [], [], 0.05)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1, warnings
    assert "Set listen_url" in warnings[0]
    signal.wake({"q": ["1"]})
    listener.close()
    second.close()
    database.close()


def test_listen_url_is_used_for_listening(database_url: str, postgres_proxy: Proxy) -> None:
    parts = urlsplit(database_url)
    direct = database_url.replace(f":{parts.port}/", f":{postgres_proxy.port}/")
    settings = Settings.make(database_url, {"listen_url": direct})
    database = Database(settings)
    signal = open_signal(settings, database)
    listener = follow(signal, "q")
    assert postgres_proxy.connections == 1
    signal.wake({"q": ["1"]})
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    listener.close()
    database.close()


def test_payloads_stay_below_what_notify_accepts() -> None:
    ids = [str(n) for n in range(10_000)] + ["é" * 3998, "x" * 7999, "x" * 8000, "é" * 4000]
    made = list(result_payloads(ids))
    assert all(len(text.encode()) < 8000 for text in made)
    assert [line for text in made for line in text.split("\n")] == ids[:-3]
    assert list(result_payloads([])) == []


def _until_it_works(signal: Signal) -> None:
    deadline = time.monotonic() + 5.0
    while True:
        try:
            signal.wake({"q": ["again"]})
        except SignalError:
            assert time.monotonic() < deadline
            select.select([], [], [], 0.02)
        else:
            return
