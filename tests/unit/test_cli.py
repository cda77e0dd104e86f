"""``celery -A app pgtruth …``: every command exists, migrate and doctor say what they found, errors are one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import click
import psycopg
import pytest
from celery import Celery
from click.testing import CliRunner, Result

from pgtruth_transport.cli import COMMANDS, pgtruth
from pgtruth_transport.doctor import Level, examine
from pgtruth_transport.migrate import head
from pgtruth_transport.settings import Settings
from pgtruth_transport.testing.servers import free_port


def _run(url: str, *arguments: str, **options: object) -> Result:
    app = Celery("cli", broker=url, set_as_current=False)
    app.conf.broker_transport_options = options
    return CliRunner().invoke(pgtruth, arguments, obj=SimpleNamespace(app=app), env={"COLUMNS": "80"})


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists(name: str) -> None:
    context = click.Context(pgtruth)
    command = pgtruth.get_command(context, name)
    assert isinstance(command, click.Command)
    assert command.get_short_help_str()


def test_an_unknown_command_is_refused() -> None:
    assert _run("pgtruth://h/d", "migrat").exit_code == 2


def test_migrate(empty_database_url: str) -> None:
    missing = _run(empty_database_url, "migrate", "--check")
    assert missing.exit_code == 1
    assert "celery -A app pgtruth migrate" in missing.output
    assert f"is now at {head()}" in _run(empty_database_url, "migrate").output
    assert f"is already at {head()}" in _run(empty_database_url, "migrate").output
    assert _run(empty_database_url, "migrate", "--check").exit_code == 0


@pytest.mark.parametrize("command", ["migrate", "doctor"])
def test_an_unreachable_server_is_one_line_without_the_password(command: str) -> None:
    result = _run(f"pgtruth://someone:secret@127.0.0.1:{free_port()}/jobs", command)
    assert result.exit_code == 1
    assert "cannot connect to PostgreSQL at 127.0.0.1" in result.output
    assert "secret" not in result.output
    assert "Traceback" not in result.output


def test_another_broker_is_an_error_that_says_what_to_do() -> None:
    result = _run("redis://localhost/0", "migrate")
    assert result.exit_code == 1
    assert "set broker_url = 'pgtruth://" in result.output


def _levels(settings: Settings) -> dict[str, Level]:
    return {finding.subject: finding.level for finding in examine(settings)}


def test_doctor_on_a_healthy_database(database_url: str, signal_url: str | None) -> None:
    settings = Settings.make(database_url, {"signal_url": signal_url})
    levels = _levels(settings)
    assert levels.pop("durability", Level.WARN) is Level.WARN  # the tests' server runs without fsync
    assert levels == dict.fromkeys(("URL", "server", "clock", "connections", "schema", "signal", "recovery"), Level.OK)


def test_doctor_prints_a_table_of_eighty_columns(database_url: str) -> None:
    result = _run(database_url, "doctor", lease_seconds=60)
    assert result.exit_code == 0
    assert max(len(line) for line in result.output.splitlines()) <= 80
    assert "postgres:**@" in result.output
    assert "warn  recovery" in result.output


def test_doctor_on_a_database_without_the_schema(empty_database_url: str) -> None:
    result = _run(empty_database_url, "doctor")
    assert result.exit_code == 1
    assert "fail  schema" in result.output


def test_doctor_when_the_signal_does_not_reach_anybody(database_url: str, caplog: Any) -> None:
    settings = Settings.make(database_url, {"signal_url": f"redis://127.0.0.1:{free_port()}"})
    assert _levels(settings)["signal"] is Level.WARN


def test_doctor_on_a_read_only_server(database_url: str, conn: psycopg.Connection[Any]) -> None:
    name = psycopg.sql.Identifier(conn.info.dbname)
    conn.execute(psycopg.sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = on").format(name))
    assert _levels(Settings.make(database_url))["server"] is Level.FAIL
