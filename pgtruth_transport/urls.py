"""Broker URLs: reading them into a libpq connection string, and showing them without their secrets.

Pure text in, pure text out; nothing connects. A URL that cannot be used is a :class:`SettingsError` that says what a
URL looks like and never repeats the password, not even that of a URL too broken to be parsed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from pgtruth_transport.errors import SettingsError

BROKER_SCHEMES: Final = ("pgtruth", "pgtruth+postgresql")  # what kombu knows
SCHEMES: Final = (*BROKER_SCHEMES, "postgresql", "postgres")
LOOKS_LIKE: Final = "a URL looks like pgtruth://user:password@host:5432/database"
SECRETS: Final = frozenset(
    {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key", "passwd"}
)
_ENCODE: Final = "percent-encode special characters in user and password ('@' is %40, ':' is %3A, '/' is %2F)"


def parse_url(url: str) -> str:
    """The libpq connection string (``keyword=value``, sorted) of a ``pgtruth://`` URL.

    Every libpq query parameter is allowed, several hosts (``h1:5432,h2:5432``), IPv6 in brackets, a Unix socket by
    ``?host=/dir``. Raises :class:`SettingsError`; the message shows the URL masked.
    """
    return conninfo_of(parameters(url))


def conninfo_of(values: Mapping[str, object]) -> str:
    """The connection string of these libpq parameters, always in the same order."""
    from psycopg.conninfo import make_conninfo

    return make_conninfo("", **{name: str(values[name]) for name in sorted(values)})


def parameters(url: str) -> dict[str, str]:
    """The libpq parameters of a URL."""
    from psycopg import ProgrammingError
    from psycopg.conninfo import conninfo_to_dict

    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise SettingsError(f"{mask_url(url)!r} is not a URL of this transport: {LOOKS_LIKE}")
    if any(ord(character) <= 32 for character in rest):
        raise SettingsError(f"{mask_url(url)!r} holds a space or control character; percent-encode it (space is %20)")
    try:
        found = {name: str(value) for name, value in conninfo_to_dict(f"postgresql://{rest}").items()}
    except (ProgrammingError, UnicodeError) as exc:
        raise SettingsError(_explain(url, str(exc))) from None
    if not found.get("port", "").strip(","):
        found.pop("port", None)
    _check(url, found)
    return found


def mask_url(url: str) -> str:
    """``url`` for people: every password replaced by ``**``, also in URLs that are malformed."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    cut = _query_start(rest)
    authority, query = rest[:cut], rest[cut:]
    user, at, hosts = authority.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        authority = f"{name}{':**' if colon else ''}@{hosts}"
    query = re.sub(r"([?&;]([^=&;?]*)=)([^&;?]*)", lambda m: f"{m[1]}**" if m[2].lower() in SECRETS else m[0], query)
    return f"{scheme}{separator}{authority}{query}"


def url_of(conninfo: str) -> str:
    """A ``pgtruth://`` URL for people, made from a connection string; its secrets are masked."""
    from psycopg.conninfo import conninfo_to_dict

    values = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    values.pop("connect_timeout", None)
    hosts, ports = values.pop("host", "").split(","), values.pop("port", "").split(",")
    if any(host.startswith("/") for host in hosts):
        values["host"] = ",".join(hosts)
        hosts = [""]
    ports = ports * len(hosts) if len(ports) == 1 else ports
    shown = ",".join(
        (f"[{host}]" if ":" in host else host) + (f":{port}" if port else "")
        for host, port in zip(hosts, ports, strict=False)
    )
    user = quote(values.pop("user", ""), safe="")
    if "password" in values:
        del values["password"]
        user += ":**"
    query = "&".join(
        f"{name}={'**' if name in SECRETS else quote(value, safe='/,')}"
        for name, value in sorted(values.items())
        if name != "dbname"
    )
    authority = f"{user}@{shown}" if user else shown
    return f"pgtruth://{authority}/{quote(values.get('dbname', ''), safe='')}{'?' if query else ''}{query}"


def nearest(name: str, known: object) -> str:
    """The end of a sentence about a misspelt name: ``; did you mean 'x'?`` or just a full stop."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)  # type: ignore[call-overload]
    return f"; did you mean {close[0]!r}?" if close else "."


@lru_cache(maxsize=1)
def libpq_parameters() -> frozenset[str]:
    """The names of every parameter that the installed libpq knows."""
    from psycopg import pq

    return frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())


def _query_start(rest: str) -> int:
    """Where the query begins: a ``?`` in a raw password is not it, an ``@`` in the query ends no password."""
    query = re.search(r"\?[a-z_]+=", rest)
    at = rest.rfind("@", 0, query.start() if query else len(rest))
    found = rest.find("?", at + 1)
    return len(rest) if found < 0 else found


def _explain(url: str, complaint: str) -> str:
    """libpq's complaint in our words: it may quote the password, so only a parameter's name is taken from it."""
    shown = mask_url(url)
    if match := re.search(r'invalid URI query parameter: "([^"]*)"', complaint):
        name = match[1]
        return (
            f"{shown!r}: unknown parameter {name!r}{nearest(name, libpq_parameters())} Every libpq parameter is"
            " allowed in the query; this transport's own options go to broker_transport_options"
        )
    if match := re.search(r'separator "=" in URI query parameter: "([^"]*)"', complaint):
        return f"{shown!r}: query parameters are written name=value; {match[1]!r} is not"
    if "percent-encoded" in complaint or "%00" in complaint:
        return f"{shown!r}: malformed percent-encoding; {_ENCODE}; a literal '%' is %25"
    if "IPv6" in complaint or "]" in complaint:
        return f"{shown!r}: an IPv6 address is written in brackets, as in pgtruth://user@[::1]:5432/database"
    return f"{shown!r} cannot be parsed: {LOOKS_LIKE}; {_ENCODE}"


def _check(url: str, found: Mapping[str, str]) -> None:
    """Refuse what libpq would take literally and fail on later, with a message that shows the password."""
    shown = mask_url(url)
    if "@" in found.get("host", "") or (not found.get("host", "").startswith("/") and "@" in found.get("dbname", "")):
        raise SettingsError(f"{shown!r} holds more than one '@', or a '/' before it; {_ENCODE}")
    for port in found.get("port", "").split(","):
        if port and not (port.isdecimal() and 0 < int(port) < 65536):
            raise SettingsError(f"{shown!r}: a port is a number from 1 to 65535; {_ENCODE}")
    hosts, ports = found.get("host", "").split(","), found.get("port", "").split(",")
    if len(ports) > 1 and len(ports) != len(hosts):
        raise SettingsError(f"{shown!r} names {len(hosts)} hosts and {len(ports)} ports; give each host its own port")
    if not found.get("dbname") and "service" not in found:
        raise SettingsError(f"{shown!r} names no database: {LOOKS_LIKE}")
    timeout = found.get("connect_timeout")
    if timeout is not None and not timeout.isdecimal():
        raise SettingsError(f"{shown!r}: connect_timeout is a whole number of seconds")
