-- Called by: transport.entities, for a passive declaration.
-- Locks: nothing.
-- Index: queues_pkey.
SELECT name
FROM {schema}.queues
WHERE name = %(name)s AND (expires_at IS NULL OR expires_at > (SELECT clock_timestamp()))
