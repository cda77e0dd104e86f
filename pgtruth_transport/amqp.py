"""``app.amqp`` that also says which times were relative: those the database counts by its own clock."""

from __future__ import annotations

import numbers
from datetime import datetime
from functools import cached_property
from typing import Any

from celery.app.amqp import AMQP as CeleryAMQP
from celery.utils.time import maybe_make_aware

from .transport.encoding import DELAY, EXPIRES_IN
from .transport_names import is_ours


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
        message = super().as_task_v2(
            task_id, name, args, kwargs, countdown, eta, group_id, group_index, expires, *rest, **options
        )
        if ours and countdown:
            message.headers[DELAY] = float(countdown)
        if ours and isinstance(expires, numbers.Real):
            message.headers[EXPIRES_IN] = float(expires)
        return message
