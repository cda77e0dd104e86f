"""What listeners have in common: a link to a server that comes and goes, and a caller that must never wait for it.

Promises: ``drain`` neither raises nor waits. A lost link is replaced from a thread, 0.2 s later at first, 5 s at most;
until then the caller polls. Every subscription that takes effect reports its queue as woken, because what was sent
before was not heard: so a reconnect wakes every watched queue. A link that has gone silent is asked for a sign of life
and dropped if it gives none. If the process dies, nothing stays behind on the server.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from time import monotonic
from typing import Final, NamedTuple, Protocol

from . import LARGEST, Woken, results_channel, wake_channel
from .opening import Opening

logger = logging.getLogger(__name__)

FIRST_WAIT: Final = 0.2  # seconds that ``watch`` waits for a connection, and the first pause before a reconnect
LONGEST_PAUSE: Final = 5.0
USELESS_PAUSE: Final = 60.0
QUIET: Final = 10.0  # after so many silent seconds the server is asked for a sign of life ...
ANSWER: Final = 5.0  # ... and has so many to give one


class Event(NamedTuple):
    """Something that a link heard. No payload: the subscription has taken effect (channel "": a sign of life)."""

    channel: str
    payload: bytes | None


class LinkLost(ConnectionError):
    """The server has stopped answering."""


class LinkUseless(ConnectionError):
    """Connected, but nothing will ever be heard here; the reason has been logged."""


class Link(Protocol):
    """A connection that hears. Its methods must not wait; they raise when it is lost."""

    def fileno(self) -> int: ...

    def subscribe(self, add: Sequence[str], remove: Sequence[str]) -> None: ...

    def read(self) -> Iterable[Event]: ...

    def ping(self) -> None: ...

    def close(self) -> None: ...


class LinkListener:
    """A :class:`~pgtruth_transport.signals.Listener` over links that ``open`` makes; ``open`` may take its time."""

    def __init__(
        self, schema: str, open: Callable[[], Link], errors: tuple[type[BaseException], ...], where: str
    ) -> None:
        self._schema = schema
        self._open = open
        self._errors: tuple[type[BaseException], ...] = (*errors, OSError)
        self._where = where
        self._results = results_channel(schema)
        self._queues: dict[str, str] = {}  # channel -> queue
        self._hears_results = False
        self._lost_before = False
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._link: Link | None = None
        self._opening: Opening[Link] | None = None
        self._subscribed: frozenset[str] = frozenset()
        self._pause = FIRST_WAIT
        self._next_try = 0.0
        self._heard_at = 0.0
        self._pinged_at: float | None = None

    # -- what the caller uses ------------------------------------------------------------------------------------

    def watch(self, queues: Iterable[str]) -> None:
        """Listen to exactly these queues; waits at most 0.2 s for the first connection."""
        self._queues = {wake_channel(self._schema, queue): queue for queue in queues}
        self._apply()

    def watch_results(self) -> None:
        """Listen to ends of jobs as well."""
        self._hears_results = True
        self._apply()

    def fileno(self) -> int:
        """The socket to wait on, -1 without one."""
        return self._link.fileno() if self._link is not None and self._pid == os.getpid() else -1

    def drain(self) -> Woken:
        """What has come in; see the module."""
        self._leave_parent()
        if self._closed:
            return Woken()
        try:
            link = self._link or self._connect(0.0)
            if link is None:
                return Woken()
            events = list(link.read())
            self._feel_pulse(link, bool(events))
        except self._errors as exc:
            self._lose(exc)
            return Woken()
        return self._woken(events)

    def close(self) -> None:
        """Close the link, also one that is still being opened."""
        self._leave_parent()
        self._closed = True
        if self._opening is not None:
            self._opening.abandon()
        if self._link is not None:
            _close(self._link)
        self._reset()

    # -- the link ------------------------------------------------------------------------------------------------

    def _wanted(self) -> frozenset[str]:
        return frozenset(self._queues) | ({self._results} if self._hears_results else frozenset())

    def _apply(self) -> None:
        self._leave_parent()
        if self._closed:
            return
        try:
            if self._link is None:
                self._connect(FIRST_WAIT)
            else:
                self._subscribe(self._link)
        except self._errors as exc:
            self._lose(exc)

    def _connect(self, patience: float) -> Link | None:
        """The link, subscribed to all that is wanted. Whoever begins to open it waits ``patience`` seconds at most."""
        if self._opening is not None:
            patience = 0.0
        elif self._wanted() and monotonic() >= self._next_try:
            self._opening = Opening(self._open, _close, "pgtruth-listen")
        else:
            return None
        if not self._opening.wait(patience):
            return None
        opening, self._opening = self._opening, None
        link = opening.take()
        self._link, self._subscribed = link, frozenset()
        self._heard_at, self._pinged_at = monotonic(), None
        self._subscribe(link)
        return link

    def _subscribe(self, link: Link) -> None:
        wanted = self._wanted()
        add, remove = wanted - self._subscribed, self._subscribed - wanted
        self._subscribed = wanted
        if add or remove:
            link.subscribe(sorted(add), sorted(remove))

    def _feel_pulse(self, link: Link, heard: bool) -> None:
        now = monotonic()
        if heard:
            if self._lost_before:
                logger.info("hearing signals from %s again", self._where)
            self._lost_before, self._pause = False, FIRST_WAIT
            self._heard_at, self._pinged_at = now, None
        elif self._pinged_at is not None:
            if now - self._pinged_at > ANSWER:
                raise LinkLost(f"no answer within {ANSWER:g} s")
        elif now - self._heard_at > QUIET:
            self._pinged_at = now
            link.ping()

    def _lose(self, exc: BaseException) -> None:
        level = logging.DEBUG if self._lost_before or isinstance(exc, LinkUseless) else logging.WARNING
        logger.log(level, "not hearing signals from %s, polling until it is back: %s", self._where, exc)
        self._lost_before = True
        if self._link is not None:
            _close(self._link)
        self._link, self._subscribed = None, frozenset()
        pause = USELESS_PAUSE if isinstance(exc, LinkUseless) else self._pause
        self._next_try = monotonic() + pause * random.uniform(0.8, 1.0)
        self._pause = min(self._pause * 2, LONGEST_PAUSE)

    def _leave_parent(self) -> None:
        """In a forked child the link is the parent's: let go of it without a word, and open another."""
        if self._pid != os.getpid():
            self._reset()

    def _woken(self, events: Collection[Event]) -> Woken:
        queues: set[str] = set()
        job_ids: set[str] = set()
        missed, ignored = False, 0
        for channel, payload in events:
            text = _text(payload)
            if text is None:
                ignored += 1
            elif channel in self._queues:
                queues.add(self._queues[channel])
            elif channel == self._results and payload is None:
                missed = True
            elif channel == self._results:
                job_ids.update(filter(None, text.split("\n")))
        if ignored:
            logger.debug("ignored %d signal(s) from %s that are not ours", ignored, self._where)
        return Woken(frozenset(queues), frozenset(job_ids), missed)


def _text(payload: bytes | None) -> str | None:
    """The payload as text ("" for none); None for what nobody of ours has sent."""
    if payload is None:
        return ""
    if len(payload) >= LARGEST:
        return None
    try:
        return payload.decode()
    except UnicodeDecodeError:
        return None


def _close(link: Link) -> None:
    try:
        link.close()
    except Exception as exc:  # it is being dropped: whatever is wrong with it no longer matters
        logger.debug("closing a link: %s", exc)
