"""What every signal promises, whatever it is made of; each test runs over LISTEN/NOTIFY and over Redis."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pgtruth_transport.db import Database
from pgtruth_transport.settings import Settings
from pgtruth_transport.signals import Listener, Signal, Woken, open_signal

NAMES = ["celery", "Ünïcödé-очередь-" * 40, 'with "quotes", %s and {braces}', "🦀", "a\nb", "", "x" * 5000]


@pytest.fixture(params=["notify", "redis"])
def signal(request: pytest.FixtureRequest, database_url: str) -> Iterator[Signal]:
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    # its time limits are test_signals_faults' business; here a busy machine must not reach them
    settings = Settings.make(database_url, {"signal_url": url, "signal_timeout": 10})
    database = Database(settings)
    yield open_signal(settings, database)
    database.close()


@pytest.fixture
def listen(signal: Signal) -> Iterator[Callable[..., Listener]]:
    """Make a listener whose subscriptions have taken effect."""
    made: list[Listener] = []

    def make(*queues: str, results: bool = False) -> Listener:
        listener = signal.listener()
        made.append(listener)
        listener.watch(queues)
        if results:
            listener.watch_results()
        heard = hear(listener, lambda w: w.queues >= set(queues) and w.missed_results >= results)
        assert not heard.job_ids
        return listener

    yield make
    for listener in made:
        listener.close()


def hear(listener: Listener, enough: Callable[[Woken], Any], timeout: float = 10.0) -> Woken:
    """Everything heard until it is enough."""
    heard = Woken()
    deadline = time.monotonic() + timeout
    while not enough(heard):
        assert time.monotonic() < deadline, f"heard only {heard}"
        if listener.fileno() >= 0:
            select.select([listener.fileno()], [], [], 0.1)
        more = listener.drain()
        heard = Woken(
            heard.queues | more.queues, heard.job_ids | more.job_ids, heard.missed_results or more.missed_results
        )
    return heard


def test_a_subscription_that_takes_effect_wakes_its_queue(signal: Signal) -> None:
    listener = signal.listener()
    listener.watch(["a", "b"])
    assert hear(listener, lambda w: len(w.queues) == 2).queues == {"a", "b"}
    listener.watch(["b", "c"])
    assert hear(listener, lambda w: w.queues).queues == {"c"}
    listener.close()


def test_a_wake_reaches_every_listener_of_the_queue(signal: Signal, listen: Callable[..., Listener]) -> None:
    first, second, other = listen("q"), listen("p", "q"), listen("p")
    signal.wake({"q": ["job-1"]})
    assert hear(first, lambda w: w.queues) == Woken(frozenset({"q"}))
    assert hear(second, lambda w: w.queues) == Woken(frozenset({"q"}))
    signal.wake({"p": ["job-2"]})
    assert hear(other, lambda w: w.queues) == Woken(frozenset({"p"}))


def test_a_queue_that_is_no_longer_watched_is_not_reported(signal: Signal, listen: Callable[..., Listener]) -> None:
    listener = listen("old", "kept")
    listener.watch(["kept"])
    signal.wake({"old": ["1"]})
    signal.wake({"kept": ["2"]})
    assert hear(listener, lambda w: w.queues).queues == {"kept"}


@pytest.mark.parametrize("name", NAMES, ids=[f"{len(name)}-{name[:8]!r}" for name in NAMES])
def test_any_queue_name_works(signal: Signal, listen: Callable[..., Listener], name: str) -> None:
    listener = listen(name)
    signal.wake({name: ["1"], "somebody else's": ["2"]})
    assert hear(listener, lambda w: w.queues).queues == {name}


def test_one_call_wakes_many_queues(signal: Signal, listen: Callable[..., Listener]) -> None:
    names = [f"queue-{n}" for n in range(200)]
    listener = listen(*names)
    signal.wake({name: [f"job of {name}"] for name in names})
    assert hear(listener, lambda w: len(w.queues) == 200).queues == set(names)


def test_the_socket_becomes_readable(signal: Signal, listen: Callable[..., Listener]) -> None:
    listener = listen("q")
    assert select.select([listener.fileno()], [], [], 0)[0] == []
    signal.wake({"q": ["1"]})
    assert select.select([listener.fileno()], [], [], 10)[0] == [listener.fileno()]


def test_ends_are_announced_to_whoever_asked(signal: Signal, listen: Callable[..., Listener]) -> None:
    waiter, worker = listen(results=True), listen("q")
    ids = [f"{n}-{'é' * (n % 90)}" for n in range(5000)]
    signal.announce(ids)
    signal.wake({"q": ["1"]})
    assert hear(waiter, lambda w: len(w.job_ids) == 5000).job_ids == set(ids)
    assert hear(worker, lambda w: w.queues) == Woken(frozenset({"q"}))


def test_nothing_to_say_is_no_error(signal: Signal, listen: Callable[..., Listener]) -> None:
    listener = listen("q", results=True)
    signal.wake({})
    signal.announce([])
    assert listener.drain() == Woken()
    assert not Woken()


def test_a_burst_is_heard_at_once(signal: Signal, listen: Callable[..., Listener]) -> None:
    """Nothing of it stays in a buffer that the socket does not tell of."""
    listener = listen("q")
    for n in range(500):
        signal.wake({"q": [str(n)]})
    hear(listener, lambda w: w.queues)
    while select.select([listener.fileno()], [], [], 0.2)[0]:
        listener.drain()
    assert listener.drain() == Woken()


def test_drain_does_not_wait(listen: Callable[..., Listener]) -> None:
    listener = listen("q")
    start = time.monotonic()
    for _ in range(100):
        assert listener.drain() == Woken()
    assert time.monotonic() - start < 0.5


def test_a_wake_in_two_halves(signal: Signal, listen: Callable[..., Listener]) -> None:
    """What is sent is heard before its answer is read, and nobody's signal waits for that."""
    listener = listen("q", "other", "third")
    answers = [signal.send("q", "1")]
    assert hear(listener, lambda w: w.queues).queues == {"q"}
    signal.wake({"other": ["2"]})
    answers += [signal.send("third", "3"), signal.send("q", "4")]
    assert hear(listener, lambda w: len(w.queues) == 3).queues == {"other", "third", "q"}
    signal.announce(["x"])
    for answer in reversed(answers):
        answer()
        answer()


