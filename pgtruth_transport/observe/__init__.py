"""Looking at the queue: queries, metrics, the exporter, the command line's tables, and Flower.

Nothing here moves a job by itself, and nothing is imported before it is asked for.
"""
