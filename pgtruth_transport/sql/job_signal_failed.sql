-- Called by: lifecycle.signal_failed, when the wake-up could not be sent after the commit.
-- Locks: the named rows; a job that a poll has claimed meanwhile is left alone.
-- Index: jobs_pkey.
UPDATE {schema}.jobs
SET status = 'enqueue_failed', updated_at = clock_timestamp()
WHERE id = ANY(%(ids)s::text[]) AND status = 'queued' AND lease_version = 0 AND run_at <> 'infinity'
RETURNING id
