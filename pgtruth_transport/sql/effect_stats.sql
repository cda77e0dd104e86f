-- Called by: effects.book.stats, for metrics: open effects by kind and state, with the age of the oldest.
-- Locks: nothing.
-- Index: effects_started; effects_unknown.
SELECT kind, state, count(*) AS number,
    extract(epoch FROM clock_timestamp() - min(COALESCE(unknown_since, started_at)))::float8 AS oldest
FROM {schema}.effects
WHERE state IN ('started', 'unknown')
GROUP BY kind, state
ORDER BY kind, state
