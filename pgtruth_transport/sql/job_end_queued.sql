-- Called by: lifecycle.end_queued, for jobs that nobody holds: cancelled, expired, purged, known to no worker.
-- Locks: the named rows; a job that was claimed meanwhile is left to its holder.
-- Index: jobs_pkey. A revoke does not overwrite a state that somebody has set of an open job.
UPDATE {schema}.jobs j
SET status = 'failed', celery_state = g.celery_state, meta = g.meta, error = g.error, result = NULL,
    updated_at = clock_timestamp(), run_at = CASE WHEN j.run_at = 'infinity' THEN clock_timestamp() ELSE j.run_at END
FROM unnest(%(ids)s::text[], %(states)s::text[], %(metas)s::bytea[], %(errors)s::text[])
    AS g(id, celery_state, meta, error)
WHERE j.id = g.id AND j.status IN ('queued', 'enqueue_failed')
    AND (g.celery_state IS DISTINCT FROM 'REVOKED' OR j.run_at < 'infinity' OR j.celery_state IS NULL
        OR j.celery_state IN ('RETRY', 'RECEIVED', 'REJECTED'))
RETURNING j.id, EXISTS (SELECT 1 FROM {schema}.waiters w WHERE w.job_id = j.id) AS waited
