-- Called by: observe.queries.holders, for `stats` and the metrics: who holds how many jobs, and for how long.
-- Locks: nothing.
-- Index: jobs_processing (the held jobs only, so never more than the workers can hold).
SELECT
    j.owned_by, count(*),
    EXTRACT(epoch FROM clock_timestamp() - min(j.claimed_at))::float8,
    EXTRACT(epoch FROM min(j.lease_expires_at) - clock_timestamp())::float8,
    count(*) FILTER (WHERE j.lease_expires_at <= clock_timestamp())
FROM {schema}.jobs j
WHERE j.status = 'processing'
GROUP BY j.owned_by
ORDER BY j.owned_by
