-- Called by: counters.add.
-- Locks: the counters' rows, in the order of their names.
-- Index: counters_pkey.
INSERT INTO {schema}.counters AS c (name, value)
SELECT g.name, g.value FROM unnest(%(names)s::text[], %(values)s::bigint[]) AS g(name, value)
ON CONFLICT (name) DO UPDATE SET value = c.value + EXCLUDED.value
