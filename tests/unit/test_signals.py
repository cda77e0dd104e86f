"""The parts of signals that need no server: batching, opening in the background, names of channels."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pgtruth_transport.signals import SignalError, results_channel, wake_channel
from pgtruth_transport.signals.batching import Batcher
from pgtruth_transport.signals.opening import Opening


class Sender:
    """Sends when it is let, and remembers what."""

    def __init__(self) -> None:
        self.sent: list[dict[str, str]] = []
        self.started = threading.Event()
        self.let = threading.Event()
        self.error: BaseException | None = None

    def __call__(self, queues: Mapping[str, str], deadline: float) -> None:
        self.started.set()
        assert self.let.wait(5)
        self.sent.append(dict(queues))
        if self.error is not None:
            raise self.error


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as exc:
            errors.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_what_is_asked_for_meanwhile_travels_together(eventually: Callable[..., Any]) -> None:
    sender = Sender()
    batcher = Batcher(sender, threading.Lock())
    threads = [in_thread(lambda: batcher({"first": "1"}, 5))[0]]
    assert sender.started.wait(5)
    threads += [in_thread(lambda n=n: batcher({f"q{n % 3}": str(n)}, 5))[0] for n in range(9)]  # type: ignore[misc]
    eventually(lambda: len(batcher._next.queues) == 3)
    sender.let.set()
    for thread in threads:
        thread.join()
    assert [sorted(queues) for queues in sender.sent] == [["first"], ["q0", "q1", "q2"]]


@pytest.mark.parametrize("error", [SignalError("down"), KeyboardInterrupt()])
def test_everybody_learns_that_it_was_not_sent(error: BaseException, eventually: Callable[..., Any]) -> None:
    sender = Sender()
    batcher = Batcher(sender, threading.Lock())
    leader, _ = in_thread(lambda: batcher({"first": "1"}, 5))
    assert sender.started.wait(5)
    followers = [in_thread(lambda: batcher({"q": "2"}, 5)) for _ in range(3)]
    eventually(lambda: batcher._next.queues)
    sender.error = error
    sender.let.set()
    leader.join()
    for thread, _ in followers:
        thread.join()
    assert len(sender.sent) == 2
    failed = [errors[0] for _, errors in followers]
    assert sum(isinstance(exc, SignalError) for exc in failed) >= 2
    sender.error = None
    batcher({"q": "3"}, 5)


def test_nobody_waits_longer_than_the_time_limit_for_another_thread() -> None:
    sender = Sender()
    batcher = Batcher(sender, threading.Lock())
    thread, _ = in_thread(lambda: batcher({"first": "1"}, 5))
    assert sender.started.wait(5)
    with pytest.raises(SignalError, match=r"within 0\.05 s"):
        batcher({"q": "2"}, 0.05)
    sender.let.set()
    thread.join()


def test_what_opens_too_late_is_closed() -> None:
    let, closed = threading.Event(), threading.Event()

    def open_late() -> str:
        assert let.wait(5)
        return "link"

    opening = Opening(open_late, lambda link: closed.set(), "test")
    assert not opening.wait(0.01)
    opening.abandon()
    let.set()
    assert closed.wait(5)


def test_what_was_opened_is_taken_or_its_error_is_raised() -> None:
    opening = Opening(lambda: "link", lambda link: None, "test")
    assert opening.wait(5)
    assert opening.take() == "link"

    def fail() -> str:
        raise LookupError("no such host")

    failed = Opening(fail, lambda link: None, "test")
    assert failed.wait(5)
    with pytest.raises(LookupError):
        failed.take()
    failed.abandon()


def test_channels_are_short_plain_and_different() -> None:
    names = ["celery", "celery ", "ü" * 5000, "\ud800", ""]
    schema = "s" * 40
    channels = {wake_channel(schema, name) for name in names} | {results_channel(schema)}
    assert len(channels) == len(names) + 1
    assert all(len(channel) < 63 and channel.isascii() for channel in channels)
