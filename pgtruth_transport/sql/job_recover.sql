-- Called by: lifecycle.recover, by the sweep: jobs whose producer could not send the signal.
-- Locks: at most the batch, skipping what others hold.
-- Index: jobs_enqueue_failed; jobs_pkey (|| '', see job_finish).
WITH parked AS MATERIALIZED (
    SELECT id FROM {schema}.jobs WHERE status = 'enqueue_failed' ORDER BY id LIMIT %(count)s FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.jobs j
SET status = 'queued', updated_at = clock_timestamp()
FROM parked p
WHERE j.id = p.id AND j.status || '' = 'enqueue_failed'
RETURNING j.id, j.queue
