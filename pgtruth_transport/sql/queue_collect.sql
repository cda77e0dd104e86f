-- Called by: transport.entities.collect_garbage, from the sweep, after message_expire has emptied expired queues.
-- Locks: expired queues that are empty, skipping those that somebody declares or renews now, and their bindings.
-- Index: bindings_queue, messages_fetch; queues is read as a whole (a row per queue and per listening process).
WITH expired AS MATERIALIZED (
    SELECT q.name
    FROM {schema}.queues AS q
    WHERE q.expires_at < (SELECT clock_timestamp())
        AND NOT EXISTS (SELECT FROM {schema}.messages AS m WHERE m.queue = q.name)
    LIMIT %(count)s
    FOR UPDATE OF q SKIP LOCKED
), unbound AS (
    DELETE FROM {schema}.bindings AS b USING expired WHERE b.queue = expired.name
)
DELETE FROM {schema}.queues AS q USING expired WHERE q.name = expired.name
