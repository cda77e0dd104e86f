"""Settings and URLs: what is accepted, what is refused, and that no message ever shows a password."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from pgtruth_transport import settings as settings_module
from pgtruth_transport.errors import SettingsError
from pgtruth_transport.settings import Settings, mask_url, parse_url
from pgtruth_transport.urls import libpq_parameters

URL = "pgtruth://user:secret@host:5433/jobs"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (URL, {"user": "user", "password": "secret", "host": "host", "port": "5433", "dbname": "jobs"}),
        ("pgtruth+postgresql://host/jobs", {"host": "host", "dbname": "jobs"}),
        ("postgresql://host/jobs", {"host": "host", "dbname": "jobs"}),
        ("pgtruth:///jobs", {"dbname": "jobs"}),
        ("pgtruth:///jobs?host=/run/postgresql", {"host": "/run/postgresql", "dbname": "jobs"}),
        ("pgtruth://u@%2Frun%2Fpostgresql/jobs", {"user": "u", "host": "/run/postgresql", "dbname": "jobs"}),
        ("pgtruth://h1:5432,h2:5433/jobs", {"host": "h1,h2", "port": "5432,5433", "dbname": "jobs"}),
        ("pgtruth://h1,h2/jobs", {"host": "h1,h2", "dbname": "jobs"}),
        ("pgtruth://h1:5432,h2/jobs", {"host": "h1,h2", "port": "5432,", "dbname": "jobs"}),
        ("pgtruth://u@[::1]:5432/jobs", {"user": "u", "host": "::1", "port": "5432", "dbname": "jobs"}),
        ("pgtruth://[::1]/jobs", {"host": "::1", "dbname": "jobs"}),
        (
            "pgtruth://us%40er:p%40ss%2Fw%3Ao%23r%25d@host/jobs",
            {"user": "us@er", "password": "p@ss/w:o#r%d", "host": "host", "dbname": "jobs"},
        ),
        ("pgtruth://host/jo%20bs", {"host": "host", "dbname": "jo bs"}),
        (
            "pgtruth://host/jobs?sslmode=require&target_session_attrs=read-write&options=-c%20geqo%3Doff",
            {
                "host": "host",
                "dbname": "jobs",
                "sslmode": "require",
                "target_session_attrs": "read-write",
                "options": "-c geqo=off",
            },
        ),
        ("pgtruth://?service=jobs", {"service": "jobs"}),
        ("pgtruth://host?dbname=jobs", {"host": "host", "dbname": "jobs"}),
    ],
)
def test_urls_that_are_understood(url: str, expected: dict[str, str]) -> None:
    assert conninfo_to_dict(parse_url(url)) == expected


def test_every_libpq_parameter_is_allowed_in_the_query() -> None:
    values = {"connect_timeout": "3", "dbname": "jobs", "host": "h", "port": "5432"}
    for name in libpq_parameters():
        value = values.get(name, "1")
        assert conninfo_to_dict(parse_url(f"pgtruth:///x?{name}={value}"))[name] == value


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "a URL looks like pgtruth://user:password@host:5432/database"),
        ("host/jobs", "a URL looks like"),
        ("redis://:secret@host/0", "a URL looks like"),
        ("pgtruth://", "names no database"),
        ("pgtruth://user:secret@host", "names no database"),
        ("pgtruth://user:secret@host/", "names no database"),
        ("pgtruth://user:secret@host:port/jobs", "from 1 to 65535"),
        ("pgtruth://user:secret@host:0/jobs", "from 1 to 65535"),
        ("pgtruth://user:secret@host:65536/jobs", "from 1 to 65535"),
        ("pgtruth://user:sec/ret@host/jobs", "percent-encode"),
        ("pgtruth://user:sec@ret@host/jobs", "percent-encode"),
        ("pgtruth://user:secret%zz@host/jobs", "percent-encod"),
        ("pgtruth://user:secret@host/jo%00bs", "percent-encod"),
        ("pgtruth://user:secret @host/jobs", "space"),
        ("pgtruth://user:secret@host/jobs\x00", "control character"),
        ("pgtruth://user:secret@[::1/jobs", "brackets"),
        ("pgtruth://user:secret@host/jobs?sslmod=require", "did you mean 'sslmode'?"),
        ("pgtruth://user:secret@host/jobs?lease_seconds=3", "broker_transport_options"),
        ("pgtruth://user:secret@host/jobs?sslmode", "name=value"),
        ("pgtruth://user:secret@host/jobs?connect_timeout=soon", "whole number"),
    ],
)
def test_urls_that_are_refused(url: str, says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.make(url)
    message = str(caught.value)
    assert says in message
    assert "secret" not in message
    assert "ret@" not in message
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "pgtruth://user:**@host:5433/jobs"),
        ("pgtruth://host/jobs", "pgtruth://host/jobs"),
        ("pgtruth://user@host/jobs", "pgtruth://user@host/jobs"),
        ("pgtruth://u:p@h1:1,h2:2/d?sslmode=require", "pgtruth://u:**@h1:1,h2:2/d?sslmode=require"),
        ("pgtruth://h/d?user=u&password=secret&sslpassword=x", "pgtruth://h/d?user=u&password=**&sslpassword=**"),
        ("redis://:secret@host:6379/0", "redis://:**@host:6379/0"),
        ("unix:///run/redis.sock?db=0&password=secret", "unix:///run/redis.sock?db=0&password=**"),
        ("pgtruth://u:se@cr@et@h/d", "pgtruth://u:**@h/d"),
        ("pgtruth://u:se?cret@h/d?sslmode=require", "pgtruth://u:**@h/d?sslmode=require"),
        ("u:secret@h/d", "u:**@h/d"),
    ],
)
def test_masking(url: str, shown: str) -> None:
    assert mask_url(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "pgtruth://user:**@host:5433/jobs",
        "pgtruth://user@host/jobs?sslmode=require",
        "pgtruth://u:**@h1:5432,h2:5433/jobs?target_session_attrs=read-write",
        "pgtruth://[::1]:5432/jobs",
        "pgtruth:///jobs?host=/run/postgresql",
    ],
)
def test_settings_show_their_url_without_the_password(url: str) -> None:
    settings = Settings.make(url.replace("**", "sec%20ret"))
    assert settings.masked() == url
    assert "ret" not in repr(settings).replace("retry_limit", "")


def test_defaults() -> None:
    settings = Settings.make(URL)
    assert (settings.schema, settings.lease_seconds, settings.reap_interval, settings.poll_interval) == (
        "pgtruth",
        15,
        5,
        1,
    )
    assert (settings.retry_limit, settings.signal_url, settings.auto_migrate) == (3, None, False)
    assert conninfo_to_dict(settings.conninfo)["connect_timeout"] == "5"


def test_equal_meaning_is_equal_and_hashes_alike() -> None:
    one = Settings.make("pgtruth://host/jobs?sslmode=require&user=u", {"max_retries": 3})
    other = Settings.make("postgresql://u@host/jobs?sslmode=require", {"lease_seconds": 15})
    assert one == other
    assert len({one, other}) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"leas_seconds": 3}, "did you mean 'lease_seconds'?"),
        ({"nonsense": 3}, "Known options: application_name"),
        ({"lease_seconds": 0}, "above 0"),
        ({"lease_seconds": -1}, "above 0"),
        ({"lease_seconds": "15"}, "above 0"),
        ({"lease_seconds": True}, "above 0"),
        ({"lease_seconds": float("nan")}, "above 0"),
        ({"lease_seconds": None}, "above 0"),
        ({"reap_interval": 16}, "longer than lease_seconds"),
        ({"poll_interval": 0}, "above 0"),
        ({"retry_limit": -1}, "0 or more"),
        ({"retry_limit": 1.5}, "0 or more"),
        ({"schema": "Bad"}, "identifier"),
        ({"schema": 'x"; DROP'}, "identifier"),
        ({"schema": ""}, "identifier"),
        ({"schema": "a" * 41}, "identifier"),
        ({"schema": "pg_mine"}, "of its own"),
        ({"schema": "public"}, "of its own"),
        ({"signal_url": "amqp://user:secret@host"}, "redis://"),
        ({"signal_url": 3}, "redis://"),
        ({"signal_url": "redis://host", "listen_url": URL}, "remove one"),
        ({"listen_url": "redis://:secret@host"}, "a URL looks like"),
        ({"auto_migrate": "yes"}, "True or False"),
        ({"prepare": 1}, "True or False"),
        ({"connect_timeout": 0}, "1 or more"),
        ({"application_name": ""}, "printable"),
        ({"visibility_timeou": 3}, "unknown option"),
        ({"global_keyprefix": "x"}, "schema"),
        ({"master_name": "x"}, "target_session_attrs"),
        ({"priority_steps": [1]}, "9 first"),
    ],
)
def test_options_that_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.make(URL, options)
    assert says in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("signal_url", [None, "", "redis://h/1", "rediss://h", "unix:///run/r.sock", "silent://"])
def test_signals_that_are_understood(signal_url: str | None) -> None:
    assert Settings.make(URL, {"signal_url": signal_url}).signal_url == (signal_url or None)


def test_kombus_own_options_are_not_ours() -> None:
    keys = ("max_retries", "interval_start", "interval_step", "interval_max", "connect_retries_timeout")
    assert Settings.make(URL, dict.fromkeys((*keys, "errback", "callback"), 1)) == Settings.make(URL)


@pytest.mark.parametrize("name", ["visibility_timeout", "polling_interval"])
def test_what_nearly_every_app_carries_over_is_said_once_and_has_no_effect(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings_module._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert Settings.make(URL, {name: 3600}) == Settings.make(URL, {name: 1}) == Settings.make(URL)
    assert [record.getMessage() for record in caplog.records if name in record.getMessage()] == [
        caplog.records[0].getMessage()
    ]


def test_connect_timeout_stands_in_one_place() -> None:
    assert Settings.make(f"{URL}?connect_timeout=7").connect_timeout == 7
    assert Settings.make(f"{URL}?connect_timeout=7", {"connect_timeout": 7}).connect_timeout == 7
    with pytest.raises(SettingsError, match="one place"):
        Settings.make(f"{URL}?connect_timeout=7", {"connect_timeout": 8})


def test_application_name_may_stand_in_the_url() -> None:
    assert Settings.make(f"{URL}?application_name=shop").application_name == "shop"
    assert Settings.make(f"{URL}?application_name=shop", {"application_name": "till"}).application_name == "till"


def _app(**conf: Any) -> Any:
    values = {"broker_url": None, "broker_read_url": None, "broker_write_url": None, "broker_transport_options": {}}
    return SimpleNamespace(conf=SimpleNamespace(**(values | conf)))


@pytest.mark.parametrize(
    ("conf", "host"),
    [
        ({"broker_url": "pgtruth://one/d"}, "one"),
        ({"broker_url": ["amqp://x", "pgtruth://one/d"]}, "one"),
        ({"broker_url": "amqp://x;pgtruth://one/d"}, "one"),
        ({"broker_url": "pgtruth://one/d", "broker_write_url": "pgtruth://two/d"}, "two"),
    ],
)
def test_from_app(conf: dict[str, object], host: str) -> None:
    settings = Settings.from_app(_app(**conf, broker_transport_options={"schema": "other"}))
    assert conninfo_to_dict(settings.conninfo)["host"] == host
    assert settings.schema == "other"


def test_from_app_of_another_broker() -> None:
    with pytest.raises(SettingsError, match="set broker_url"):
        Settings.from_app(_app(broker_url="redis://:secret@host/0"))
