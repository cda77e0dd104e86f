-- Called by: transport.entities, for every queue that a process declares (permanent ones once a minute at most).
-- Locks: the queue's row. A transient queue that exists lives on for its ttl from now; a permanent one is left alone.
-- Index: queues_pkey.
INSERT INTO {schema}.queues AS q (name, durable, auto_delete, ttl, expires_at)
VALUES (
    %(name)s, %(durable)s, %(auto_delete)s, %(ttl)s::float8,
    clock_timestamp() + %(ttl)s::float8 * interval '1 second')
ON CONFLICT (name) DO UPDATE SET ttl = EXCLUDED.ttl, expires_at = EXCLUDED.expires_at
WHERE q.ttl IS NOT NULL OR EXCLUDED.ttl IS NOT NULL
