-- Called by: effects.book.stats, for metrics: open effects by kind and state, with the age of the oldest.
-- Locks: nothing.
-- Index: effects_started; effects_unknown (one branch each, or neither partial index would be used).
SELECT kind, state, count(*) AS number, extract(epoch FROM clock_timestamp() - min(since))::float8 AS oldest
FROM (
    SELECT kind, state, started_at AS since FROM {schema}.effects WHERE state = 'started'
    UNION ALL
    SELECT kind, state, unknown_since FROM {schema}.effects WHERE state = 'unknown'
) o
GROUP BY kind, state
ORDER BY kind, state
