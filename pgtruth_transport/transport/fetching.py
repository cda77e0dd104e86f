"""Reading for the consumers of one connection, and handing over: messages, and jobs where no Celery worker consumes.

Promises: nothing is read that no consumer has room for; what a consumer holds is renewed as long as it drains, and its
transient queues are kept alive. If this process dies, leases run out and others get what it held.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from .. import lifecycle
from . import encoding, messages

if TYPE_CHECKING:
    from .channel import Channel
    from .transport import Transport

#: Messages fetched per statement.
BATCH = 100
#: Messages that one ``drain_events`` hands to a consumer that acknowledges, within its prefetch count.
AT_ONCE = 10
#: How many leases a plain consumer's message lasts; renewed while the consumer drains.
MESSAGE_LEASES = 4


class Fetcher:
    """What one connection has to look for, and what its consumers hold."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._database = transport.runtime.database
        self._lease = transport.settings.lease_seconds * MESSAGE_LEASES
        self.messages_due = True
        self.jobs_due = True
        self._held_until: dict[int, float] = {}
        self._ahead: deque[messages.Delivery] = deque()  # read for consumers that acknowledge nothing

    def look(self) -> None:
        """There may be something of either kind."""
        self.messages_due = self.jobs_due = True

    def consumed(self) -> dict[str, Channel]:
        """The queues that are consumed from, and by which channel."""
        return {queue: channel for channel in self._transport.channels for queue in channel._active_queues}

    def fetch_messages(self) -> int:
        """Deliver what is not a task; returns how many."""
        if self._ahead:
            self._deliver(self._ahead.popleft())
            return 1
        if not self.messages_due or not self._transport._callbacks:
            return 0
        self.messages_due = False
        count = 0
        for channel in list(self._transport.channels):
            for no_ack in (True, False):
                queues = [q for q in channel._active_queues if bool(channel.no_ack.get(q)) is no_ack]
                room = self._room(channel, no_ack)
                if queues and room:
                    count += self._fetch(queues, room, no_ack)
        return count

    def _fetch(self, queues: list[str], room: int, no_ack: bool) -> int:
        owner = None if no_ack else self._transport.owner
        with self._database.connection(patience=self._transport.patience) as conn:
            found = messages.fetch(conn, self._database, queues, room, owner, self._lease)
        self.messages_due = self.messages_due or len(found) >= room
        if no_ack and self._transport.loop is None:  # such a consumer counts its calls of drain_events
            self._ahead.extend(found[1:])
            found = found[:1]
        for delivery in found:
            if not no_ack:
                self._held_until[delivery.id] = time.monotonic() + self._lease / 2
            self._deliver(delivery)
        return len(found)

    def _deliver(self, delivery: messages.Delivery) -> None:
        callback = self._transport._callbacks.get(delivery.queue)
        if callback is not None:
            callback(delivery.payload)

    def _room(self, channel: Channel, no_ack: bool) -> int:
        """How many messages a channel may take now."""
        if no_ack:
            return BATCH
        most = AT_ONCE if self._transport.loop is None else BATCH
        estimate = channel.qos.can_consume_max_estimate()
        return most if estimate is None else min(most, estimate)

    def fetch_plain_job(self) -> int:
        """A job for a consumer that is no Celery worker: it acknowledges, nobody renews."""
        self.jobs_due = False
        for queue, channel in self.consumed().items():
            if channel.qos.can_consume():
                payload = self._claim_one(queue)
                if payload is not None:
                    self.jobs_due = True
                    channel.remember_plain(payload)
                    if channel.no_ack.get(queue):
                        channel.settle(payload["properties"]["delivery_tag"], acknowledge=True, requeue=False)
                    self._transport._callbacks[queue](payload)
                    return 1
        return 0

    def _claim_one(self, queue: str) -> encoding.Payload | None:
        search = lifecycle.Search((queue,) * 10, tuple(range(9, -1, -1)), (), (), (), ())
        with self._database.connection(patience=self._transport.patience) as conn:
            jobs = lifecycle.claimed(lifecycle.claim(conn, self._database, search, 1, self._transport.owner))
        return {**encoding.payload(jobs[0]), "claimed_at": jobs[0].claimed_at} if jobs else None

    def get_one(self, queue: str, owner: str | None) -> encoding.Payload | None:
        """One message or job of a queue, for ``basic_get``."""
        with self._database.connection(patience=self._transport.patience) as conn:
            found = messages.fetch(conn, self._database, [queue], 1, owner, self._lease)
        return found[0].payload if found else self._claim_one(queue)

    def touch(self) -> None:
        """Keep the consumers' transient queues and unacknowledged messages alive."""
        now = time.monotonic()
        due = [message_id for message_id, when in self._held_until.items() if when <= now]
        with self._database.connection(patience=self._transport.patience) as conn:
            self._transport.entities.touch(conn, list(self.consumed()))
            if due:
                kept = messages.renew(conn, self._database, due, self._transport.owner, self._lease)
                self._held_until = {
                    m: now + self._lease / 2 if m in due else w
                    for m, w in self._held_until.items()
                    if m not in due or m in kept
                }
