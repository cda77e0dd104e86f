"""The fingerprint of an effect's payload: which fields, in which form, hashed how. Pure.

The same meaning gives the same 64 hex digits on every machine and every Python version; the rules are in
``docs/reference/effects.md`` and frozen by a table of known answers in the tests. Only the fields that the effect
declares count, so that a trace id or a time of sending may differ between attempts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Final
from uuid import UUID

from pgtruth_transport.effects.errors import PayloadRefused

#: Hashed in front of the text. It changes only if the rules change, and then old rows keep theirs.
VERSION: Final = b"pgtruth-effect-1\n"
MAX_KEY: Final = 1000  # bytes; an index entry of PostgreSQL ends at about 2,700


def canonical(payload: Mapping[str, object], fields: Sequence[str]) -> bytes:
    """The declared fields as JSON text: keys sorted, no spaces, ASCII only, no floats."""
    missing = [name for name in fields if name not in payload]
    if missing:
        raise PayloadRefused(f"the payload lacks the declared field(s) {', '.join(map(repr, missing))}")
    plain = {name: _plain(payload[name], name) for name in fields}
    return json.dumps(plain, sort_keys=True, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")


def fingerprint(text: bytes) -> str:
    """SHA-256 of a canonical text, in hex."""
    return hashlib.sha256(VERSION + text).hexdigest()


def checked_key(key: object) -> str:
    """A key that can be stored and printed, or :class:`PayloadRefused`."""
    if not isinstance(key, str) or not key:
        raise PayloadRefused(f"an effect's key must be a text that is not empty, not {type(key).__name__}")
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        size = -1
    if size < 0 or "\x00" in key:
        raise PayloadRefused("an effect's key must be valid text without NUL bytes")
    if size > MAX_KEY:
        raise PayloadRefused(f"an effect's key may have {MAX_KEY} bytes and this one has {size}; hash the long part")
    return key


def _plain(value: object, where: str) -> object:
    """``value`` in JSON's own types; ``where`` is the path that an error names."""
    match value:
        case Enum():
            return _plain(value.value, where)
        case None | bool() | str() | int():
            return value
        case float():
            raise PayloadRefused(
                f"field {where!r} is a float, whose digits depend on how it was computed; "
                "use Decimal, an int of the smallest unit, or a text"
            )
        case Decimal():
            return _decimal(value, where)
        case datetime():
            return _instant(value, where)
        case date() | UUID():
            return str(value)
        case timedelta():
            return f"{(value.days * 86_400 + value.seconds) * 1_000_000 + value.microseconds}us"
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case list() | tuple():
            return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
        case Mapping():
            return _mapping(value, where)
    raise PayloadRefused(
        f"field {where!r} is a {type(value).__name__}, which has no stable form; turn it into text, numbers or lists"
    )


def _mapping(value: Mapping[object, object], where: str) -> dict[str, object]:
    out: dict[str, object] = {}
    for name, item in value.items():
        if not isinstance(name, str):
            raise PayloadRefused(f"field {where!r} has a key of type {type(name).__name__}; only texts are stable")
        out[name] = _plain(item, f"{where}.{name}")
    return out


def _decimal(value: Decimal, where: str) -> str:
    """Plain digits without an exponent or trailing zeros: 10.00, 10 and 1E+1 are all ``10``."""
    if not value.is_finite():
        raise PayloadRefused(f"field {where!r} is {value}; only finite numbers have a fingerprint")
    text = format(value, "f")
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def _instant(value: datetime, where: str) -> str:
    if value.utcoffset() is None:
        raise PayloadRefused(f"field {where!r} is a datetime without a time zone; which instant it means is not stable")
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"
