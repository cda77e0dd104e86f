-- Called by: the result backend, for AsyncResult.
-- Locks: nothing.
-- Index: jobs_pkey.
SELECT id, status, celery_state, result, meta, updated_at, owned_by, error
FROM {schema}.jobs
WHERE id = ANY(%(ids)s::text[])
