-- Called by: counters.read.
-- Locks: nothing.
-- Index: none needed, a handful of rows.
SELECT name, value FROM {schema}.counters ORDER BY name
