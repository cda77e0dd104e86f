-- Called by: lifecycle.purge, in batches, for `celery purge` and Queue.purge().
-- Locks: at most the batch, skipping what others hold.
-- Index: jobs_claim.
WITH gone AS MATERIALIZED (
    SELECT id FROM {schema}.jobs
    WHERE status = 'queued' AND queue = %(queue)s AND run_at < 'infinity'
    ORDER BY priority DESC, run_at, id
    LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.jobs j
SET status = 'failed', celery_state = 'REVOKED', error = 'purged', result = NULL, meta = NULL,
    updated_at = clock_timestamp()
FROM gone
WHERE j.id = gone.id AND j.status = 'queued'
RETURNING j.id
