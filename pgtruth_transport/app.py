"""What the URLs alone do to a Celery app: defaults that its user has not set, and three plug-ins.

Celery calls :func:`fixup` for every app that is created (Celery's fix-ups), before its configuration is known. So the
defaults are a promise, and each plug-in asks whether the broker is ours when it is used: an app with another broker
behaves as without this package.
"""

from __future__ import annotations

from typing import Any

from .transport_names import is_ours

STEP = "pgtruth_transport.worker.step:PgTruthStep"
CONTROL = "pgtruth_transport.control:Control"
AMQP = "pgtruth_transport.amqp:AMQP"

#: Settings that a queue with leases needs; whatever the user has set stays.
DEFAULTS = {
    "task_acks_late": True,  # a crash loses nothing
    "task_reject_on_worker_lost": True,  # a lost child is a failure that counts, not the end of the job
    "broker_connection_retry_on_startup": True,
}


def fixup(app: Any) -> None:
    """Prepare ``app`` for the case that its broker is ``pgtruth://``."""
    app.add_defaults(lambda: dict(DEFAULTS) if is_ours(app.conf) else {})
    app.steps["consumer"].add(STEP)
    if app.control_cls == "celery.app.control:Control":
        app.control_cls = CONTROL
    if app.amqp_cls == "celery.app.amqp:AMQP":
        app.amqp_cls = AMQP
