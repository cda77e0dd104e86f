-- Called by: observe.queries.totals: how many jobs have ended and are still kept.
-- Locks: nothing. Counts up to the limit per status.
-- Index: jobs_ended.
SELECT s.status, r.n
FROM (VALUES ('done'), ('failed')) AS s(status)
CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (
        SELECT 1 FROM {schema}.jobs j
        WHERE j.status = s.status AND j.status IN ('done', 'failed')
        ORDER BY j.updated_at DESC LIMIT %(limit)s) c
) r
