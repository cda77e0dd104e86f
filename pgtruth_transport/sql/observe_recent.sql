-- Called by: observe.backfill, to tell Flower of jobs that it has not seen: what is held, has ended lately, or waits.
-- Locks: nothing. Newest ends first, at most the limit of each status; of what waits only the next in line.
-- Index: jobs_processing, jobs_claim, jobs_ended; attempts_pkey for the last holder.
WITH seen AS (
    (SELECT j.id, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'processing' AND j.updated_at > %(after)s::timestamptz LIMIT %(limit)s)
    UNION ALL
    (SELECT j.id, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'queued' ORDER BY j.queue, j.priority DESC, j.run_at, j.id LIMIT %(waiting)s)
    UNION ALL
    (SELECT j.id, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'done' AND j.updated_at > %(after)s::timestamptz
     ORDER BY j.updated_at DESC LIMIT %(limit)s)
    UNION ALL
    (SELECT j.id, j.updated_at FROM {schema}.jobs j
     WHERE j.status = 'failed' AND j.updated_at > %(after)s::timestamptz
     ORDER BY j.updated_at DESC LIMIT %(limit)s)
), picked AS MATERIALIZED (
    SELECT id FROM seen ORDER BY updated_at DESC LIMIT %(limit)s
)
SELECT
    j.id, j.status, j.task, j.queue, j.celery_state, j.retry_count, j.root_id, j.parent_id,
    EXTRACT(epoch FROM j.created_at)::float8,
    EXTRACT(epoch FROM COALESCE(j.claimed_at, a.claimed_at))::float8,
    EXTRACT(epoch FROM j.updated_at)::float8,
    COALESCE(j.owned_by, a.owned_by), j.error, substring(j.result FROM 1 FOR 500), j.headers
FROM picked
JOIN {schema}.jobs j USING (id)
LEFT JOIN LATERAL (
    SELECT t.owned_by, t.claimed_at FROM {schema}.attempts t
    WHERE t.job_id = j.id ORDER BY t.lease_version DESC LIMIT 1
) a ON true
WHERE j.task <> ''
ORDER BY j.updated_at DESC
