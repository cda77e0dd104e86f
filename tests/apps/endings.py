"""Tasks that end in ways that Celery reports without a result: see ``tests.apps.basic``."""

from __future__ import annotations

import sys

from tests.apps.basic import app


@app.task
def out_of_memory() -> None:
    """Raises what Celery does not count as a failure of the task."""
    raise MemoryError("no more")


@app.task
def leaves() -> None:
    """Ends its process, or its thread."""
    sys.exit(3)
