-- Called by: observe.health.snapshots: who holds back vacuum, oldest first.
-- Locks: nothing.
-- Index: none (views of the server's sessions, slots and prepared transactions).
SELECT h.kind, h.name, h.pid, h.age, h.seconds
FROM (
    SELECT 'session' AS kind,
        COALESCE(NULLIF(a.application_name, ''), a.usename, a.backend_type) || ' (' || COALESCE(a.state, '?') || ')' AS name,
        a.pid, age(a.backend_xmin)::bigint AS age,
        EXTRACT(epoch FROM clock_timestamp() - COALESCE(a.xact_start, a.backend_start))::float8 AS seconds
    FROM pg_stat_activity a
    WHERE a.backend_xmin IS NOT NULL AND a.pid <> pg_backend_pid()
        AND (a.datname = current_database() OR a.datname IS NULL) AND a.backend_type NOT LIKE 'autovacuum%%'
    UNION ALL
    SELECT 'replication slot', s.slot_name::text, s.active_pid, age(COALESCE(s.xmin, s.catalog_xmin))::bigint, NULL
    FROM pg_replication_slots s
    WHERE s.xmin IS NOT NULL OR s.catalog_xmin IS NOT NULL
    UNION ALL
    SELECT 'prepared transaction', p.gid, NULL, age(p.transaction)::bigint,
        EXTRACT(epoch FROM clock_timestamp() - p.prepared)::float8
    FROM pg_prepared_xacts p
    WHERE p.database = current_database()
) h
ORDER BY h.age DESC, h.seconds DESC NULLS LAST
LIMIT %(limit)s
