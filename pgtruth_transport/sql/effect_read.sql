-- Called by: effects.ledger.read, when an effect could not begin; always one row, with null columns for no effect.
-- Locks: nothing.
-- Index: jobs_pkey; effects_pkey.
SELECT held.ok AS lease_held, e.key, e.kind, e.fingerprint, e.payload, e.state, e.calls, e.token, e.resource, e.fence,
    e.result, e.late_result, e.error,
    e.state = 'started' AND CASE
        WHEN e.job_id IS NULL THEN e.lease_expires_at > clock_timestamp()
        ELSE EXISTS (
            SELECT 1 FROM {schema}.jobs j
            WHERE j.id = e.job_id AND j.status = 'processing' AND j.lease_version = e.lease_version
                AND j.owned_by = e.owned_by AND j.lease_expires_at > clock_timestamp()
        )
    END AS live,
    extract(epoch FROM clock_timestamp() - COALESCE(e.unknown_since, e.started_at))::float8 AS age
FROM (
    SELECT %(job_id)s::text IS NULL OR EXISTS (
        SELECT 1 FROM {schema}.jobs
        WHERE id = %(job_id)s::text AND status = 'processing' AND lease_version = %(lease_version)s::bigint
            AND owned_by = %(owned_by)s::text AND lease_expires_at > clock_timestamp()
    ) AS ok
) held
LEFT JOIN {schema}.effects e ON e.key = %(key)s::text
