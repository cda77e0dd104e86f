"""What ``in_transaction`` refuses at once, and what it says then."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psycopg
import pytest
from celery import Celery, chain, chord, group
from celery.exceptions import TimeoutError

from pgtruth_transport import in_transaction
from pgtruth_transport.errors import TransactionError
from pgtruth_transport.urls import parse_url
from tests.support import ROOT
from tests.support_jobs import client


@pytest.fixture
def app(database_url: str) -> Celery:
    return client(database_url, {"signal_url": "silent://"})


@pytest.mark.parametrize("kind", ["task", "group", "chain", "chord"])
def test_a_result_is_not_waited_for_inside_the_block(app: Celery, database_url: str, kind: str) -> None:
    noop = app.signature("tests.noop")
    canvas: dict[str, Any] = {
        "task": noop,
        "group": group([noop, noop], app=app),
        "chain": chain(noop, noop, noop, app=app),
        "chord": chord([noop, noop], noop, app=app),
    }
    with psycopg.connect(parse_url(database_url)) as mine, in_transaction(mine):
        result = canvas[kind].apply_async()
        with pytest.raises(TransactionError, match="leave the block, commit"):
            result.get()
        mine.execute("SELECT 1")  # writes the rows
        with in_transaction(mine), pytest.raises(TransactionError, match="is not committed"):
            result.get(timeout=60)


def test_others_and_what_is_committed_are_waited_for_inside_a_block(app: Celery, database_url: str) -> None:
    before = app.send_task("tests.noop")
    with psycopg.connect(parse_url(database_url)) as mine, in_transaction(mine):
        inside = app.send_task("tests.noop")
        mine.commit()
        for result in (before, inside):
            with pytest.raises(TimeoutError):
                result.get(timeout=0.2)


@pytest.mark.parametrize(
    ("before", "said"),
    [("", "Django has no settings"), ("sys.modules['django'] = None", "Django is not installed here")],
)
def test_a_name_without_django_says_what_is_missing(before: str, said: str) -> None:
    code = f"import sys; {before}\nfrom pgtruth_transport import in_transaction; in_transaction('default')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pgtruth_transport.errors.TransactionError: in_transaction('default'): a name is that of")
    assert said in last
