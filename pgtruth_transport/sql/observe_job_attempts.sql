-- Called by: observe.queries.attempts_of, for `celery pgtruth job`.
-- Locks: nothing.
-- Index: attempts_pkey.
SELECT lease_version, owned_by, claimed_at, ended_at, outcome, error
FROM {schema}.attempts
WHERE job_id = %(id)s
ORDER BY lease_version
