"""Every option of the transport in one frozen, validated value.

``Settings.make`` accepts or refuses: an unknown name, a wrong type or two options that contradict each other is a
:class:`SettingsError` that names the option and what is allowed. Nothing here connects to anything. A ``Settings`` is
hashable, equal for equal meaning, and its ``repr`` shows no password.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Final

from pgtruth_transport.errors import SettingsError
from pgtruth_transport.urls import BROKER_SCHEMES, conninfo_of, mask_url, nearest, parameters, parse_url, url_of

__all__ = ["Settings", "mask_url", "parse_url"]

logger = logging.getLogger(__name__)

#: Options that kombu reads itself from the same mapping: its connection retry.
KOMBU_OWN: Final = frozenset(
    {
        "max_retries",
        "interval_start",
        "interval_step",
        "interval_max",
        "connect_retries_timeout",
        "errback",
        "callback",
    }
)
#: Options of other transports that nearly every Celery app carries: no effect here, said once in the log.
HARMLESS: Final = {
    "visibility_timeout": "a job's lease is renewed as long as its worker lives; see lease_seconds",
    "polling_interval": "an idle worker is woken by the signal; see poll_interval",
}
#: Options of other transports whose silent loss would change what an app does: refused, with the way to go on.
FOREIGN: Final = {
    "global_keyprefix": "set 'schema' to keep applications apart in one database",
    "queue_order_strategy": "priorities are strict, 9 first; remove it",
    "priority_steps": "all ten priorities 0 to 9 exist, 9 first; remove it",
    "sep": "there are no queue names to be split; remove it",
    "fanout_prefix": "each fanout exchange has its own bindings in the database; remove it",
    "fanout_patterns": "topic and fanout bindings are rows in the database; remove it",
    "master_name": "several database hosts go into the URL, h1:5432,h2:5432?target_session_attrs=read-write; remove it",
    "sentinel_kwargs": "several database hosts go into the URL; remove it",
    "socket_timeout": "use signal_timeout for the signal, connect_timeout for the database",
    "socket_connect_timeout": "use connect_timeout",
    "socket_keepalive": "keepalives are on; change them by libpq's keepalives_* in the URL",
    "health_check_interval": "broken connections are found before they are used; remove it",
    "retry_on_timeout": "lost connections are retried; remove it",
    "max_connections": "a worker uses three connections; remove it",
    "confirm_publish": "a publish has been committed when it returns; remove it",
    "deadletter_queue": "failed jobs stay in the table as 'failed'; remove it",
    "body_encoding": "bodies are stored as bytes; remove it",
    "ssl": "use libpq's sslmode, sslrootcert, … in the URL",
}
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,39}")
_SIGNALS: Final = ("redis://", "rediss://", "unix://", "silent://")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What one broker connection was configured with. Durations are seconds."""

    conninfo: str = field(repr=False)  # libpq keyword/value string, with connect_timeout
    signal_url: str | None = field(default=None, repr=False)  # None: LISTEN/NOTIFY; silent:// polls only
    schema: str = "pgtruth"
    lease_seconds: float = 15.0
    reap_interval: float = 5.0
    poll_interval: float = 1.0
    retry_limit: int = 3
    application_name: str = "pgtruth"
    auto_migrate: bool = False
    buffer_publishes: bool = False  # publishes made by a task's body wait for its finish as well
    unknown_task_wait: float = 3600.0  # how long a job may wait for a worker that knows its task
    signal_timeout: float = 0.5  # upper bound for sending one signal
    connect_timeout: int = 5
    prepare: bool = True  # prepared statements; off behind a transaction pooler
    listen_url: str | None = field(default=None, repr=False)  # for LISTEN, where the main URL goes through a pooler
    failed_expires: float | None = None  # how long failed rows are kept; None: the app decides

    @classmethod
    def make(cls, url: str, options: Mapping[str, object] | None = None) -> Settings:
        """The settings of a URL and ``broker_transport_options``; raises :class:`SettingsError`."""
        given = _known(options or {})
        found = parameters(url)
        if "application_name" not in given and "application_name" in found:
            given["application_name"] = found["application_name"]
        found.pop("application_name", None)
        _one_timeout(given, found)
        checked: dict[str, Any] = {name: _CHECKS[name](name, value) for name, value in given.items()}
        found["connect_timeout"] = str(checked.get("connect_timeout", 5))
        settings = cls(conninfo=conninfo_of(found), **checked)
        _consistent(settings)
        return settings

    @classmethod
    def from_app(cls, app: Any, *, read: bool = False) -> Settings:
        """The settings of a Celery app: the broker it writes to, or with ``read`` the one that its workers read."""
        conf = app.conf
        urls = [conf.broker_read_url, conf.broker_write_url] if read else [conf.broker_write_url, conf.broker_read_url]
        for url in _alternatives([*urls, conf.broker_url]):
            if url.partition("://")[0] in BROKER_SCHEMES:
                return cls.make(url, conf.broker_transport_options)
        raise SettingsError("this app's broker_url is no pgtruth:// URL; set broker_url = 'pgtruth://user:pw@host/db'")

    def masked(self) -> str:
        """The URL for people: the password is ``**``."""
        return url_of(self.conninfo)


