-- Called by: transport.messages.put, once for all queues that a message goes to. Returns the queues that took it.
-- Locks: the rows it inserts. A queue that has expired takes nothing; one that nobody has declared keeps it for a day.
-- Index: queues_pkey.
INSERT INTO {schema}.messages (queue, priority, headers, properties, body, expires_at)
SELECT
    n.name, %(priority)s::smallint, %(headers)s::bytea, %(properties)s::bytea, %(body)s::bytea,
    COALESCE(
        clock_timestamp() + %(expires_in)s::float8 * interval '1 second',
        CASE WHEN q.name IS NULL THEN clock_timestamp() + interval '1 day' END)
FROM unnest(%(queues)s::text[]) AS n(name)
LEFT JOIN {schema}.queues AS q ON q.name = n.name
WHERE q.expires_at IS NULL OR q.expires_at > (SELECT clock_timestamp())
RETURNING queue
