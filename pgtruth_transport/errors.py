"""Errors that this package raises; each message says what to do."""

from __future__ import annotations


class PgTruthError(Exception):
    """Base of every error that the package itself raises."""


class SettingsError(PgTruthError, ValueError):
    """A URL or an option is malformed, unknown or contradictory."""


class SchemaError(PgTruthError, RuntimeError):
    """The database's schema is missing, older or newer than this package; the message names the command to run."""


class Stopping(PgTruthError):
    """This process is stopping and the server does not answer: trying until it does would keep it from ending."""


class EventHeldBack(PgTruthError):
    """A worker's heartbeat could not be sent, as the database is out of reach: its dispatcher keeps it until later."""


class RefusedMessage(PgTruthError, ValueError):
    """A message cannot be stored (for instance a NUL byte in a queue name): nothing was written."""


class TransactionError(PgTruthError, RuntimeError):
    """``in_transaction`` was given something that it cannot enqueue in."""
