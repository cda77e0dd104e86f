"""The result backend ``pgtruth://``: results are part of the job's row, and ends are the lifecycle's business.

Promises: while an attempt runs or ends, everything that Celery stores is collected in it and written by its fenced
finish, so a stale attempt's result is never seen and a result never exists without its end. Reading goes to the row.
A crash loses nothing that a reader has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import partial
from typing import Any

from celery import states
from celery.backends.base import BaseBackend
from celery.exceptions import ImproperlyConfigured, NotRegistered, TaskRevokedError
from celery.result import GroupResult, result_from_tuple
from celery.utils.functional import _regen, arity_greater
from celery.utils.serialization import UnpickleableExceptionWrapper
from kombu.utils.encoding import ensure_bytes

from . import afterwards, attempts, chords, lifecycle, publish
from .attempts import Attempt
from .db import CONNECTION_ERRORS, retrying
from .errors import SettingsError, TransactionError
from .jobs import ChordPart, Ending, Stored, described, readable
from .runtime import Runtime, runtime
from .settings import Settings
from .signatures import group_members, ids_before
from .states import Outcome, Status
from .transactions.scope import join, published_inside
from .transport_names import is_ours
from .waiting import Waiting

_OURS = ("status", "result", "date_done", "task_id")


class PgTruthBackend(BaseBackend):
    """Celery's result backend over ``jobs``. See Celery's user guide, "Result Backends"."""

    supports_native_join = True
    supports_autoexpire = True  # the sweep deletes what is older than result_expires
    supports_result_compression = True
    supports_failure_expires = True
    persistent = True
    connection_errors = CONNECTION_ERRORS

    def __init__(self, app: Any, url: str | None = None, **kwargs: Any) -> None:
        self._app_settings = _settings(app, url)
        super().__init__(app, url=url or "pgtruth://", **kwargs)
        self._waiting: Waiting | None = None

    @property
    def runtime(self) -> Runtime:
        return runtime(self._app_settings)

    def as_uri(self, include_password: bool = False) -> str:
        if include_password:
            return str(self.url)
        return self._app_settings.masked() if "@" in str(self.url) else str(self.url)

    def exception_safe_to_retry(self, exc: BaseException) -> bool:
        return isinstance(exc, CONNECTION_ERRORS)

    # Storing.

    def _store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **kwargs: Any
    ) -> Any:
        attempt = attempts.find(task_id)
        encoded, meta = self._encode_parts(result, state, traceback, request)
        error = _error_text(result) if state in self.EXCEPTION_STATES else None
        if attempt is not None:
            self._store_own(attempt, result, state, encoded, meta, error)
        else:
            self._store_other(task_id, state, encoded, meta, error, request)
        return result

    def _encode_parts(self, result: Any, state: str, traceback: Any, request: Any) -> tuple[bytes | None, bytes | None]:
        """The encoded return value (of a success only) and the encoded rest, ``None`` where there is nothing in it."""
        found = self._get_result_meta(result, state, traceback, request)
        rest = {name: value for name, value in found.items() if name not in _OURS and value not in (None, [], ())}
        if state == states.SUCCESS:
            return ensure_bytes(self.encode(result)), ensure_bytes(self.encode(rest)) if rest else None
        return None, ensure_bytes(self.encode({**rest, "result": result}))

    def _store_own(
        self, attempt: Attempt, result: Any, state: str, encoded: bytes | None, meta: bytes | None, error: str | None
    ) -> None:
        match state:
            case states.SUCCESS:
                attempt.end(Ending(Status.DONE, Outcome.DONE, state, encoded, meta, None))
            case states.FAILURE:
                attempt.end(Ending(Status.FAILED, Outcome.FAILED, state, None, meta, error))
            case states.REVOKED:
                attempt.end(Ending(Status.FAILED, Outcome.CANCELLED, state, None, meta, error))
            case states.RETRY:
                attempt.annotate_retry(meta, error)
            case states.STARTED if isinstance(result, dict) and result.keys() == {"pid", "hostname"}:
                pass  # the claim has said so
            case _:
                if not attempt.has_outcome:
                    database = self.runtime.database
                    with database.connection() as conn:
                        lifecycle.progress(conn, database, attempt.lease, state, meta)

    def _store_other(
        self, task_id: str, state: str, encoded: bytes | None, meta: bytes | None, error: str | None, request: Any
    ) -> None:
        task = getattr(request, "task", None) or ""
        status = {states.SUCCESS: Status.DONE, states.FAILURE: Status.FAILED, states.REVOKED: Status.FAILED}.get(state)
        attempt = attempts.current()
        if status is not None and attempt is not None and attempt.buffering:
            attempt.stored.append(Stored(task_id, status, task, state, encoded, meta, error))
            return
        database, signal = self.runtime.database, self.runtime.signal
        with database.connection() as conn:
            if status is None and lifecycle.annotate(conn, database, task_id, state, meta):
                return
            item = Stored(task_id, status or Status.QUEUED, task, state, encoded, meta, error)
            waited = lifecycle.store(conn, database, [item])
        if waited:
            signal.announce(waited)

    def mark_as_failure(
        self,
        task_id: str,
        exc: BaseException,
        traceback: Any = None,
        request: Any = None,
        store_result: bool = True,
        call_errbacks: bool = True,
        state: str = states.FAILURE,
    ) -> None:
        """As Celery's, and a group at the end of the failed chain fails member by member: waiting for it ends."""
        super().mark_as_failure(task_id, exc, traceback, request, store_result, False, state)
        if request and store_result:
            for member in group_members(getattr(request, "chain", None) or ()):
                self.store_result(member, exc, state, traceback=traceback)
        if request and call_errbacks and request.errbacks:
            self._call_task_errbacks(request, exc, traceback)
            attempt = attempts.find(task_id)
            if attempt is not None and attempt.in_pool and attempt.after:
                from .foreign import finish_now

                attempt.end(attempts.failed(described(exc)))
                finish_now(attempt)

    def _call_task_errbacks(self, request: Any, exc: BaseException, traceback: Any) -> None:
        """Errbacks that are tasks are published with the end; those that Celery calls are called once it is committed.

        Celery calls the same for the errbacks of a chord's body.
        """
        attempt, tell = attempts.current(), super()._call_task_errbacks
        if attempt is None or not attempt.buffering or (attempt.in_pool and attempt.requeue is not None):
            tell(request, exc, traceback)
            return
        called = [errback for errback in request.errbacks if self._is_called(errback)]
        published = [errback for errback in request.errbacks if errback not in called]
        if published:
            tell(_with_errbacks(request, published), exc, traceback)
        if called:
            attempt.after.append(partial(tell, _with_errbacks(request, called), exc, traceback))

    def _is_called(self, errback: Any) -> bool:
        """Whether Celery calls this errback instead of publishing it: one that takes more than an id."""
        signature = self.app.signature(errback)
        signature._app = signature._app or self.app
        try:
            header = getattr(signature.type, "__header__", None)
        except NotRegistered:
            return False
        if header is None or isinstance(header, partial):
            return False
        greater = getattr(self, "_errback_arity_greater", None)  # of newer versions
        return bool(greater(signature, 1) if greater else arity_greater(header, 1))

    def mark_as_revoked(
        self, task_id: str, reason: str = "", request: Any = None, store_result: bool = True, **kwargs: Any
    ) -> None:
        """Outside an attempt (a revoke that a worker has heard): what is queued ends, what is held is left alone."""
        if request is None and attempts.current() is None and is_ours(self.app.conf):
            from .reaper import cancel

            cancel(self.app, [task_id], reason or "revoked")
            return
        state = kwargs.get("state", states.REVOKED)
        # as Celery's, and the rest of the chain ends as well: nobody will ever publish it
        self.mark_as_failure(task_id, TaskRevokedError(reason), None, request, store_result, False, state)

    # Reading.

    def _get_task_meta_for(self, task_id: str) -> dict[str, Any]:
        return self._read([task_id]).get(task_id) or {"status": states.PENDING, "result": None}

    def _read(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        database = self.runtime.database
        with database.connection(patience=database.settings.connect_timeout) as conn:
            rows = conn.execute(database.sql("job_read"), {"ids": list(ids)}).fetchall()
        return {row[0]: self._meta(*row) for row in rows}

    def _meta(
        self,
        task_id: str,
        status: str,
        celery_state: str | None,
        result: bytes | None,
        meta: bytes | None,
        updated_at: Any,
        owned_by: str | None,
        error: str | None,
    ) -> dict[str, Any]:
        state = celery_state or (states.FAILURE if status == Status.FAILED else states.PENDING)
        found: dict[str, Any] = {"task_id": task_id, "status": state, "result": None, "traceback": None, "children": []}
        if meta is not None:
            found.update(self.decode(bytes(meta)))
        if status == Status.DONE:
            found["result"] = self.decode(bytes(result)) if result is not None else None
        elif state == states.STARTED and meta is None and owned_by:
            hostname, pid, _ = owned_by.rsplit(":", 2)
            found["result"] = {"hostname": hostname, "pid": int(pid)}
        elif state in self.EXCEPTION_STATES and found["result"] is None:
            found["result"] = self.prepare_exception(_plain_error(state, error))
        if status in (Status.DONE, Status.FAILED):
            found["date_done"] = updated_at.isoformat()
        return self.meta_from_decoded(found)  # type: ignore[no-any-return]

    def task_result_exists(self, task_id: str) -> bool:
        return bool(self._get_task_meta_for(task_id)["status"] != states.PENDING)

    def _forget(self, task_id: str) -> None:
        self._execute("job_forget", {"id": task_id})

    # Waiting.

    def wait_for(
        self,
        task_id: str,
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_interval: Callable[[], None] | None = None,
    ) -> dict[str, Any] | None:
        """Wait for one end; raises :class:`celery.exceptions.TimeoutError` after ``timeout`` seconds."""
        self._ensure_not_eager()
        for _, meta in self._ends([task_id], timeout, on_interval):
            return meta
        return None

    def get_many(
        self,
        task_ids: Iterable[str],
        timeout: float | None = None,
        interval: float = 0.5,
        no_ack: bool = True,
        on_message: Callable[[dict[str, Any]], None] | None = None,
        on_interval: Callable[[], None] | None = None,
        max_iterations: int | None = None,
        **kwargs: Any,
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The ends of several jobs, as they come."""
        ids = list(task_ids)
        self._refuse_uncommitted(ids)
        for task_id, meta in self._ends(ids, timeout, on_interval):
            if on_message is not None:
                on_message(meta)
            yield task_id, meta

    def wait_for_pending(self, result: Any, timeout: float | None = None, on_message: Any = None, **kwargs: Any) -> Any:
        self._refuse_uncommitted(ids_before(result))
        if on_message is None:
            return super().wait_for_pending(result, timeout=timeout, **kwargs)
        callback, propagate = kwargs.pop("callback", None), kwargs.pop("propagate", True)
        for _, meta in self._ends([result.id], timeout, kwargs.get("on_interval")):
            on_message(meta)
            result._maybe_set_cache(meta)
        return result.maybe_throw(propagate=propagate, callback=callback)

    def _refuse_uncommitted(self, ids: Iterable[str]) -> None:
        """Raise instead of waiting for what cannot begin before the caller's own COMMIT."""
        published = published_inside(ids)
        waiting = sorted(published - self._read(published).keys()) if published else []
        if waiting:
            raise TransactionError(
                f"job {waiting[0]} was published in the in_transaction() block around this and is not committed:"
                " nobody can run it before; leave the block, commit, and wait for the result then"
            )

    def _ends(
        self, ids: list[str], timeout: float | None, on_interval: Callable[[], None] | None
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._waiting is None:
            self._waiting = Waiting(self.runtime)
        for task_id, meta in self._waiting.ends(self._ready, ids, timeout, on_interval):
            if meta["status"] == states.SUCCESS:
                self._cache[task_id] = meta
            elif on_interval is not None:
                on_interval()  # if a parent's failure is the reason, that one is raised
            yield task_id, meta

    def _ready(self, ids: Iterable[str]) -> dict[str, dict[str, Any]]:
        return {task_id: meta for task_id, meta in self._read(ids).items() if meta["status"] in states.READY_STATES}

    # Groups and chords.

    def _save_group(self, group_id: str, result: Any) -> Any:
        params = {"id": group_id, "result": ensure_bytes(self.encode(result.as_tuple()))}
        if not join(self.runtime.database, "group_save", params):
            self._execute("group_save", params)
        return result

    def _restore_group(self, group_id: str) -> dict[str, Any] | None:
        database = self.runtime.database
        with database.connection() as conn:
            row = conn.execute(database.sql("group_read"), {"id": group_id}).fetchone()
        return {"result": result_from_tuple(self.decode(bytes(row[0])), self.app)} if row else None

    def _delete_group(self, group_id: str) -> None:
        self._execute("group_delete", {"id": group_id})

    def set_chord_size(self, group_id: str, chord_size: int) -> None:
        if not join(self.runtime.database, "chord_size", {"id": group_id, "size": chord_size}):
            self._execute("chord_size", {"id": group_id, "size": chord_size})

    def add_to_chord(self, chord_id: str, result: Any) -> None:
        database = self.runtime.database
        with database.connection() as conn:
            chords.extend(conn, database, chord_id)

    def apply_chord(self, header_result_args: Any, body: Any, **kwargs: Any) -> None:
        if isinstance(header_result_args[1], _regen):
            return  # a lazy header of simple tasks: it is not to be unrolled before it is sent
        header = self.app.GroupResult(*header_result_args)
        if any(isinstance(child, GroupResult) for child in header.results):
            self._save_group(header.id, header)  # the shape of its results

    def on_chord_part_return(self, request: Any, state: str, result: Any, **kwargs: Any) -> None:
        if not request.group or not request.id:
            return
        encoded = ensure_bytes(self.encode(self.encode_result(result, state)))
        position = None if request.group_index is None else float(request.group_index)
        body = request.chord or getattr(request, "options", {}).get("chord")
        root_id = getattr(request, "root_id", None)
        part = ChordPart(request.group, request.id, position, state, encoded, _plain(body), root_id)
        attempt = attempts.current()
        if attempt is not None:
            attempt.parts.append(part)
            return
        database, signal = self.runtime.database, self.runtime.signal

        def count() -> chords.FollowUps:
            follow = chords.FollowUps()
            follow.parts.append(part)
            with database.connection() as conn, conn.transaction():
                chords.write(conn, database, self.app, follow)
            return follow

        follow = retrying(count)
        publish.wake(database, signal, follow.rows)
        signal.announce(follow.waited)
        afterwards.call_later(follow.after)

    def _execute(self, name: str, params: dict[str, Any]) -> None:
        database = self.runtime.database
        with database.connection() as conn:
            conn.execute(database.sql(name), params)

    def __reduce__(self, args: Any = (), kwargs: Any = None) -> Any:
        return super().__reduce__(args, {**(kwargs or {}), "url": self.url})


def _with_errbacks(request: Any, errbacks: list[Any]) -> Any:
    """``request`` with only these of its errbacks."""
    found = copy(request)
    found.errbacks = errbacks
    return found


def _settings(app: Any, url: str | None) -> Settings:
    """The backend's settings: its own URL, or the broker's where it is bare."""
    bare = not url or url.partition("://")[2] in ("", "/")
    try:
        if bare:
            return Settings.from_app(app)
        return Settings.make(str(url), app.conf.broker_transport_options)
    except SettingsError as exc:
        raise ImproperlyConfigured(f"result_backend: {exc}") from exc


def _error_text(result: Any) -> str | None:
    """One readable line for ``jobs.error`` of a stored exception."""
    if isinstance(result, dict) and "exc_type" in result:
        message = result.get("exc_message")
        if isinstance(message, list | tuple):
            if result["exc_type"] == UnpickleableExceptionWrapper.__name__:
                return described(UnpickleableExceptionWrapper(*message))
            message = message[0] if len(message) == 1 else ", ".join(map(str, message))
        return readable(f"{result['exc_type']}: {message}")
    if isinstance(result, BaseException):
        return described(result)
    return readable(result)


def _plain_error(state: str, error: str | None) -> BaseException:
    text = error or "no reason was recorded"
    return TaskRevokedError(text) if state == states.REVOKED else Exception(text)


def _plain(signature: Any) -> dict[str, Any]:
    return dict(signature) if signature else {}
