"""Whether an app's broker is this transport. No driver is imported here: every ``celery`` start asks."""

from __future__ import annotations

from typing import Any


def is_ours(conf: Any) -> bool:
    """Whether ``conf`` names a ``pgtruth://`` broker."""
    for url in (conf.broker_write_url, conf.broker_read_url, conf.broker_url):
        first = url[0] if isinstance(url, list | tuple) and url else url
        if isinstance(first, str) and first.partition("://")[0] in ("pgtruth", "pgtruth+postgresql"):
            return True
    return False
