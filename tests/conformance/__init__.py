"""Celery's and kombu's own suites, run against this transport with nothing changed but the URLs."""
