-- Called by: lifecycle.disown, by a worker after a reconnect: claims whose COMMIT was not answered, so that it knows nothing of them.
-- Locks: the rows that it finds, skipping what others hold. No body has begun; it costs no retry.
-- Index: jobs_processing (the held jobs only); jobs_pkey (|| '', see job_finish).
WITH unknown AS MATERIALIZED (
    SELECT p.id, p.lease_version, p.owned_by, p.claimed_at
    FROM {schema}.jobs p
    WHERE p.status = 'processing' AND p.owned_by = %(owner)s
        AND NOT EXISTS (SELECT 1 FROM unnest(%(ids)s::text[], %(versions)s::bigint[]) AS k(id, lease_version)
                        WHERE k.id = p.id AND k.lease_version = p.lease_version)
    ORDER BY p.id
    FOR UPDATE SKIP LOCKED
), queued AS (
    UPDATE {schema}.jobs j
    SET status = 'queued', lease_version = j.lease_version + 1, result = NULL,
        owned_by = NULL, claimed_at = NULL, lease_expires_at = NULL, at_most_once = false,
        celery_state = NULL, meta = NULL, updated_at = clock_timestamp()
    FROM unknown u
    WHERE j.id = u.id AND j.status || '' = 'processing' AND j.lease_version = u.lease_version AND j.owned_by = u.owned_by
    RETURNING j.id, j.queue
), noted AS (
    INSERT INTO {schema}.attempts (job_id, lease_version, owned_by, claimed_at, outcome, error)
    SELECT u.id, u.lease_version, u.owned_by, u.claimed_at, 'released', 'the answer to its claim was lost'
    FROM queued q JOIN unknown u USING (id)
    ON CONFLICT (job_id, lease_version) DO UPDATE SET owned_by = EXCLUDED.owned_by, claimed_at = EXCLUDED.claimed_at,
        ended_at = clock_timestamp(), outcome = EXCLUDED.outcome, error = EXCLUDED.error
)
SELECT id, queue FROM queued
