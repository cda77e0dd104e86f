-- Called by: transport.entities, for the queues that this process consumes, every third of the shortest ttl.
-- Locks: the rows of transient queues. Returns every name with its ttl, and whether the queue (still) exists.
-- Index: queues_pkey.
WITH renewed AS (
    UPDATE {schema}.queues
    SET expires_at = clock_timestamp() + ttl * interval '1 second'
    WHERE name = ANY(%(names)s::text[]) AND ttl IS NOT NULL
)
SELECT n.name, q.ttl, q.name IS NOT NULL AS exists
FROM unnest(%(names)s::text[]) AS n(name)
LEFT JOIN {schema}.queues AS q ON q.name = n.name
