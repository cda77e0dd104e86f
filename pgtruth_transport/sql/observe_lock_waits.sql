-- Called by: observe.health.lock_waits: sessions of this database that wait for a lock.
-- Locks: nothing.
-- Index: none (a view of the server's sessions).
SELECT
    count(*),
    COALESCE(EXTRACT(epoch FROM clock_timestamp() - min(a.state_change)), 0)::float8
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.wait_event_type = 'Lock'
