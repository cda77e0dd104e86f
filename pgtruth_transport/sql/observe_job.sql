-- Called by: observe.queries.job, for `celery pgtruth job` and `retry`.
-- Locks: nothing.
-- Index: jobs_pkey.
SELECT
    j.id, j.status, j.task, j.queue, j.priority, j.retry_count, j.lease_version, j.owned_by, j.created_at,
    j.updated_at, j.run_at::text, j.celery_state, j.error,
    j.claimed_at, j.lease_expires_at, j.expires_at, j.max_retries, j.root_id, j.parent_id, j.group_id,
    octet_length(j.body), octet_length(j.result), j.headers, j.properties, j.body
FROM {schema}.jobs j
WHERE j.id = %(id)s
