-- The demo's final table: what left no row behind.
-- Locks nothing.
-- Reads the whole table, a handful of rows.
SELECT name, value FROM pgtruth.counters;
