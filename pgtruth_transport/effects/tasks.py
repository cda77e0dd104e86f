"""Beat's part: the task ``pgtruth.reconcile`` and its entry in the schedule.

The first declaration of an effect gives both to every app whose broker is ``pgtruth://``, so that a dead attempt's
effect is asked about without anybody having to arrange it. Rounds may overlap: each due effect has one asker at a time.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final
from weakref import WeakSet

from celery._state import _get_active_apps, connect_on_app_finalize

from pgtruth_transport.effects.reconciling import reconcile_due
from pgtruth_transport.settings import Settings
from pgtruth_transport.transport_names import is_ours

TASK: Final = "pgtruth.reconcile"
EVERY: Final = 30.0
_registered: WeakSet[Any] = WeakSet()


def register(app: Any, every: float = EVERY) -> None:
    """Give ``app`` the task, and a beat entry every ``every`` seconds unless its schedule has one for it already."""
    if app not in _registered:
        _registered.add(app)
        _add_task(app)
    schedule = dict(app.conf.beat_schedule or {})
    if schedule.get(TASK) == _entry(EVERY):
        del schedule[TASK]
    if all(entry.get("task") != TASK for entry in schedule.values()):
        app.conf.beat_schedule = {**schedule, TASK: _entry(every)}


def _add_task(app: Any) -> None:
    @app.task(name=TASK, ignore_result=True, shared=False, max_retries=0)
    def reconcile(limit: int = 100) -> dict[str, int]:
        """Ask the recipients of unknown effects what became of them."""
        return asdict(reconcile_due(Settings.from_app(app), limit))


def _entry(every: float) -> dict[str, Any]:
    return {"task": TASK, "schedule": every, "options": {"expires": every}}


def offer() -> None:
    """Register with every app with a ``pgtruth://`` broker: those there are, and those to come."""
    connect_on_app_finalize(_give)  # a set: asking again changes nothing
    for app in list(_get_active_apps()):
        if app.finalized:
            _give(app)


def _give(app: Any) -> None:
    if is_ours(app.conf) and app not in _registered:
        register(app)
