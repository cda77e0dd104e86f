"""A Celery broker transport for which PostgreSQL is the only authority on a job's state.

Importing this package registers ``pgtruth://`` with kombu and Celery, and nothing else: no driver, no connection. Every
``celery`` command does it by an entry point; a plain producer imports it once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery._state import _get_active_apps
from celery.app.base import BUILTIN_FIXUPS
from kombu.transport import TRANSPORT_ALIASES

if TYPE_CHECKING:
    from . import effects
    from .installing import install
    from .task import TruthTask
    from .transactions import finish_with, finish_with_async, in_transaction

__all__ = [
    "TruthTask",
    "__version__",
    "effects",
    "finish_with",
    "finish_with_async",
    "in_transaction",
    "install",
]
__version__ = "0.1.0"

SCHEMES = ("pgtruth", "pgtruth+postgresql")
_LAZY = {
    "TruthTask": "task",
    "install": "installing",
    "finish_with": "transactions",
    "finish_with_async": "transactions",
    "in_transaction": "transactions",
}

for _scheme in SCHEMES:
    TRANSPORT_ALIASES[_scheme] = "pgtruth_transport.transport.transport:Transport"

BUILTIN_FIXUPS.add(f"{__name__}.app:fixup")
for _app in _get_active_apps():  # created before this import
    from .app import fixup

    fixup(_app)


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "effects":
        return import_module(f"{__name__}.effects")
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
