"""The suites' sources: the source archives of the installed Celery and kombu, fetched when they are needed.

Nothing of theirs is kept in this repository. Only the folder ``t`` and the pytest settings are unpacked, so that the
suites import the Celery and kombu that are installed.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path


def unpacked(project: str, archives: Path, target: Path) -> Path:
    """The tests of ``project`` (``celery`` or ``kombu``) under ``target``; fetched unless ``archives`` has them."""
    number = version(project)
    archive = archives / f"{project}-{number}.tar.gz"
    if not archive.exists():
        _fetch(project, number, archives)
    wanted = (f"{project}-{number}/t/", f"{project}-{number}/pyproject.toml", f"{project}-{number}/setup.cfg")
    with tarfile.open(archive) as tar:
        members = [member for member in tar if member.name.startswith(wanted)]
        tar.extractall(target, members=members, filter="data")
    return target / f"{project}-{number}"


def _fetch(project: str, number: str, archives: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", project]
    subprocess.run([*command, "--dest", str(archives), f"{project}=={number}"], check=True)
