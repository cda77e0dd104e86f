-- Called by: transport.entities.
-- Locks: the row it inserts.
-- Index: bindings_pkey.
INSERT INTO {schema}.bindings (exchange, routing_key, queue)
VALUES (%(exchange)s, %(routing_key)s, %(queue)s)
ON CONFLICT DO NOTHING
