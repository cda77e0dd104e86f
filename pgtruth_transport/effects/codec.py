"""Results and texts on their way into the ledger and out of it. Pure.

Results are JSON with Celery's additions (dates, decimals, UUIDs come back as what they were), so that the first caller
and every later one get equal values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kombu.utils import json

MAX_TEXT: Final = 2000
_dumps: Final[Callable[[object], str]] = json.dumps
_loads: Final[Callable[[str], Any]] = json.loads


def encode(value: object) -> bytes:
    """``value`` as JSON; raises TypeError or ValueError for what has no JSON form."""
    text: str = _dumps(value)
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes | None) -> Any:
    """The value that was encoded; None for nothing."""
    return None if data is None else _loads(bytes(data).decode("utf-8", "surrogatepass"))


def readable(text: str | None) -> str | None:
    """``text`` as PostgreSQL can store it: no NUL, no lone surrogates, not endless."""
    if text is None:
        return None
    return text[:MAX_TEXT].replace("\x00", "�").encode("utf-8", "replace").decode()


def describe(exc: BaseException) -> str:
    """An exception for the ledger."""
    return f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
