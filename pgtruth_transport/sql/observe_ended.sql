-- Called by: observe.queries.ended, for `stats`, the metrics and ADR-007's review triggers: the ends of the last minutes.
-- Locks: nothing. Reads the newest ends of each status, at most the limit, so a busy window is judged by its newest part.
-- Index: jobs_ended, backwards from now.
WITH newest AS (
    SELECT s.status, r.*
    FROM (VALUES ('done'), ('failed')) AS s(status)
    CROSS JOIN LATERAL (
        SELECT j.updated_at, j.retry_count,
            j.updated_at - LEAST(j.updated_at, CASE WHEN j.retry_count = 0 THEN GREATEST(j.created_at, j.run_at)
                                                    ELSE j.created_at END) AS took
        FROM {schema}.jobs j
        WHERE j.status = s.status AND j.status IN ('done', 'failed')
            AND j.updated_at > (SELECT clock_timestamp() - %(window)s * interval '1 second')
        ORDER BY j.updated_at DESC LIMIT %(limit)s
    ) r
)
SELECT
    count(*) FILTER (WHERE status = 'done'), count(*) FILTER (WHERE status = 'failed'),
    count(*) FILTER (WHERE retry_count > 0),
    EXTRACT(epoch FROM clock_timestamp() - min(updated_at))::float8,
    EXTRACT(epoch FROM percentile_cont(0.5) WITHIN GROUP (ORDER BY took))::float8,
    EXTRACT(epoch FROM percentile_cont(0.95) WITHIN GROUP (ORDER BY took))::float8,
    EXTRACT(epoch FROM max(took))::float8,
    avg((took <= %(objective)s * interval '1 second')::int)::float8
FROM newest
