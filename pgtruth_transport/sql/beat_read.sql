-- Called by: beat, at every look at the schedule.
-- Locks: nothing.
-- Index: beat_entries_pkey.
SELECT g.name, e.last_run_at, clock_timestamp() AS now
FROM unnest(%(entries)s::text[]) AS g(name) LEFT JOIN {schema}.beat_entries e ON e.name = g.name
