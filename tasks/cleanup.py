"""Nightly clean-up of what the other tasks wrote."""

from __future__ import annotations

import time
from pathlib import Path

from celery import shared_task


@shared_task
def remove_old_files(folder: str, hours: float) -> int:
    """Remove files under ``folder`` that nobody has written for ``hours``; returns how many."""
    removed = 0
    for path in old_files(Path(folder), time.time() - hours * 3600):
        path.unlink(missing_ok=True)  # another clean-up may have been quicker
        removed += 1
    return removed


def old_files(folder: Path, before: float) -> list[Path]:
    """Files under ``folder`` last written before the time ``before`` (seconds since 1970)."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_mtime < before)
