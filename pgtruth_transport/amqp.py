"""``app.amqp`` that also says which times were relative: those the database counts by its own clock.

And that does not bind a queue to a channel, per publish, only to find that it has been declared.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from datetime import datetime
from functools import cached_property
from typing import Any

from celery.app.amqp import AMQP as CeleryAMQP
from celery.signals import before_task_publish
from celery.utils.time import maybe_make_aware
from kombu import Queue

from .transport.encoding import DELAY, EXPIRES_IN
from .transport_names import is_ours

#: Longer values and longer lists are Celery's, which shortens them.
_MOST_ITEMS, _MOST_CHARACTERS = 8, 64


def simple_repr(value: Any) -> str | None:
    """What Celery's ``saferepr`` makes of a few plain arguments, at a fifth of its time; ``None`` for any others."""
    if type(value) in (tuple, list) and len(value) <= _MOST_ITEMS:
        items = [_simple_item(item) for item in value]
        if None in items:
            return None
        text = ", ".join(items)  # type: ignore[arg-type]
        if type(value) is list:
            return f"[{text}]"
        return f"({text},)" if len(items) == 1 else f"({text})"
    return "{}" if value == {} and type(value) is dict else None


def _simple_item(item: Any) -> str | None:
    kind = type(item)
    if kind is str:
        return f"'{item}'" if len(item) <= _MOST_CHARACTERS and "'" not in item else None
    return str(item) if kind in (int, float, bool, type(None)) and -(10**18) < (item or 0) < 10**18 else None


class AMQP(CeleryAMQP):
    """Celery's message builder; a countdown stays a number of seconds, whatever the producer's clock says."""

    @cached_property
    def _ours(self) -> bool:
        return is_ours(self.app.conf)

    def as_task_v2(
        self,
        task_id: str,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: float | None = None,
        eta: Any = None,
        group_id: Any = None,
        group_index: Any = None,
        expires: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        ours = self._ours
        if ours and isinstance(eta, datetime):
            eta = maybe_make_aware(eta, self.app.timezone)
        if ours and options.get("argsrepr") is None:
            options["argsrepr"] = simple_repr(args or ())
        if ours and options.get("kwargsrepr") is None:
            options["kwargsrepr"] = simple_repr(kwargs or {})
        message = super().as_task_v2(
            task_id, name, args, kwargs, countdown, eta, group_id, group_index, expires, *rest, **options
        )
        if ours and countdown:
            message.headers[DELAY] = float(countdown)
        if ours and isinstance(expires, numbers.Real):
            message.headers[EXPIRES_IN] = float(expires)
        return message

    def _create_task_sender(self) -> Callable[..., Any]:
        send: Callable[..., Any] = super()._create_task_sender()
        if not self._ours:
            return send

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            if options.get("declare") is None and self._has_declared(producer, options):
                options["declare"] = []
            return send(producer, name, message, **options)

        return send_task_message

    def _has_declared(self, producer: Any, options: dict[str, Any]) -> bool:
        """What kombu's ``maybe_declare`` would find, after it has copied the queue and its exchange."""
        connection = getattr(producer, "__connection__", None)  # its channel would connect, and that is for the publish
        queue = options.get("queue")
        if queue is None and options.get("exchange") is None:
            queue = self.default_queue
        return (
            isinstance(queue, Queue)
            and queue.can_cache_declaration
            and connection is not None
            and hash(queue) in connection.declared_entities
            and not before_task_publish.receivers  # they are told what will be declared
        )
