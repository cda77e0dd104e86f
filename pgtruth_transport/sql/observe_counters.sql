-- Called by: observe.queries.counters: stale writes refused, leases expired and the other events that leave no row.
-- Locks: nothing.
-- Index: none (a handful of rows).
SELECT name, value FROM {schema}.counters ORDER BY name
