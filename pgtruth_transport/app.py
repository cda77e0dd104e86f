"""What the URLs alone do to a Celery app: defaults that its user has not set, and three plug-ins.

The defaults are added when an app is created (Celery's fix-ups) and take effect where its user has set nothing; the
plug-ins come in when it is finalised. An app with another broker is left alone.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable
from datetime import datetime
from typing import Any

from celery.utils.time import maybe_make_aware

from .transport_names import is_ours

STEP = "pgtruth_transport.worker.step:PgTruthStep"
CONTROL = "pgtruth_transport.control:Control"

#: Settings that a queue with leases needs; whatever the user has set stays.
DEFAULTS = {
    "task_acks_late": True,  # a crash loses nothing
    "task_reject_on_worker_lost": True,  # a lost child is a failure that counts, not the end of the job
    "broker_connection_retry_on_startup": True,
}


def fixup(app: Any) -> None:
    """Celery calls this for every app that is created; the defaults are asked for once its configuration is known."""
    app.add_defaults(lambda: dict(DEFAULTS) if is_ours(app.conf) else {})


def prepare(app: Any) -> None:
    """Make ``app`` ready for ``pgtruth://``, if that is its broker."""
    if not is_ours(app.conf):
        return
    app.steps["consumer"].add(STEP)
    if app.control_cls == "celery.app.control:Control":
        app.control_cls = CONTROL
    amqp = app.amqp
    amqp.__dict__["create_task_message"] = relative_times(app, amqp.create_task_message)


def relative_times(app: Any, create: Callable[..., Any]) -> Callable[..., Any]:
    """Celery's ``create_task_message``, which also says what was relative: the database counts that itself."""

    def create_task_message(
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
        if isinstance(eta, datetime):
            eta = maybe_make_aware(eta, app.timezone)
        message = create(task_id, name, args, kwargs, countdown, eta, group_id, group_index, expires, *rest, **options)
        if countdown:
            message.headers["pgtruth_delay"] = float(countdown)
        if isinstance(expires, numbers.Real):
            message.headers["pgtruth_expires_in"] = float(expires)
        return message

    return create_task_message
