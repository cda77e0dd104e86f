"""Celery apps that the tests' worker processes run; configured by environment variables."""
