-- Called by: lifecycle.progress, when a task body reports a state of its own (update_state).
-- Locks: the row, only while the attempt still holds it. No indexed column changes.
-- Index: jobs_pkey (|| '', see job_finish).
UPDATE {schema}.jobs
SET celery_state = %(state)s, meta = %(meta)s
WHERE id = %(id)s AND status || '' = 'processing' AND lease_version = %(version)s AND owned_by = %(owner)s
RETURNING id
