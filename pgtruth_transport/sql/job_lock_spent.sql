-- Called by: lifecycle.lock_spent, by the sweep: expired leases of jobs that may not run again.
-- Locks: at most the batch, skipping what others hold; the caller ends them by job_finish in the same transaction.
-- Index: jobs_processing (the held jobs only).
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    claimed_at::text AS claimed_at, headers, properties, body, owned_by
FROM {schema}.jobs
WHERE status = 'processing' AND lease_expires_at <= clock_timestamp()
    AND (at_most_once OR retry_count >= COALESCE(max_retries, %(limit)s))
ORDER BY id
LIMIT %(count)s
FOR UPDATE SKIP LOCKED
