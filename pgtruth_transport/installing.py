"""``install(app)``: the one call of a team that wants the contract's whole policy."""

from __future__ import annotations

from typing import Any, Final

from .runtime import runtime
from .settings import Settings
from .task import PlainTruthTask, TruthTask
from .transport_names import is_ours

REAP: Final = "pgtruth.reap"


def install(app: Any, *, retry_failures: bool = True) -> Any:
    """Give ``app`` the contract's retry policy, visible starts and the reaper's beat entry; returns ``app``.

    Call it right after ``Celery(...)`` and its configuration, before tasks are declared. ``retry_failures=False`` keeps
    Celery's meaning of an exception. What the user has set stays. Raises :class:`SettingsError` for an app whose broker
    is not ``pgtruth://``, or whose options are wrong.
    """
    settings = Settings.from_app(app)
    base = TruthTask if retry_failures else PlainTruthTask
    limited = type(
        "TruthTask", (base,), {"abstract": True, "__module__": __name__, "max_retries": settings.retry_limit}
    )
    app.task_cls = limited
    app.__dict__.pop("Task", None)
    if not app.conf.value_set_for("task_track_started"):
        app.conf.task_track_started = True
    if is_ours(app.conf):
        _schedule_reaper(app, settings)
    return app


def _schedule_reaper(app: Any, settings: Settings) -> None:
    from .reaper import sweep_if_due

    @app.task(name=REAP, base=PlainTruthTask, ignore_result=True, expires=settings.reap_interval, shared=False)
    def reap() -> None:
        """The sweep, as a beat entry; every worker does it as well when it is due."""
        sweep_if_due(app, *runtime(settings)[1:], owner="beat")

    schedule = dict(app.conf.beat_schedule or {})
    schedule.setdefault(REAP, {"task": REAP, "schedule": settings.reap_interval})
    app.conf.beat_schedule = schedule
