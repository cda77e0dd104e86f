"""What the README and the docs say can be done, done: commands exist, blocks compile, the tutorial runs to its end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgtruth_transport.testing.processes import ServerProcess
from tests.support import eventually

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its page, language and text; ``# file: x`` or ``# run: x`` in its first line says what it is."""

    page: Path
    language: str
    text: str

    @property
    def kind(self) -> tuple[str, str]:
        found = re.match(r"# (file|run): (\S+)\n", self.text)
        return (found[1], found[2]) if found else ("", "")

    @property
    def commands(self) -> list[str]:
        return [line[2:].split("   ")[0].strip() for line in self.text.splitlines() if line.startswith("$ ")]


def blocks(page: Path) -> list[Block]:
    return [Block(page, *found.groups()) for found in FENCE.finditer(page.read_text())]


ALL = [block for page in PAGES for block in blocks(page)]
COMMANDS = sorted({command for block in ALL if block.language == "console" for command in block.commands})


def _named(page: Path) -> str:
    return str(page.relative_to(ROOT))


# what is written


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            compile(block.text, _named(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=_named)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{_named(page)} links to {target}"


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs/index.md").read_text() + (ROOT / "docs/decisions/index.md").read_text()
    for page in PAGES[1:]:
        if page.name != "index.md":
            assert page.name in index, f"{_named(page)} is in no index"


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(page.read_text() for page in PAGES)
    for target in set(re.findall(r"`(?:SIGNAL=\w+ )?make ([\w-]+)`|^\$ make ([\w-]+)$", text, re.MULTILINE)):
        name = target[0] or target[1]
        assert re.search(rf"^{name}:", makefile, re.MULTILINE), f"there is no target {name!r}"


def test_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "\n".join(page.read_text() for page in PAGES)
    for names in re.findall(r"pgtruth-transport\[([\w,]+)\]", text):
        assert set(names.split(",")) <= set(extras), names


def test_every_option_is_in_the_reference() -> None:
    from pgtruth_transport.settings import _CHECKS

    text = (ROOT / "docs/reference/settings.md").read_text()
    assert [name for name in _CHECKS if f"| `{name}` |" not in text] == []


def test_every_column_and_table_is_in_the_reference() -> None:
    from pgtruth_transport.schema import build

    text = (ROOT / "docs/reference/tables.md").read_text()
    tables = {table.name: table for table in build().sorted_tables}
    assert [name for name in tables if f"`{name}`" not in text] == []
    for table in ("jobs", "attempts"):
        assert [column.name for column in tables[table].columns if f"`{column.name}`" not in text] == [], table


def test_commands_of_our_own_exist() -> None:
    from pgtruth_transport.cli import COMMANDS as known

    text = "\n".join(page.read_text() for page in PAGES)
    for name in set(re.findall(r"celery -A \w+ pgtruth ([a-z]+)", text)):
        assert name in known, name
    reference = (ROOT / "docs/reference/cli.md").read_text()
    assert [name for name in known if f"`{name}" not in reference] == []


# what can be done


@pytest.fixture
def shop(tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The tutorial's app on a fresh database with a table of orders; yields the names that ``# run`` blocks see."""
    _save_files(ROOT / "docs/tutorial.md", tmp_path)
    dsn = "postgresql://" + database_url.partition("://")[2]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    monkeypatch.setenv("BROKER_URL", database_url)
    monkeypatch.syspath_prepend(str(tmp_path))
    import shop as module  # type: ignore[import-not-found]

    import pgtruth_transport

    yield {"psycopg": psycopg, "pgtruth_transport": pgtruth_transport, "add": module.add, "DATABASE_URL": dsn}
    module.app.close()
    sys.modules.pop("shop", None)


RUNNABLE = [block for block in ALL if block.kind[0] == "run"]


@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: f"{block.page.stem}-{block.kind[1]}")
def test_enqueue_in_a_transaction_runs(block: Block, shop: dict[str, Any]) -> None:
    dsn = shop["DATABASE_URL"]
    names = shop | ({"DATABASE_URL": dsn.replace("://", "+psycopg://", 1)} if block.kind[1] == "sqlalchemy" else {})
    exec(compile(block.text, _named(block.page), "exec"), names)
    if "engine" in names:
        names["engine"].dispose()
    with psycopg.connect(dsn) as connection:
        assert connection.execute("SELECT count(*) FROM orders").fetchone() == (1,)
        assert connection.execute("SELECT task, status FROM pgtruth.jobs").fetchall() == [("shop.add", "queued")]


def test_the_readmes_app_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    block = next(block for block in blocks(ROOT / "README.md") if block.kind == ("file", "app.py"))
    names: dict[str, Any] = {}
    exec(compile(block.text, "README.md", "exec"), names)
    app = names["app"]
    assert app.connection_for_write().as_uri() == "pgtruth://user:**@localhost:5432/app"
    assert "pgtruth.reap" in {entry["task"] for entry in app.conf.beat_schedule.values()}
    app.close()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_tutorial_runs_to_its_end(tmp_path: Path) -> None:
    """Its own files, commands and code, in order; the database is the one that it starts."""
    page = ROOT / "docs/tutorial.md"
    _save_files(page, tmp_path)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    with subprocess.Popen(
        [sys.executable, "database.py"], cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as database:
        assert database.stdout is not None
        env["BROKER_URL"] = shlex.split(database.stdout.readline().decode())[1].partition("=")[2]
        _play(page, tmp_path, env)
        database.communicate(b"\n", timeout=20)


def _play(page: Path, folder: Path, env: dict[str, str]) -> None:
    """Run the tutorial's blocks after the database is up; workers in the background, the rest to its end."""
    workers: list[ServerProcess] = []
    try:
        for block in blocks(page):
            if block.language == "python" and block.kind == ("", ""):
                _run([sys.executable, "-c", block.text], folder, env)
            for command in block.commands:
                words = shlex.split(command)
                if words[0] == "kill":
                    eventually(lambda: _count(env, "status = 'processing'") == 1, 20)
                    _run(["sh", "-c", command], folder, env)
                    workers[-1].wait(10)
                elif "worker" in words:
                    workers.append(ServerProcess(words, folder / "worker.log", env=env, cwd=folder))
                elif words[0] == "celery":
                    assert _run(words, folder, env).strip(), f"{command} says nothing"
        eventually(lambda: _count(env, "status = 'done'") == 2, 60)
        assert _count(env, "status = 'done' AND retry_count = 1") == 1
    finally:
        for worker in workers:
            worker.end(signal.SIGTERM)


def _save_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.kind[0] == "file":
            (folder / block.kind[1]).write_text(block.text)


def _run(words: list[str], folder: Path, env: dict[str, str]) -> str:
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _count(env: dict[str, str], condition: str) -> int:
    dsn = "postgresql://" + env["BROKER_URL"].partition("://")[2]
    with psycopg.connect(dsn) as connection:
        query = f"SELECT count(*) FROM pgtruth.jobs WHERE task LIKE 'shop.%' AND {condition}"
        row = connection.execute(query.encode()).fetchone()
    assert row is not None
    return int(row[0])
