"""The example application: what a team would copy. ``celery -A celery_app worker`` finds :data:`app` here."""

from __future__ import annotations

from celery_app.app import app

__all__ = ["app"]
