-- Called by: effects.ledger.finish, with what the call gave, by the attempt that began it and nobody else (token).
-- Locks: the effect's row. An answer that comes after the lease was lost makes the effect unknown; it is kept aside.
-- Index: effects_pkey; jobs_pkey.
WITH said AS (
    SELECT e.key, CASE
        WHEN e.job_id IS NULL AND e.lease_expires_at > clock_timestamp() THEN %(state)s::text
        WHEN EXISTS (
            SELECT 1 FROM {schema}.jobs j
            WHERE j.id = e.job_id AND j.status = 'processing' AND j.lease_version = e.lease_version
                AND j.owned_by = e.owned_by AND j.lease_expires_at > clock_timestamp()
        ) THEN %(state)s::text
        ELSE 'unknown'
    END AS state
    FROM {schema}.effects e
    WHERE e.key = %(key)s
)
UPDATE {schema}.effects e
SET state = said.state,
    result = CASE WHEN said.state = 'applied' THEN %(result)s::bytea END,
    late_result = CASE WHEN said.state = 'unknown' THEN %(result)s::bytea END,
    error = %(error)s::text,
    unknown_since = CASE WHEN said.state = 'unknown' THEN clock_timestamp() END,
    next_check_at = CASE WHEN said.state = 'unknown' THEN clock_timestamp() + %(delay)s * interval '1 second' END,
    lease_expires_at = NULL, moved_by = %(who)s::text, updated_at = clock_timestamp(),
    moved_why = CASE WHEN said.state = %(state)s::text THEN '' ELSE 'the lease was lost before the answer: ' END
        || %(why)s::text
FROM said
WHERE e.key = said.key AND e.state = 'started' AND e.token = %(token)s
RETURNING e.state
