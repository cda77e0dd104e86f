-- Called by: lifecycle.lock_queued, before jobs that nobody holds are ended (their chords must be told in the same transaction).
-- Locks: the rows that it returns, until the caller's transaction ends.
-- Index: jobs_pkey. An open job with a state that somebody has set is left to whoever that is.
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    COALESCE(claimed_at, clock_timestamp())::text AS claimed_at, headers, properties, body
FROM {schema}.jobs
WHERE id = ANY(%(ids)s::text[]) AND status IN ('queued', 'enqueue_failed')
    AND (run_at < 'infinity' OR celery_state IS NULL OR celery_state IN ('RETRY', 'RECEIVED', 'REJECTED'))
ORDER BY id
FOR UPDATE
