-- Called by: lifecycle.renew, by the lease keeper, for the leases of which a third is left.
-- Locks: the named rows. No indexed column changes (updated_at neither), so the update stays HOT.
-- Index: jobs_pkey (|| '', see job_finish).
UPDATE {schema}.jobs j
SET lease_expires_at = clock_timestamp() + %(lease)s * interval '1 second'
FROM unnest(%(ids)s::text[], %(versions)s::bigint[]) AS g(id, lease_version)
WHERE j.id = g.id AND j.status || '' = 'processing' AND j.lease_version = g.lease_version AND j.owned_by = %(owner)s
RETURNING j.id, j.lease_version
