"""The main job in one command: real servers, real workers, real work, and everything that goes wrong in production.

``python -m celery_app.demo`` (``make demo``) runs it and judges it; ``python -m celery_app.demo up`` (``make up``)
keeps the same processes running. Every figure that is shown is the answer to a query, or a count of lines that
the task bodies wrote to a file.
"""
