-- Called by: lifecycle.keep_open, by the sweep: open jobs that another open job still names, so that they are asked for again later.
-- Locks: the named rows. The status does not change.
-- Index: jobs_pkey (|| '', see job_finish).
UPDATE {schema}.jobs SET updated_at = clock_timestamp()
WHERE id = ANY(%(ids)s::text[]) AND status || '' = 'queued' AND run_at = 'infinity'
