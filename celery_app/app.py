"""The Celery application: a plain one, made a pgtruth one by ``install``."""

from __future__ import annotations

import os

from celery import Celery

import pgtruth_transport
from celery_app import recorder, schedule
from celery_app.settings import AppSettings


def make_app(settings: AppSettings) -> Celery:
    """A new application for these settings; nothing is connected yet."""
    app = Celery("celery_app", set_as_current=False)
    app.conf.update(settings.celery())
    app.conf.beat_schedule = schedule.entries(settings)
    pgtruth_transport.install(app)
    return app


settings = AppSettings.from_env(os.environ)
app = make_app(settings)
app.set_default()
if settings.runs_file is not None:
    recorder.connect(settings.runs_file)
