-- Called by: lifecycle.signal_failed, when the wake-up could not be sent after the commit.
-- Locks: the named rows; a job that a poll has claimed meanwhile is left alone.
-- Index: jobs_pkey (|| '', see job_finish).
UPDATE {schema}.jobs j
SET status = 'enqueue_failed', updated_at = clock_timestamp()
FROM unnest(%(ids)s::text[]) AS g(id)
WHERE j.id = g.id AND j.status || '' = 'queued' AND j.lease_version = 0 AND j.run_at <> 'infinity'
RETURNING j.id
