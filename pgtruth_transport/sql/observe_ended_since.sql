-- Called by: observe.queries.ended_since, by the exporter's histograms: jobs that ended between two moments.
-- Locks: nothing. At most the limit, oldest first; what is left over is read by the next call.
-- Index: jobs_ended.
SELECT
    s.status, r.updated_at::text, r.retry_count,
    EXTRACT(epoch FROM r.updated_at - LEAST(r.updated_at, CASE
        WHEN r.retry_count = 0 THEN GREATEST(r.created_at, r.run_at)
        ELSE r.created_at END))::float8
FROM (VALUES ('done'), ('failed')) AS s(status)
CROSS JOIN LATERAL (
    SELECT j.updated_at, j.retry_count, j.created_at, j.run_at
    FROM {schema}.jobs j
    WHERE j.status = s.status AND j.status IN ('done', 'failed')
        AND j.updated_at > %(after)s::timestamptz AND j.updated_at <= %(until)s::timestamptz
    ORDER BY j.updated_at LIMIT %(limit)s
) r
ORDER BY r.updated_at
LIMIT %(limit)s
