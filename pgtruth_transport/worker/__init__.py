"""What runs inside a Celery worker: claim, trace, settle, leases and duties."""
