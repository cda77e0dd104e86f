"""The ledger's statements, as one attempt uses them: begin, finish, read, and what follows from an unknown effect.

Promises: an effect begins only under its unique key, in the transaction that checks the caller's lease; what a call
gave is recorded only by the one who began it, while its lease lasts; an unknown effect moves only if it is still
unknown about the call that was asked about. A crash between two statements leaves a row that says so: ``started`` under
a dead lease. All times are the database's.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

from psycopg.rows import dict_row

from pgtruth_transport.db import CONNECTION_ERRORS, Connection, Database, retrying
from pgtruth_transport.effects import codec
from pgtruth_transport.effects.kinds import Effect, Request
from pgtruth_transport.effects.states import EffectState

T = TypeVar("T")

#: Seconds for which an answer in hand is offered to a database that cannot be reached.
PATIENCE: Final = 5.0
#: Seconds until beat asks about an effect that has just become unknown; its job usually asks first.
FIRST_CHECK: Final = 5.0


class Holder(Protocol):
    """The attempt in whose name effects begin (:class:`pgtruth_transport.attempts.Attempt`)."""

    @property
    def job_id(self) -> str: ...
    @property
    def lease_version(self) -> int: ...
    @property
    def owned_by(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Row:
    """An effect as it stands."""

    key: str
    kind: str
    fingerprint: str
    payload: bytes
    state: EffectState
    calls: int
    token: str
    resource: str | None
    fence: int | None
    result: bytes | None
    late_result: bytes | None
    error: str | None
    live: bool  # started, by an attempt that still holds its lease
    age: float  # seconds since it became unknown, or since its call began

    def effect(self, fence: int | None = None) -> Effect:
        """The latest call of this effect, for the application's functions."""
        return Effect(
            key=self.key,
            kind=self.kind,
            payload=codec.decode(self.payload),
            number=self.calls,
            resource=self.resource,
            fence=self.fence if fence is None else fence,
            late_result=codec.decode(self.late_result),
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """Why an effect did not begin: the row, if there is one, and whether the reader's own lease stands."""

    lease_held: bool
    row: Row | None


@dataclass(frozen=True, slots=True)
class Begun:
    """Permission for one call, and the token that its answer is recorded under."""

    request: Request
    number: int
    fence: int | None
    token: str

    def effect(self, number: int | None = None) -> Effect:
        """This call, or an earlier one."""
        return Effect(
            key=self.request.key,
            kind=self.request.kind,
            payload=codec.decode(self.request.payload),
            number=self.number if number is None else number,
            resource=self.request.resource,
            fence=self.fence,
        )


class Ledger:
    """The effects' tables of one database, in the name of one attempt (or of nobody: ``holder=None``)."""

    def __init__(self, database: Database, holder: Holder | None, *, owner: str, outside_lease: float = 60.0) -> None:
        self._db = database
        self._outside_lease = outside_lease
        self.in_task = holder is not None
        self._lease = {
            "job_id": holder.job_id if holder else None,
            "lease_version": holder.lease_version if holder else None,
            "owned_by": holder.owned_by if holder else owner,
        }
        self.who = f"job {holder.job_id} attempt {holder.lease_version} of {holder.owned_by}" if holder else owner

    def begin(self, request: Request) -> Begun | None:
        """Permission to call, for exactly one caller; None: read why not."""
        token = uuid.uuid4().hex
        try:
            return retrying(lambda: self._begin(request, token))
        except CONNECTION_ERRORS:
            # The answer to COMMIT may be what was lost. Nobody else knows the token, so the row tells.
            row = self.read(request.key).row
            if row is not None and row.token == token and row.live:
                return Begun(request, row.calls, row.fence, token)
            raise

    def _begin(self, request: Request, token: str) -> Begun | None:
        with self._db.connection() as conn, conn.transaction() if request.numbered else nullcontext():
            # First, in a statement of its own: it queues up behind others on the resource, and the next statement must
            # see what they did.
            fence = self._draw(conn, request.resource) if request.numbered else None
            found = conn.execute(
                self._db.sql("effect_begin"),
                {
                    **self._lease,
                    "key": request.key,
                    "kind": request.kind,
                    "fingerprint": request.fingerprint,
                    "payload": request.payload,
                    "token": token,
                    "outside_lease": self._outside_lease,
                    "resource": request.resource,
                    "fence": fence,
                    "exclusive": request.exclusive,
                    "who": self.who,
                },
            ).fetchone()
        return None if found is None else Begun(request, int(found[0]), fence, token)

    def read(self, key: str) -> Seen:
        """The effect as it stands."""
        (found,) = self._rows("effect_read", {**self._lease, "key": key})
        lease_held = bool(found.pop("lease_held"))
        return Seen(lease_held, None if found["key"] is None else _row(found))

    def blockers(self, request: Request) -> list[Row]:
        """What is open on an ordered effect's resource, the oldest first."""
        found = self._rows("effect_blockers", {"resource": request.resource, "key": request.key})
        return [_row(values) for values in found]

    def finish(
        self, begun: Begun, state: EffectState, why: str, *, result: bytes | None = None, error: str | None = None
    ) -> EffectState | None:
        """Record what the call gave; the state that it led to, or None: it is no longer this caller's to record.

        A database that cannot be reached is asked again for ``PATIENCE`` seconds: an answer in hand is worth it.
        """
        parameters = {
            "key": begun.request.key,
            "token": begun.token,
            "state": state.value,
            "result": result,
            "error": codec.readable(error),
            "why": codec.readable(why),
            "who": self.who,
            "delay": FIRST_CHECK,
        }
        return _patiently(lambda: self._finish(begun, parameters))

    def _finish(self, begun: Begun, parameters: dict[str, Any]) -> EffectState | None:
        with self._db.connection() as conn:
            found = conn.execute(self._db.sql("effect_finish"), parameters).fetchone()
        if found is not None:
            return EffectState(found[0])
        row = self.read(begun.request.key).row
        written = (begun.token, parameters["state"], parameters["result"])
        if row is not None and (row.token, row.state, row.result) == written:
            return row.state  # by an earlier try, whose answer was lost
        return None

    def late(self, begun: Begun, why: str, result: bytes | None, *, refused: bool) -> None:
        """Keep what a call gave when it was no longer this caller's to record; it may cast doubt on "no effect"."""
        self._write(
            "effect_late",
            {
                "key": begun.request.key,
                "calls": begun.number,
                "fence": begun.fence,
                "result": result,
                "refused": refused,
                "delay": FIRST_CHECK,
                "who": self.who,
                "why": codec.readable(why),
            },
        )

    def lapse(self, row: Row) -> None:
        """Make a started effect unknown whose attempt is gone."""
        self._write("effect_lapse", {"key": row.key, "token": row.token, "who": self.who, "delay": FIRST_CHECK})

    def refence(self, row: Row) -> int | None:
        """A new, higher number for an ordered effect that is about to be asked about; None: it has moved on."""
        return retrying(lambda: self._refence(row))

    def _refence(self, row: Row) -> int | None:
        with self._db.connection() as conn, conn.transaction():
            fence = self._draw(conn, row.resource)
            parameters = {"key": row.key, "calls": row.calls, "fence": fence}
            kept = conn.execute(self._db.sql("effect_refence"), parameters).fetchone()
        return None if kept is None else fence

    def _draw(self, conn: Connection, resource: str | None) -> int:
        drawn = conn.execute(self._db.sql("effect_fence"), {"resource": resource}).fetchone()
        assert drawn is not None
        return int(drawn[0])

    def settle(self, row: Row, state: EffectState, why: str, *, result: bytes | None, who: str) -> bool:
        """Record what the recipient, or a person, says about an unknown effect; False: it has moved on."""
        parameters = {
            "key": row.key,
            "calls": row.calls,
            "state": state.value,
            "result": result,
            "who": codec.readable(who),
            "why": codec.readable(why),
        }
        return self._write("effect_settle", parameters) == 1

    def postpone(self, row: Row, error: str, delay: float) -> None:
        """The recipient could not say: ask again after ``delay`` seconds."""
        parameters = {"key": row.key, "calls": row.calls, "error": codec.readable(error), "delay": delay}
        self._write("effect_postpone", parameters)

    def note(self, key: str, why: str, *, who: str | None = None, fingerprint: str | None = None) -> None:
        """Put on record what moves nothing."""
        parameters = {"key": key, "who": codec.readable(who) or self.who, "why": codec.readable(why)}
        self._write("effect_note", {**parameters, "fingerprint": fingerprint})

    def _write(self, name: str, parameters: dict[str, Any]) -> int:
        return retrying(lambda: self._execute(name, parameters))

    def _execute(self, name: str, parameters: dict[str, Any]) -> int:
        with self._db.connection() as conn:
            return conn.execute(self._db.sql(name), parameters).rowcount

    def _rows(self, name: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        with self._db.connection() as conn, conn.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(self._db.sql(name), parameters).fetchall()


def _row(values: dict[str, Any]) -> Row:
    return Row(**{**values, "state": EffectState(values["state"])})


def _patiently(call: Callable[[], T]) -> T:
    deadline = time.monotonic() + PATIENCE
    pause = 0.05
    while True:
        try:
            return retrying(call)
        except CONNECTION_ERRORS:
            if time.monotonic() + pause > deadline:
                raise
        time.sleep(pause)
        pause = min(pause * 2, 1.0)
