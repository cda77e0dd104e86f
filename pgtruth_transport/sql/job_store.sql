-- Called by: lifecycle.store, for results of ids that nobody holds: steps of a failed chain, a failed chord body, revokes.
-- Locks: the row. Ends an open or not yet existing job; a job that is queued, held or ended keeps its status.
-- Index: jobs_pkey for the conflict. A revoke does not overwrite a state that somebody has set of an open job.
INSERT INTO {schema}.jobs AS j (id, status, task, queue, run_at, celery_state, result, meta, error, headers)
SELECT g.id, g.status, g.task, '', CASE WHEN g.status = 'queued' THEN 'infinity' ELSE clock_timestamp() END,
    g.celery_state, g.result, g.meta, g.error, NULL
FROM unnest(
    %(ids)s::text[], %(statuses)s::text[], %(tasks)s::text[], %(states)s::text[], %(results)s::bytea[],
    %(metas)s::bytea[], %(errors)s::text[]
) AS g(id, status, task, celery_state, result, meta, error)
ON CONFLICT (id) DO UPDATE SET
    status = CASE WHEN EXCLUDED.status = 'failed' THEN 'failed' ELSE j.status END, run_at = EXCLUDED.run_at,
    celery_state = EXCLUDED.celery_state, meta = EXCLUDED.meta, error = COALESCE(EXCLUDED.error, j.error),
    updated_at = clock_timestamp()
WHERE j.status = 'queued' AND j.run_at = 'infinity' AND EXCLUDED.status IN ('queued', 'failed')
    AND (EXCLUDED.celery_state IS DISTINCT FROM 'REVOKED' OR j.celery_state IS NULL
        OR j.celery_state IN ('RETRY', 'RECEIVED', 'REJECTED'))
RETURNING j.id, EXISTS (SELECT 1 FROM {schema}.waiters w WHERE w.job_id = j.id) AS waited
