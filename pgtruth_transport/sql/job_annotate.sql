-- Called by: lifecycle.annotate, when another task or a client sets a custom state of a job that it does not hold.
-- Locks: the row. Only what AsyncResult shows changes, never the status.
-- Index: jobs_pkey.
UPDATE {schema}.jobs
SET celery_state = %(state)s, meta = %(meta)s
WHERE id = %(id)s AND status IN ('queued', 'processing')
RETURNING id
