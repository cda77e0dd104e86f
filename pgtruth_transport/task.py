"""``TruthTask``: the contract's retry policy on Celery's own autoretry, and foreign result backends told last."""

from __future__ import annotations

from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject

from .effects.errors import FINAL
from .foreign import settled_first


class TruthTask(Task):
    """A task whose exceptions are failures to be retried (contract section 4).

    At most ``retry_limit`` times (a task's own ``max_retries`` wins), with exponential back-off and jitter from 1 s; a
    crash, a lost child and a time-out spend the same budget. See Celery's "Automatic retry for known exceptions".
    """

    abstract = True
    autoretry_for: tuple[type[BaseException], ...] = (Exception,)
    dont_autoretry_for = (Ignore, Reject, *FINAL)  # an effect that ends the same way however often it is asked
    retry_backoff = 1
    retry_backoff_max = 600
    retry_jitter = True
    #: A hard time limit counts as a failure to be retried as well.
    truth_retries_failures = True

    @property
    def backend(self) -> Any:
        """The result backend; one that is not ours is told only what the database has accepted."""
        return settled_first(self._backend or self.app.backend)

    @backend.setter
    def backend(self, value: Any) -> None:
        self._backend = value


class PlainTruthTask(TruthTask):
    """``TruthTask`` with Celery's own meaning of an exception (``install(app, retry_failures=False)``)."""

    abstract = True
    autoretry_for = ()
    truth_retries_failures = False
