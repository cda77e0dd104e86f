"""Beat's part: the task ``pgtruth.reconcile`` and its entry in the schedule."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from pgtruth_transport.effects.reconciling import reconcile_due
from pgtruth_transport.settings import Settings

TASK: Final = "pgtruth.reconcile"


def register(app: Any, every: float = 30.0) -> Any:
    """Give ``app`` the task, and a beat entry of that name every ``every`` seconds unless it has one."""

    @app.task(name=TASK, ignore_result=True, shared=False, max_retries=0, expires=every)
    def reconcile(limit: int = 100) -> dict[str, int]:
        """Ask the recipients of unknown effects what became of them."""
        return asdict(reconcile_due(Settings.from_app(app), limit))

    schedule = dict(app.conf.beat_schedule or {})
    schedule.setdefault(TASK, {"task": TASK, "schedule": every, "options": {"expires": every}})
    app.conf.beat_schedule = schedule
    return reconcile
