-- Called by: observe.health.tables, for `stats` and ADR-007's review triggers: dead rows and sizes of the big tables.
-- Locks: nothing. Statistics only: no row of the tables is read.
-- Index: none.
SELECT
    t.relname, t.n_live_tup, t.n_dead_tup, t.n_tup_upd, t.n_tup_hot_upd,
    pg_table_size(t.relid), pg_indexes_size(t.relid),
    EXTRACT(epoch FROM clock_timestamp() - GREATEST(t.last_vacuum, t.last_autovacuum))::float8
FROM pg_stat_user_tables t
WHERE t.schemaname = %(schema)s AND t.relname IN ('jobs', 'attempts', 'messages', 'effects')
ORDER BY t.relname
