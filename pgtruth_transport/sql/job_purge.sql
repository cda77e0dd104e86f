-- Called by: lifecycle.purge, in batches, for `celery purge` and Queue.purge(). Ends what nothing follows from; the rest is only locked and returned.
-- Locks: at most two batches, one of queued and one of parked jobs, skipping what others hold, until the caller's transaction ends.
-- Index: jobs_claim; jobs_enqueue_failed (what a sweep would queue again after the purge).
WITH gone AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
    WHERE status = 'queued' AND queue = %(queue)s AND run_at < 'infinity'
    ORDER BY priority DESC, run_at, id
    LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
), parked AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
    WHERE status = 'enqueue_failed' AND queue = %(queue)s
    LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
), ended AS (
    UPDATE {schema}.jobs j
    SET status = 'failed', celery_state = 'REVOKED', error = 'purged', result = NULL, meta = NULL,
        updated_at = clock_timestamp()
    WHERE j.id = ANY(ARRAY(SELECT id FROM gone UNION ALL SELECT id FROM parked))
        AND j.status IN ('queued', 'enqueue_failed') AND j.group_id IS NULL
        AND substring(j.body FROM GREATEST(1, length(j.body) - length(%(simple)s::bytea) + 1)) = %(simple)s::bytea
    RETURNING j.id
)
SELECT p.id, e.id IS NOT NULL AS ended, EXISTS (SELECT 1 FROM {schema}.waiters w WHERE w.job_id = e.id) AS waited
FROM (SELECT id FROM gone UNION ALL SELECT id FROM parked) AS p
LEFT JOIN ended e ON e.id = p.id
