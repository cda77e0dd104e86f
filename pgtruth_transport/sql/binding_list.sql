-- Called by: transport.entities, for `celery list bindings`.
-- Locks: nothing.
-- Index: none; the table holds a row per binding and is read as a whole.
SELECT queue, exchange, routing_key FROM {schema}.bindings ORDER BY exchange, routing_key, queue
