-- Called by: transport.messages.fetch for consumers that do not acknowledge: delivered is deleted.
-- Locks: the messages that it deletes, one by one (LIMIT stops the nested loop). No flush for transient queues alone.
-- Index: messages_fetch, one range per queue and priority (parallel arrays, in search order); held ones are walked over.
WITH first AS MATERIALIZED (
    SELECT c.id, s.queue
    FROM unnest(%(queues)s::text[], %(priorities)s::smallint[]) AS s(queue, priority)
    CROSS JOIN LATERAL (
        SELECT m.id
        FROM {schema}.messages AS m
        WHERE m.queue = s.queue AND m.priority = s.priority
            AND (m.lease_expires_at IS NULL OR m.lease_expires_at < clock_timestamp())
            AND (m.expires_at IS NULL OR m.expires_at > clock_timestamp())
        ORDER BY m.id
        LIMIT %(count)s
        FOR UPDATE OF m SKIP LOCKED
    ) AS c
    LIMIT %(count)s
), relaxed AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
    WHERE %(relax)s::boolean AND NOT EXISTS (
        SELECT FROM first WHERE (SELECT q.ttl FROM {schema}.queues AS q WHERE q.name = first.queue) IS NULL)
)
DELETE FROM {schema}.messages AS m
USING first
WHERE m.id = first.id AND (SELECT count(*) FROM relaxed) >= 0
RETURNING m.id, m.queue, m.priority, m.headers, m.properties, m.body, m.redelivered OR m.owned_by IS NOT NULL
