"""The suites that there are: whose sources they are in, in which folder, and which of our plugins they need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Suite:
    """A folder of tests in a project's source archive."""

    name: str
    project: str
    folder: str
    #: Loaded by ``PYTEST_PLUGINS``: fixtures of a plugin named there stand before those of installed plugins.
    plugins: tuple[str, ...] = ()


_SMOKE: Final = ("pgtruth_transport.testing.pytest_celery_plugin", "tests.conformance.smoke")

SUITES: Final = {
    suite.name: suite
    for suite in (
        Suite("celery", "celery", "t/integration"),
        Suite("kombu", "kombu", "t/integration"),
        Suite("smoke", "celery", "t/smoke/tests", _SMOKE),
    )
}
