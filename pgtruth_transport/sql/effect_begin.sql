-- Called by: effects.ledger.begin, before a call. One row back: this attempt, and no other, may call now.
-- Locks: the attempt's job row (share, so that no sweep takes it away meanwhile), then the effect's row.
-- Index: jobs_pkey; effects_pkey; effects_resource for what is open on the same resource.
WITH lease AS MATERIALIZED (
    SELECT 1 FROM {schema}.jobs
    WHERE id = %(job_id)s::text AND status = 'processing' AND lease_version = %(lease_version)s::bigint
        AND owned_by = %(owned_by)s::text AND lease_expires_at > clock_timestamp()
    FOR SHARE
)
INSERT INTO {schema}.effects AS e (
    key, kind, fingerprint, payload, state, calls, token, job_id, lease_version, owned_by, lease_expires_at,
    resource, fence, moved_by, moved_why
)
SELECT %(key)s::text, %(kind)s::text, %(fingerprint)s::text, %(payload)s::bytea, 'started', 1, %(token)s::text,
    %(job_id)s::text, %(lease_version)s::bigint, %(owned_by)s::text,
    CASE WHEN %(job_id)s::text IS NULL THEN clock_timestamp() + %(outside_lease)s * interval '1 second' END,
    %(resource)s::text, %(fence)s::bigint, %(who)s::text, 'a call begins'
WHERE (%(job_id)s::text IS NULL OR EXISTS (SELECT 1 FROM lease))
    AND NOT (%(exclusive)s::boolean AND EXISTS (
        SELECT 1 FROM {schema}.effects o
        WHERE o.resource = %(resource)s::text AND o.state IN ('started', 'unknown') AND o.key <> %(key)s::text
    ))
ON CONFLICT (key) DO UPDATE
SET state = 'started', calls = e.calls + 1, token = excluded.token, job_id = excluded.job_id,
    lease_version = excluded.lease_version, owned_by = excluded.owned_by,
    lease_expires_at = excluded.lease_expires_at, fence = excluded.fence, error = NULL, late_result = NULL,
    checks = 0, moved_by = excluded.moved_by, moved_why = 'a fresh call begins', started_at = clock_timestamp(),
    updated_at = clock_timestamp()
WHERE e.state = 'no_effect' AND e.kind = excluded.kind AND e.fingerprint = excluded.fingerprint
    AND e.resource IS NOT DISTINCT FROM excluded.resource
RETURNING e.calls
