"""A pytest plugin for the suites: loads the transport, bounds every test, applies the list of exceptions.

* Many of Celery's tests skip themselves unless the URL of the result backend starts with ``redis``, although all that
  they need of Redis is a list to write to from their tasks. For the questions of the test modules, and for nobody
  else, the URL says yes.
* A test that hangs fails after ``PGTRUTH_CONFORMANCE_TIMEOUT`` seconds, or after what it sets itself.
* A test on the list of exceptions is skipped with the reason that the list gives.
"""

from __future__ import annotations

import json
import os
import sys
from fnmatch import fnmatchcase
from typing import Any

import pytest

import pgtruth_transport  # noqa: F401 - registers the URLs, as every `celery` command does

TIMEOUT = float(os.environ.get("PGTRUTH_CONFORMANCE_TIMEOUT", "300"))
EXCEPTIONS: dict[str, str] = json.loads(os.environ.get("PGTRUTH_CONFORMANCE_EXCEPTIONS", "{}"))


class BackendURL(str):
    """The URL of the result backend, which tells a test module that it is as good as Redis."""

    def startswith(self, prefix: Any, *bounds: Any) -> bool:
        asked = prefix if isinstance(prefix, tuple) else (prefix,)
        asker = str(sys._getframe(1).f_globals.get("__name__", ""))
        if "redis" in asked and asker.startswith("t.integration"):
            return True
        return super().startswith(prefix, *bounds)


def pytest_plugin_registered(plugin: Any) -> None:
    """Give the suite's conftest the URL, before its test modules import it from there."""
    url = getattr(plugin, "TEST_BACKEND", None)
    if isinstance(url, str) and url.startswith("pgtruth"):
        plugin.TEST_BACKEND = BackendURL(url)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bound every test; skip the exceptions."""
    for item in items:
        if item.get_closest_marker("timeout") is None:  # some set their own
            item.add_marker(pytest.mark.timeout(TIMEOUT))
        name = item.nodeid.rpartition("/")[2]
        for pattern, reason in EXCEPTIONS.items():
            if name == pattern or fnmatchcase(name, pattern):
                item.add_marker(pytest.mark.skip(reason=f"exception: {reason}"), append=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed, and why: a run may take long, and may be ended."""
    if report.failed:
        lines = report.longreprtext.strip().splitlines()
        shown = lines if os.environ.get("PGTRUTH_CONFORMANCE_VERBOSE") else lines[-1:]
        print(f"\n{report.nodeid} ({report.when}):", *shown, sep="\n  ", flush=True)
        if os.environ.get("PGTRUTH_CONFORMANCE_VERBOSE"):
            print("  " + report.caplog.replace("\n", "\n  "), flush=True)
