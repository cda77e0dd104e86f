"""Many members of one group in a transaction block: the message of the first is the pattern of the rest.

Promises: the rows are the same as without this, which a test compares. Whatever could make a member's message differ in
anything but its id, arguments and place in the group goes Celery's own way: other options, signal receivers, routes,
countdowns, links, stamps, another serializer, compression. Celery spends most of a publish on working out what is
already known from the member before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii as quoted
from typing import Any, Final

from celery import signals
from celery._state import _get_active_apps
from celery.utils.saferepr import saferepr
from kombu.utils.json import dumps, loads

from pgtruth_transport.db import Database
from pgtruth_transport.jobs import JobRow
from pgtruth_transport.publish import publish, transaction_scope
from pgtruth_transport.runtime import runtime
from pgtruth_transport.transactions.scope import Scope
from pgtruth_transport.transport_names import is_ours

#: What is different from member to member.
_OWN: Final = ("task_id", "group_index")
#: What would have to be worked out for each member again.
_UNKNOWN: Final = (
    "countdown", "eta", "expires", "link", "link_error", "chain", "shadow", "router", "connection",
    "publisher", "compression", "argsrepr", "kwargsrepr", "stamped_headers", "retries", "replaced_task_nesting",
)  # fmt: skip
_RECEIVERS: Final = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)


class Pattern:
    """The message of a group's member, with gaps for what is the next one's own."""

    def __init__(self, app: Any, options: Mapping[str, Any], database: Database, row: JobRow) -> None:
        self.app = app
        self.options = {key: value for key, value in options.items() if key not in _OWN}
        self.database, self.signal, self.row = database, runtime(database.settings).signal, row
        headers, properties, body = loads(row.headers), loads(row.properties), loads(row.body)
        self._is_root = row.root_id == row.id
        own = ("id", "group_index", "argsrepr", "kwargsrepr", *(("root_id",) if self._is_root else ()))
        self._headers = dumps({key: value for key, value in headers.items() if key not in own})[:-1]
        self._properties = dumps({key: value for key, value in properties.items() if key != "correlation_id"})[:-1]
        self._embed = dumps(body[2])
        self._levels = app.conf.get("task_repr_maxlevels", 3)
        self._sizes = app.amqp.argsrepr_maxsize, app.amqp.kwargsrepr_maxsize

    @staticmethod
    def fits(app: Any, row: JobRow) -> bool:
        """Whether the message of ``row`` can be a pattern, in an app that reroutes and reports nothing."""
        if app.conf.task_routes or app.conf.task_send_sent_event or row.body.startswith(b"{"):
            return False
        properties, headers = loads(row.properties), loads(row.headers)
        kind = properties.get("content_type"), properties.get("content_encoding"), headers.get("compression")
        return kind == ("application/json", "utf-8", None)

    def matches(self, app: Any, options: Mapping[str, Any]) -> bool:
        """Whether a call for the same task differs from the pattern's in nothing but what is its own."""
        if app is not self.app or len(options) != len(self.options) + len(_OWN):
            return False
        return {key: value for key, value in options.items() if key not in _OWN} == self.options

    def next(self, args: Any, kwargs: Any, task_id: str, index: int) -> JobRow:
        """The row of another member."""
        shown = quoted(saferepr(args, self._sizes[0], maxlevels=self._levels))
        named = quoted(saferepr(kwargs, self._sizes[1], maxlevels=self._levels)) if kwargs else '"{}"'
        key = quoted(task_id)
        root = f', "root_id": {key}' if self._is_root else ""
        own = f', "id": {key}, "group_index": {index}, "argsrepr": {shown}, "kwargsrepr": {named}{root}}}'
        row = self.row
        return JobRow(
            id=task_id,
            task=row.task,
            queue=row.queue,
            priority=row.priority,
            eta=row.eta,
            delay=row.delay,
            expires=row.expires,
            expires_in=row.expires_in,
            retries=row.retries,
            root_id=task_id if self._is_root else row.root_id,
            parent_id=row.parent_id,
            group_id=row.group_id,
            headers=(self._headers + own).encode(),
            properties=f'{self._properties}, "correlation_id": {key}}}'.encode(),
            body=f"{_json([args, kwargs])[:-1]}, {self._embed}]".encode("utf-8", "surrogatepass"),
        )

    def publish(self, args: Any, kwargs: Any, options: Mapping[str, Any]) -> Any:
        """Publish another member; its result."""
        task_id = options["task_id"]
        row = self.next(args, kwargs, task_id, options["group_index"])
        if not options.get("ignore_result"):
            self.app.backend.on_task_call(options.get("producer"), task_id)
        publish(self.database, self.signal, [row])
        result = (options.get("result_cls") or self.app.AsyncResult)(task_id)
        result.ignored = options.get("ignore_result")
        return result


def prepare(app: Any) -> None:
    """Let the app's ``send_task`` reuse patterns inside transaction blocks. Safe to call twice."""
    if "send_task" not in vars(app):
        app.__dict__["send_task"] = _with_patterns(app, app.send_task)


def prepare_apps() -> None:
    """Prepare every app of this process that has a ``pgtruth://`` broker and is in use."""
    for app in _get_active_apps():
        if app.configured and "send_task" not in vars(app) and is_ours(app.conf):
            prepare(app)


def _with_patterns(app: Any, send: Callable[..., Any]) -> Callable[..., Any]:
    def send_task(name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any) -> Any:
        scope = transaction_scope.get()
        if not isinstance(scope, Scope) or rest or not _is_member(args, kwargs, options):
            return send(name, args, kwargs, *rest, **options)
        pattern: Pattern | None = scope.patterns.get(name)
        if pattern is not None and pattern.matches(app, options):
            return pattern.publish(args or (), kwargs or {}, options)
        result = send(name, args, kwargs, **options)
        database, row = scope.last or (None, None)
        if database and row and row.id == options["task_id"] and Pattern.fits(app, row):
            scope.patterns[name] = Pattern(app, options, database, row)
        return result

    return send_task


def _is_member(args: Any, kwargs: Any, options: Mapping[str, Any]) -> bool:
    """Whether a call publishes a plain member of a group, and nobody watches."""
    task_id = options.get("task_id")
    return (
        options.get("group_id") is not None
        and type(options.get("group_index")) is int
        and options.get("add_to_parent") is False
        and isinstance(task_id, str)
        and task_id.isascii()
        and "\x00" not in task_id
        and (not args or isinstance(args, list | tuple))
        and (not kwargs or isinstance(kwargs, dict))
        and not any(options.get(key) for key in _UNKNOWN)
        and not any(found.receivers for found in _RECEIVERS)
    )


def _json(value: Any) -> str:
    """What kombu's ``dumps`` makes of it; for plain values without building an encoder each time."""
    try:
        return json.dumps(value)
    except TypeError:
        return str(dumps(value))
