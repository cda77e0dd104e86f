"""Evidence from outside the queue: one line in a file for every body that starts, and one for every body that returns.

The demo compares this file with the tables, so that "each job ran once" does not rest on the queue's own word. A line
is one ``write`` to a file opened for appending, so that lines of several processes do not mix, and a line that
was written survives ``kill -9`` of its process.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, task_prerun


@dataclass(frozen=True, slots=True)
class Runs:
    """What the file says: how often each job's body started and returned."""

    started: Counter[str]
    returned: Counter[str]
    by_task: Counter[str]
    running: dict[str, int]  # job -> the process above the one that started it last and has not returned


def connect(path: Path) -> None:
    """From now on every task of this process leaves its lines in ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def started(task_id: str, task: Any, **_: object) -> None:
        _append(path, "start", task_id, task.name)

    def returned(task_id: str, task: Any, **_: object) -> None:
        _append(path, "return", task_id, task.name)

    task_prerun.connect(started, weak=False, dispatch_uid="celery_app.recorder.start")
    task_postrun.connect(returned, weak=False, dispatch_uid="celery_app.recorder.return")


def read(path: Path) -> Runs:
    """Count the lines; a last line that was cut off by a kill is left out."""
    runs = Runs(Counter(), Counter(), Counter(), {})
    if not path.exists():
        return runs
    for line in path.read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["what"] == "start":
            runs.started[event["job"]] += 1
            runs.by_task[event["task"]] += 1
            runs.running[event["job"]] = event["parent"]
        else:
            runs.running.pop(event["job"], None)
            runs.returned[event["job"]] += 1
    return runs


def _append(path: Path, what: str, job: str, task: str) -> None:
    line = (
        json.dumps(
            {"what": what, "job": job, "task": task, "pid": os.getpid(), "parent": os.getppid(), "at": time.time()}
        )
        + "\n"
    )
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)
