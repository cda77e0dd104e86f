-- Called by: transport.messages.delete_expired, from the sweep, in batches of count.
-- Locks: messages past their expiration and those of expired queues, skipping what others hold.
-- Index: messages_fetch for expired queues; messages is read as a whole for the others (no task is in it, it is small).
WITH expired AS MATERIALIZED (
    SELECT m.id
    FROM {schema}.messages AS m
    WHERE m.expires_at < (SELECT clock_timestamp())
    LIMIT %(count)s
    FOR UPDATE OF m SKIP LOCKED
), orphaned AS MATERIALIZED (
    SELECT m.id
    FROM {schema}.queues AS q
    JOIN {schema}.messages AS m ON m.queue = q.name
    WHERE q.expires_at < (SELECT clock_timestamp())
    LIMIT %(count)s
    FOR UPDATE OF m SKIP LOCKED
)
DELETE FROM {schema}.messages AS m
USING (SELECT id FROM expired UNION SELECT id FROM orphaned) AS old
WHERE m.id = old.id
