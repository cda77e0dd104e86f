-- Called by: observe.health.unknown_effects, for `stats` and the metrics: outside effects that nobody can vouch for.
-- Locks: nothing. At most the limit of rows.
-- Index: effects_unknown (unknown effects only).
SELECT u.kind, count(*), EXTRACT(epoch FROM clock_timestamp() - min(u.unknown_since))::float8
FROM (SELECT e.kind, e.unknown_since FROM {schema}.effects e WHERE e.state = 'unknown' LIMIT %(limit)s) u
GROUP BY u.kind
ORDER BY u.kind
