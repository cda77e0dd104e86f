"""Flower's pages in a real headless browser: what its JavaScript draws, not only what the server sends.

Not part of ``make test``, because a browser does not come from the package index. With Chromium installed::

    pytest tests/browser                       # PGTRUTH_CHROMIUM names another program
    pytest tests/browser --pictures docs/images

The second keeps the screenshots that the docs show. A missing browser fails.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chord

from tests import support
from tests.integration.test_flower import FlowerProcess, flower

__all__ = ["flower"]

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def pictures(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Where screenshots go."""
    folder = Path(request.config.getoption("--pictures") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def browse(pictures: Path, tmp_path: Path) -> Callable[[str, str], str]:
    """``browse(url, name)``: the page's text after its scripts have run; its picture is ``<name>.png``."""
    program = os.environ.get("PGTRUTH_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    assert program, f"no browser: install one of {', '.join(NAMES)}, or name it in PGTRUTH_CHROMIUM"
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,800"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000"]

    def visit(url: str, name: str) -> str:
        picture = pictures / f"{name}.png"
        for last in ([f"--screenshot={picture}"], ["--dump-dom"]):
            done = subprocess.run([program, *options, *last, url], check=True, capture_output=True, timeout=100)
        assert picture.stat().st_size > 10_000
        page = re.sub(r"</?(wbr|span|mark|a|b|i)\b[^>]*>", "", done.stdout.decode())  # these may stand within a word
        return html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", page, flags=re.DOTALL))

    return visit


@pytest.mark.timeout(400)
def test_the_pages_show_what_the_tables_say(
    database_url: str,
    worker: Callable[..., Any],
    flower: Callable[..., FlowerProcess],
    browse: Callable[[str, str], str],
) -> None:
    app = Celery("tests.apps.basic", broker=database_url, backend="pgtruth://", set_as_current=False)
    worker(args=["-E"], name="alpha")

    def task(name: str, *args: Any) -> Any:
        return app.signature(f"tests.apps.basic.{name}", args=args, app=app)

    total = chord([task("add", n, n) for n in range(5)], app=app)(task("total"))
    assert total.get(timeout=60) == 20
    failed = task("boom", "no such order").apply_async()
    support.eventually(lambda: failed.state == "FAILURE", 30)
    for _ in range(7):
        task("noop").apply_async(queue="nobody-works-here")
    task("noop").apply_async(countdown=3600)
    page = flower(database_url)
    support.eventually(lambda: page.json("/api/workers?refresh=1"), 30, every=0.5)
    before = time.monotonic()

    workers = browse(f"{page.address}/workers", "flower-workers")
    assert "alpha@localhost" in workers
    tasks = browse(f"{page.address}/tasks", "flower-tasks")
    for expected in ("tests.apps.basic.add", "SUCCESS", "FAILURE", "PENDING", total.id):
        assert expected in tasks, expected
    detail = browse(f"{page.address}/task/{failed.id}", "flower-task")
    assert "no such order" in detail
    assert "alpha@localhost" in detail
    broker = browse(f"{page.address}/broker", "flower-broker")
    assert re.search(r"celery\s+1\s+0\s+0", broker), broker  # one for later, nothing due, nothing held
    assert re.search(r"nobody-works-here\s+7\s+0\s+7", broker), broker
    assert "**" in broker  # the URL without its password
    assert time.monotonic() - before < 300
