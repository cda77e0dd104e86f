"""``tests.apps.basic`` with a queue of which every worker has its own."""

from __future__ import annotations

from kombu import Queue
from kombu.common import Broadcast

from tests.apps.basic import app

app.conf.task_queues = (Queue("celery"), Broadcast("everyone"))
