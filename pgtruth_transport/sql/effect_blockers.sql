-- Called by: effects.ledger.blockers, when an ordered effect could not begin: what is open on its resource.
-- Locks: nothing.
-- Index: effects_resource; jobs_pkey.
SELECT e.key, e.kind, e.fingerprint, e.payload, e.state, e.calls, e.token, e.resource, e.fence,
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
FROM {schema}.effects e
WHERE e.resource = %(resource)s AND e.state IN ('started', 'unknown') AND e.key <> %(key)s
ORDER BY e.started_at, e.key
LIMIT 10