@pytest.mark.parametrize("halves", [1, 2])
def test_many_threads_may_wake(signal: Signal, listen: Callable[..., Listener], halves: int) -> None:
    names = {f"thread-{n}" for n in range(16)}
    listener = listen(*names)
    errors: list[BaseException] = []

    def run(name: str) -> None:
        try:
            for n in range(50):
                signal.wake({name: [str(n)]}) if halves == 1 else signal.send(name, str(n))()
        except BaseException as exc:
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    assert hear(listener, lambda w: w.queues == names)
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_forked_child_wakes_and_listens_on_connections_of_its_own(
    signal: Signal, listen: Callable[..., Listener]
) -> None:
    listener = listen("parent", "child")
    signal.wake({"parent": ["1"]})
    hear(listener, lambda w: w.queues)
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.wake({"child": ["2"]})
            mine = listener  # the parent's ear, in the child
            assert mine.fileno() == -1
            mine.watch(["parent"])
            hear(mine, lambda w: "parent" in w.queues)
            mine.close()
            code = 0
        finally:
            os._exit(code)
    assert hear(listener, lambda w: w.queues).queues == {"child"}
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    signal.wake({"parent": ["3"]})
    assert hear(listener, lambda w: w.queues).queues == {"parent"}


def test_close_is_final(signal: Signal, listen: Callable[..., Listener]) -> None:
    listener = listen("q")
    listener.close()
    listener.close()
    listener.watch(["q"])
    assert (listener.fileno(), listener.drain()) == (-1, Woken())


def test_a_listener_that_was_told_nothing_connects_to_nothing(signal: Signal) -> None:
    listener = signal.listener()
    assert (listener.fileno(), listener.drain()) == (-1, Woken())
    listener.watch([])
    assert (listener.fileno(), listener.drain()) == (-1, Woken())
    listener.close()


def test_silence_is_a_signal_too(database_url: str) -> None:
    settings = Settings.make(database_url, {"signal_url": "silent://"})
    signal = open_signal(settings, Database(settings))
    signal.wake({"q": ["1"]})
    signal.announce(["1"])
    listener = signal.listener()
    listener.watch(["q"])
    listener.watch_results()
    assert (signal.name, listener.fileno(), listener.drain()) == ("silent", -1, Woken())
    listener.close()
