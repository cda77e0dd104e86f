-- Called by: lifecycle.reap, by the sweep: jobs whose lease has run out and whose retry budget is not spent.
-- Locks: at most the batch, skipping what others hold. run_at stays: no back-off, and ahead of a younger backlog.
-- Index: jobs_processing (the held jobs only); jobs_pkey (|| '', see job_finish).
WITH dead AS MATERIALIZED (
    SELECT id, lease_version, owned_by, claimed_at
    FROM {schema}.jobs
    WHERE status = 'processing' AND lease_expires_at <= clock_timestamp() AND NOT at_most_once
        AND retry_count < COALESCE(max_retries, %(limit)s)
    ORDER BY id
    LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
), queued AS (
    UPDATE {schema}.jobs j
    SET status = 'queued', lease_version = j.lease_version + 1, retry_count = j.retry_count + 1, result = NULL,
        owned_by = NULL, claimed_at = NULL, lease_expires_at = NULL,
        celery_state = NULL, meta = NULL, unknown_since = NULL,
        error = 'lease expired: the worker ' || j.owned_by || ' stopped renewing it', updated_at = clock_timestamp()
    FROM dead d
    WHERE j.id = d.id AND j.status || '' = 'processing' AND j.lease_version = d.lease_version
    RETURNING j.id, j.queue
), noted AS (
    INSERT INTO {schema}.attempts (job_id, lease_version, owned_by, claimed_at, outcome, error)
    SELECT d.id, d.lease_version, d.owned_by, d.claimed_at, 'lease_expired', 'lease expired'
    FROM queued q JOIN dead d USING (id)
    ON CONFLICT (job_id, lease_version) DO UPDATE SET owned_by = EXCLUDED.owned_by, claimed_at = EXCLUDED.claimed_at,
        ended_at = clock_timestamp(), outcome = EXCLUDED.outcome, error = EXCLUDED.error
)
SELECT id, queue FROM queued
