-- Called by: lifecycle.lock_forbidden, by the sweep: jobs revoked while a worker held them, which have come back to the queue (job_forbid).
-- Locks: at most the batch, skipping what others hold.
-- Index: jobs_expiring.
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    COALESCE(claimed_at, clock_timestamp())::text AS claimed_at, headers, properties, body
FROM {schema}.jobs
WHERE status = 'queued' AND expires_at IS NOT NULL AND expires_at = 'epoch'
LIMIT %(count)s
FOR UPDATE SKIP LOCKED
