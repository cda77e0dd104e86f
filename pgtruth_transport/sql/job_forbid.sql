-- Called by: lifecycle.cancel, for jobs that a worker holds: the attempt may end as it likes, but no other begins.
-- Locks: the named rows. The status does not change: what comes back to the queue is past its expiry, and the sweep ends it.
-- Index: jobs_pkey (|| '', see job_finish).
UPDATE {schema}.jobs SET expires_at = 'epoch'
WHERE id = ANY(%(ids)s::text[]) AND status || '' IN ('queued', 'processing')
