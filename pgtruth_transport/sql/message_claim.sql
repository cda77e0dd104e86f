-- Called by: transport.messages.fetch for consumers that acknowledge: delivered is held, with a lease.
-- Locks: the messages that it claims, one by one (LIMIT stops the nested loop). No flush: a lost claim is a redelivery.
-- Index: messages_fetch, one range per queue and priority (parallel arrays, in search order); held ones are walked over.
WITH first AS MATERIALIZED (
    SELECT c.id
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
    SELECT set_config('synchronous_commit', 'off', true) WHERE %(relax)s::boolean
)
UPDATE {schema}.messages AS m
SET owned_by = %(owner)s,
    lease_expires_at = clock_timestamp() + %(lease)s * interval '1 second',
    redelivered = m.redelivered OR m.owned_by IS NOT NULL
FROM first
WHERE m.id = first.id AND (SELECT count(*) FROM relaxed) >= 0
RETURNING m.id, m.queue, m.priority, m.headers, m.properties, m.body, m.redelivered
