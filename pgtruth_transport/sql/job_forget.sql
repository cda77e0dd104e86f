-- Called by: the result backend, for AsyncResult.forget(): the result goes, the truth about the job stays.
-- Locks: the row.
-- Index: jobs_pkey (|| '', see job_finish).
UPDATE {schema}.jobs SET celery_state = 'PENDING', result = NULL, meta = NULL
WHERE id = %(id)s AND status || '' IN ('done', 'failed')
