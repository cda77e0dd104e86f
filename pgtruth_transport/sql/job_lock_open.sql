-- Called by: lifecycle.lock_open, by the sweep: open jobs whose message nobody can publish any more.
-- Locks: the rows that it returns, skipping what others hold. One whose message has come meanwhile is left alone.
-- Index: jobs_pkey (|| '', see job_finish).
SELECT id, task, queue, priority, lease_version, retry_count, max_retries, at_most_once,
    COALESCE(claimed_at, clock_timestamp())::text AS claimed_at, headers, properties, body
FROM {schema}.jobs
WHERE id = ANY(%(ids)s::text[]) AND status || '' = 'queued' AND run_at = 'infinity'
    AND updated_at < (SELECT clock_timestamp()) - %(keep)s * interval '1 second'
ORDER BY id
FOR UPDATE SKIP LOCKED
