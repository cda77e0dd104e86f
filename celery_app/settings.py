"""The application's settings, all of them from the environment.

Pure: nothing is opened or imported here, so a wrong value is reported before anything starts. The rest of the
application reads the values from one frozen object instead of ``os.environ``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

#: The modules that hold tasks. ``tasks.payments`` shows the effect ledger; the others need nothing but Celery.
TASK_MODULES = (
    "tasks.thumbnails",
    "tasks.reports",
    "tasks.webhooks",
    "tasks.payments",
    "tasks.troubles",
    "tasks.cleanup",
)


class WrongSetting(ValueError):
    """An environment variable has a value that cannot be used; the message names it."""


@dataclass(frozen=True, slots=True)
class AppSettings:
    """What differs between a laptop, a test and production."""

    broker_url: str = "pgtruth://localhost/app"
    result_backend: str = "pgtruth://"  # bare: the broker's database
    signal_url: str | None = None  # None: LISTEN/NOTIFY; or redis://, rediss://, unix://, silent://
    lease_seconds: float = 15.0
    reap_interval: float = 5.0
    images: Path = HERE / "images"
    output: Path = Path("var")
    keep_output_hours: float = 24.0
    runs_file: Path | None = None  # the demo's own evidence: one line per start of a body

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> AppSettings:
        """Read the settings; a variable that is not set, or is empty, keeps its default."""
        base = cls()
        runs = env.get("RUNS_FILE")
        return cls(
            broker_url=env.get("BROKER_URL") or base.broker_url,
            result_backend=env.get("RESULT_BACKEND") or base.result_backend,
            signal_url=env.get("SIGNAL_URL") or None,
            lease_seconds=_number(env, "LEASE_SECONDS", base.lease_seconds),
            reap_interval=_number(env, "REAP_INTERVAL", base.reap_interval),
            images=Path(env.get("IMAGES_DIR") or base.images),
            output=Path(env.get("OUTPUT_DIR") or base.output),
            keep_output_hours=_number(env, "KEEP_OUTPUT_HOURS", base.keep_output_hours),
            runs_file=Path(runs) if runs else None,
        )

    def celery(self) -> dict[str, Any]:
        """The same as Celery configuration: the two URLs and the options of the transport."""
        return {
            "broker_url": self.broker_url,
            "result_backend": self.result_backend,
            "broker_transport_options": {
                "signal_url": self.signal_url,
                "lease_seconds": self.lease_seconds,
                "reap_interval": self.reap_interval,
            },
            "include": list(TASK_MODULES),
            "result_extended": True,
            "worker_send_task_events": True,
            "task_send_sent_event": True,
            "broker_connection_retry_on_startup": True,
        }


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        raise WrongSetting(f"{name} is {text!r}: give a number of seconds or hours, for example {default:g}") from None
    if value <= 0:
        raise WrongSetting(f"{name} is {text!r}: it must be greater than zero")
    return value
