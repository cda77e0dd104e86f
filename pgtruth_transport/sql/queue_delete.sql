-- Called by: transport.entities. With if_empty a queue that holds messages is left alone.
-- Locks: the queue, its bindings and its messages. Returns how many messages went with it.
-- Index: queues_pkey, bindings_queue, messages_fetch.
WITH gone AS MATERIALIZED (
    SELECT %(name)s::text AS name
    WHERE NOT %(if_empty)s::boolean OR NOT EXISTS (SELECT FROM {schema}.messages WHERE queue = %(name)s::text)
), dropped AS (
    DELETE FROM {schema}.queues AS q USING gone WHERE q.name = gone.name
), unbound AS (
    DELETE FROM {schema}.bindings AS b USING gone WHERE b.queue = gone.name
), emptied AS (
    DELETE FROM {schema}.messages AS m USING gone WHERE m.queue = gone.name
    RETURNING m.id
)
SELECT count(*) FROM emptied
