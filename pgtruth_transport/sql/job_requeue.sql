-- Called by: lifecycle.requeue, for a holder's retries and releases, once per turn of a worker's loop.
-- Locks: the named rows, only while the attempt still holds them. A null column of the input keeps what the row has.
-- Index: jobs_pkey (|| '', see job_finish).
WITH given AS (
    SELECT * FROM unnest(
        %(ids)s::text[], %(versions)s::bigint[], %(owners)s::text[], %(claimed_ats)s::text[], %(outcomes)s::text[],
        %(retry_counts)s::int[], %(etas)s::text[], %(delays)s::float8[], %(states)s::text[], %(metas)s::bytea[],
        %(errors)s::text[], %(unknowns)s::boolean[], %(tasks)s::text[], %(queues)s::text[], %(priorities)s::smallint[],
        %(headers)s::bytea[], %(properties)s::bytea[], %(bodies)s::bytea[]
    ) AS g(id, lease_version, owned_by, claimed_at, outcome, retry_count, eta, delay, celery_state, meta, error,
        unknown, task, queue, priority, headers, properties, body)
), queued AS (
    UPDATE {schema}.jobs j
    SET status = 'queued', lease_version = j.lease_version + 1, result = NULL, updated_at = clock_timestamp(),
        owned_by = NULL, claimed_at = NULL, lease_expires_at = NULL, at_most_once = false,
        retry_count = COALESCE(g.retry_count, j.retry_count),
        run_at = COALESCE(g.eta::timestamptz, clock_timestamp() + COALESCE(g.delay, 0) * interval '1 second'),
        celery_state = g.celery_state, meta = g.meta, error = COALESCE(g.error, j.error),
        unknown_since = CASE WHEN g.unknown THEN COALESCE(j.unknown_since, clock_timestamp()) END,
        task = COALESCE(g.task, j.task), queue = COALESCE(g.queue, j.queue),
        priority = COALESCE(g.priority, j.priority), headers = COALESCE(g.headers, j.headers),
        properties = COALESCE(g.properties, j.properties), body = COALESCE(g.body, j.body)
    FROM given g
    WHERE j.id = g.id AND j.status || '' = 'processing' AND j.lease_version = g.lease_version AND j.owned_by = g.owned_by
    RETURNING j.id, g.lease_version, j.queue, g.owned_by, g.claimed_at, g.outcome, g.error
), noted AS (
    INSERT INTO {schema}.attempts (job_id, lease_version, owned_by, claimed_at, outcome, error)
    SELECT id, lease_version, owned_by, claimed_at::timestamptz, outcome, error FROM queued
    ON CONFLICT (job_id, lease_version) DO UPDATE SET owned_by = EXCLUDED.owned_by, claimed_at = EXCLUDED.claimed_at,
        ended_at = clock_timestamp(), outcome = EXCLUDED.outcome, error = EXCLUDED.error
)
SELECT id, lease_version, queue FROM queued
