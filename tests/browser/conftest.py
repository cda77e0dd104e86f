"""The option that says where screenshots are kept."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", default=None, metavar="FOLDER", help="keep the screenshots here")
