-- Called by: transport.messages.put, once for all queues that a message goes to. Returns the queues that took it.
-- Locks: the rows it inserts; no flush is waited for where all queues are transient. Expired queues take nothing.
-- Index: queues_pkey. A queue that nobody has declared keeps the message for a day.
WITH target AS MATERIALIZED (
    SELECT n.name, q.name IS NULL AS undeclared, q.ttl IS NOT NULL AS transient
    FROM unnest(%(queues)s::text[]) AS n(name)
    LEFT JOIN {schema}.queues AS q ON q.name = n.name
    WHERE q.expires_at IS NULL OR q.expires_at > (SELECT clock_timestamp())
), relaxed AS MATERIALIZED (
    SELECT set_config('synchronous_commit', 'off', true)
    WHERE %(relax)s::boolean AND NOT EXISTS (SELECT FROM target WHERE NOT transient)
)
INSERT INTO {schema}.messages (queue, priority, headers, properties, body, expires_at)
SELECT
    target.name, %(priority)s::smallint, %(headers)s::bytea, %(properties)s::bytea, %(body)s::bytea,
    COALESCE(
        clock_timestamp() + %(expires_in)s::float8 * interval '1 second',
        CASE WHEN target.undeclared THEN clock_timestamp() + interval '1 day' END)
FROM target
WHERE (SELECT count(*) FROM relaxed) >= 0
RETURNING queue
