"""What beat starts by itself. ``install`` adds the sweep (``pgtruth.reap``) to these entries."""

from __future__ import annotations

from typing import Any

from celery.schedules import crontab

from celery_app.settings import AppSettings


def entries(settings: AppSettings) -> dict[str, dict[str, Any]]:
    """The beat schedule: names, tasks, times (UTC)."""
    return {
        "nightly-report": {
            "task": "tasks.reports.start_report",
            "schedule": crontab(hour=2, minute=30),
            "args": [str(settings.images), str(settings.output / "reports")],
        },
        "nightly-clean-up": {
            "task": "tasks.cleanup.remove_old_files",
            "schedule": crontab(hour=3, minute=0),
            "args": [str(settings.output), settings.keep_output_hours],
        },
    }
