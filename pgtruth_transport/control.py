"""``app.control`` with a revoke that lasts: it is written to the row, so it holds when no worker is up to hear it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from celery.app.control import Control as CeleryControl
from kombu.utils.json import dumps, loads

from . import attempts
from .endings import acting_for
from .jobs import Stored
from .reaper import cancel
from .runtime import runtime
from .settings import Settings
from .states import Status
from .transport_names import is_ours


class Control(CeleryControl):
    """Celery's remote control; see Celery's user guide, "Workers Guide: Revoke"."""

    def purge(self, connection: Any = None) -> int:
        """Discard all waiting tasks: they end as revoked, and their chords and chains are told."""
        with acting_for(self.app):
            return int(super().purge(connection))

    discard_all = purge

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

    def revoke_by_stamped_headers(self, headers: Any, *args: Any, **kwargs: Any) -> Any:
        """Cancel jobs by their stamps: what is queued now ends in the database, workers refuse what comes later."""
        wanted = dict(item.split("=", 1) for item in headers) if isinstance(headers, list) else headers
        if wanted and is_ours(self.app.conf):
            for ids in _stamped(self.app, wanted):
                cancel(self.app, ids)
        return super().revoke_by_stamped_headers(headers, *args, **kwargs)


BATCH = 1000


def _stamped(app: Any, wanted: Mapping[str, Any]) -> Iterator[list[str]]:
    """The ids of queued jobs with one of these stamps, in batches."""
    database = runtime(Settings.from_app(app)).database
    names = [dumps(name).encode() for name in wanted]
    after = ""
    while True:
        with database.connection() as conn:
            params = {"after": after, "names": names, "count": BATCH}
            rows = conn.execute(database.sql("job_stamped"), params).fetchall()
        found = [job_id for job_id, encoded in rows if has_stamp(loads(bytes(encoded)), wanted)]
        if found:
            yield found
        if len(rows) < BATCH:
            return
        after = rows[-1][0]


def has_stamp(headers: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a message has one of the wanted stamps (each one value or several), as Celery's worker judges."""
    stamps = headers.get("stamps") or {}
    return any(
        value in _several(wanted[name])
        for name in headers.get("stamped_headers") or ()
        if name in wanted
        for value in _several(stamps.get(name))
    )


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [] if value is None else [value]
