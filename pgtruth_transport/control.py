"""``app.control`` with a revoke that lasts: it is written to the row, so it holds when no worker is up to hear it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from celery.app.control import Control as CeleryControl

from . import attempts
from .jobs import Stored
from .reaper import cancel
from .states import Status
from .transport_names import is_ours


class Control(CeleryControl):
    """Celery's remote control; see Celery's user guide, "Workers Guide: Revoke"."""

    def revoke(
        self,
        task_id: str | Iterable[str],
        destination: Any = None,
        terminate: bool = False,
        signal: str = "SIGTERM",
        **kwargs: Any,
    ) -> Any:
        """Cancel jobs: what is queued ends at once in the database, what a worker holds is that worker's to stop."""
        ids = [task_id] if isinstance(task_id, str) else [str(item) for item in task_id or ()]
        attempt = attempts.current()
        if attempt is not None and attempt.buffering:  # part of an end that is being collected
            attempt.stored.extend(Stored(item, Status.FAILED, "", "REVOKED", None, None, "revoked") for item in ids)
        elif ids and is_ours(self.app.conf):
            cancel(self.app, ids)
        return super().revoke(
            ids if not isinstance(task_id, str) else task_id,
            destination=destination,
            terminate=terminate,
            signal=signal,
            **kwargs,
        )
