-- Called by: transport.entities, for every message that is published to a named exchange.
-- Locks: nothing. An exchange that nobody has declared is direct. Queues that have expired are as good as gone.
-- Index: bindings_pkey, by exchange and (direct) routing key; queues_pkey for each queue found.
SELECT e.type, b.routing_key, b.queue
FROM (SELECT COALESCE((SELECT type FROM {schema}.exchanges WHERE name = %(exchange)s), 'direct') AS type) AS e
JOIN {schema}.bindings AS b
    ON b.exchange = %(exchange)s AND (e.type <> 'direct' OR b.routing_key = %(routing_key)s)
LEFT JOIN {schema}.queues AS q ON q.name = b.queue
WHERE q.expires_at IS NULL OR q.expires_at > (SELECT clock_timestamp())
