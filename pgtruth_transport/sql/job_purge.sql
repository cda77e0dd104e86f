-- Called by: lifecycle.purge, in batches, for `celery purge` and Queue.purge().
-- Locks: at most two batches, one of queued and one of parked jobs, skipping what others hold.
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
)
UPDATE {schema}.jobs j
SET status = 'failed', celery_state = 'REVOKED', error = 'purged', result = NULL, meta = NULL,
    updated_at = clock_timestamp()
WHERE j.id = ANY(ARRAY(SELECT id FROM gone UNION ALL SELECT id FROM parked))
    AND j.status IN ('queued', 'enqueue_failed')
RETURNING j.id
