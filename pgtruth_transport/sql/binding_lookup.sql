-- Called by: transport.entities, for every message that is published to a named exchange.
-- Locks: nothing. An exchange that nobody has declared is direct. Queues that have expired are as good as gone.
-- Index: bindings_pkey, by exchange and (direct) routing key; exchanges_pkey; queues_pkey for each binding found.
SELECT 'direct', b.routing_key, b.queue,
    COALESCE((SELECT q.auto_delete FROM {schema}.queues AS q WHERE q.name = b.queue), false) AS auto_delete
FROM {schema}.bindings AS b
WHERE b.exchange = %(exchange)s AND b.routing_key = %(routing_key)s
    AND NOT EXISTS (SELECT FROM {schema}.exchanges AS e WHERE e.name = %(exchange)s AND e.type <> 'direct')
    AND COALESCE((SELECT q.expires_at FROM {schema}.queues AS q WHERE q.name = b.queue), 'infinity') > clock_timestamp()
UNION ALL
SELECT e.type, b.routing_key, b.queue,
    COALESCE((SELECT q.auto_delete FROM {schema}.queues AS q WHERE q.name = b.queue), false)
FROM {schema}.exchanges AS e
JOIN {schema}.bindings AS b ON b.exchange = e.name
WHERE e.name = %(exchange)s AND e.type <> 'direct'
    AND COALESCE((SELECT q.expires_at FROM {schema}.queues AS q WHERE q.name = b.queue), 'infinity') > clock_timestamp()
