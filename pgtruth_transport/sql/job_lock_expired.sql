-- Called by: lifecycle.lock_expired, by the sweep: queued jobs that are past their expiry.
-- Locks: at most the batch, skipping what others hold.
-- Index: jobs_expiring.
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    COALESCE(claimed_at, clock_timestamp())::text AS claimed_at, headers, properties, body
FROM {schema}.jobs
WHERE status = 'queued' AND expires_at IS NOT NULL AND expires_at <= (SELECT clock_timestamp())
    AND expires_at <> 'epoch'
LIMIT %(count)s
FOR UPDATE SKIP LOCKED
