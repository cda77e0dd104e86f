-- Called by: lifecycle.finish, once per turn of a worker's loop, and by the sweep on behalf of a dead holder.
-- Locks: the named rows, only while the attempt still holds them; what follows from the end commits with it.
-- Index: jobs_pkey; || '' hides the partial indexes, which look empty to the planner and are read as a whole while its statistics are old.
WITH given AS (
    SELECT * FROM unnest(
        %(ids)s::text[], %(versions)s::bigint[], %(owners)s::text[], %(claimed_ats)s::text[], %(statuses)s::text[],
        %(outcomes)s::text[], %(states)s::text[], %(results)s::bytea[], %(metas)s::bytea[], %(errors)s::text[]
    ) AS g(id, lease_version, owned_by, claimed_at, status, outcome, celery_state, result, meta, error)
), ended AS (
    UPDATE {schema}.jobs j
    SET status = g.status, celery_state = g.celery_state, result = g.result, meta = g.meta,
        error = COALESCE(g.error, j.error), updated_at = clock_timestamp(),
        owned_by = NULL, claimed_at = NULL, lease_expires_at = NULL
    FROM given g
    WHERE j.id = g.id AND j.status || '' = 'processing' AND j.lease_version = g.lease_version AND j.owned_by = g.owned_by
        AND g.status IN ('done', 'failed')
    RETURNING j.id, g.lease_version, g.owned_by, g.claimed_at, g.outcome, g.error
), noted AS (
    INSERT INTO {schema}.attempts (job_id, lease_version, owned_by, claimed_at, outcome, error)
    SELECT id, lease_version, owned_by, claimed_at::timestamptz, outcome, error FROM ended
    ON CONFLICT (job_id, lease_version) DO UPDATE SET owned_by = EXCLUDED.owned_by, claimed_at = EXCLUDED.claimed_at,
        ended_at = clock_timestamp(), outcome = EXCLUDED.outcome, error = EXCLUDED.error
)
SELECT e.id, e.lease_version, EXISTS (SELECT 1 FROM {schema}.waiters w WHERE w.job_id = e.id) AS waited
FROM ended e
