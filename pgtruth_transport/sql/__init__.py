"""The statements of the hot path: one per ``.sql`` file, named ``object_verb``.

A file starts with a comment of three lines (who calls it; what it locks; which index it uses), then holds one statement
with named parameters ``%(name)s``. Its only placeholder is ``{schema}``. Nothing here talks to a database.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Final

from pgtruth_transport.errors import SettingsError

_SUFFIX: Final = ".sql"


@cache
def names() -> tuple[str, ...]:
    """The names of every statement, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(item.name.removesuffix(_SUFFIX) for item in files if item.name.endswith(_SUFFIX)))


@cache
def source(name: str) -> str:
    """The text of a statement's file, with its header; ``{schema}`` is still in it."""
    file = resources.files(__name__) / f"{name}{_SUFFIX}"
    if not file.is_file():
        raise LookupError(f"there is no statement {name!r} in {__name__}; there are: {', '.join(names())}")
    return file.read_text(encoding="utf-8")


@cache
def load(name: str, schema: str) -> bytes:
    """The statement ``name`` for tables in ``schema``, ready for psycopg, without its header.

    Bytes, because psycopg keeps the parsed form of a query by its bytes: nothing is composed again per call.
    """
    if not schema.replace("_", "a").isalnum() or not schema.isascii():
        raise SettingsError(f"schema {schema!r} is not a plain identifier")
    lines = source(name).splitlines()
    while lines and (lines[0].startswith("--") or not lines[0].strip()):
        del lines[0]
    statement = "\n".join(lines).strip().rstrip(";").replace("{schema}", f'"{schema}"')
    if "{" in statement or "}" in statement:
        raise ValueError(f"statement {name!r} holds a brace; {{schema}} is the only placeholder")
    return statement.encode()