def _alternatives(values: Iterable[object]) -> Iterator[str]:
    """The URLs in Celery's broker settings: each a URL, several joined by ``;``, a list of them, or nothing."""
    for value in values:
        if isinstance(value, str):
            yield from (part.strip() for part in value.split(";") if part.strip())
        elif isinstance(value, list | tuple):
            yield from _alternatives(value)


def _known(options: Mapping[str, object]) -> dict[str, object]:
    """The options that are ours; raises on those that nobody knows."""
    given: dict[str, object] = {}
    for name, value in options.items():
        if name in _CHECKS:
            given[name] = value
        elif name in HARMLESS:
            _say_once(name)
        elif name in FOREIGN:
            raise SettingsError(f"broker_transport_options[{name!r}] belongs to another transport: {FOREIGN[name]}")
        elif name not in KOMBU_OWN:
            raise SettingsError(
                f"unknown option {name!r} in broker_transport_options{nearest(str(name), _CHECKS)}"
                f" Known options: {', '.join(sorted(_CHECKS))}"
            )
    return given


@cache
def _say_once(name: str) -> None:
    logger.warning("broker_transport_options[%r] has no effect with pgtruth: %s", name, HARMLESS[name])


def _one_timeout(given: dict[str, object], found: Mapping[str, str]) -> None:
    """``connect_timeout`` may stand in the URL or in the options; both only if they agree."""
    in_url = found.get("connect_timeout")
    if in_url is None:
        return
    if "connect_timeout" in given and str(given["connect_timeout"]) != in_url:
        raise SettingsError(
            f"connect_timeout is {in_url} in the URL and {given['connect_timeout']} in broker_transport_options;"
            " set it in one place"
        )
    given["connect_timeout"] = int(in_url)


def _consistent(settings: Settings) -> None:
    """Refuse options that are fine alone and wrong together."""
    if settings.reap_interval > settings.lease_seconds:
        raise SettingsError(
            f"reap_interval ({settings.reap_interval:g} s) is longer than lease_seconds ({settings.lease_seconds:g} s):"
            " expired leases would wait more than a lease to be found; make it shorter (default: a third)"
        )
    if settings.listen_url is not None and settings.signal_url is not None:
        raise SettingsError(
            "listen_url is for LISTEN/NOTIFY, and signal_url replaces LISTEN/NOTIFY; remove one of the two"
        )


def _wrong(name: str, value: object, allowed: str) -> SettingsError:
    return SettingsError(f"option {name!r} is {value!r}; it must be {allowed}")


def _seconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise _wrong(name, value, "a number of seconds above 0")
    return float(value)


def _seconds_or_none(name: str, value: object) -> float | None:
    return None if value is None else _seconds(name, value)


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise _wrong(name, value, "a whole number, 0 or more")
    return value


def _positive(name: str, value: object) -> int:
    if _count(name, value) == 0:
        raise _wrong(name, value, "a whole number of seconds, 1 or more")
    return _count(name, value)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, value, "True or False")
    return value


def _schema(name: str, value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise _wrong(name, value, "a lower-case identifier of at most 40 characters: a-z, 0-9 and _, no digit first")
    if value.startswith("pg_") or value in ("information_schema", "public"):
        raise _wrong(name, value, "a schema of its own, not one of PostgreSQL's or one shared with other tables")
    return value


def _application_name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value or not value.isprintable() or len(value) > 40:
        raise _wrong(name, value, "a printable text of 1 to 40 characters")
    return value


def _signal(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str) or not value.startswith(_SIGNALS):
        shown = mask_url(value) if isinstance(value, str) else value
        raise _wrong(name, shown, f"None (LISTEN/NOTIFY) or a URL that starts with {', '.join(_SIGNALS)}")
    return value


def _listen(name: str, value: object) -> str | None:
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise _wrong(name, value, "a pgtruth:// URL that reaches the database without a pooler")
    parse_url(value)
    return value


_CHECKS: Final = {
    "signal_url": _signal,
    "schema": _schema,
    "lease_seconds": _seconds,
    "reap_interval": _seconds,
    "poll_interval": _seconds,
    "retry_limit": _count,
    "application_name": _application_name,
    "auto_migrate": _flag,
    "buffer_publishes": _flag,
    "unknown_task_wait": _seconds,
    "signal_timeout": _seconds,
    "connect_timeout": _positive,
    "prepare": _flag,
    "listen_url": _listen,
    "failed_expires": _seconds_or_none,
}
assert set(_CHECKS) == {item.name for item in fields(Settings)} - {"conninfo"}
