-- Called by: effects.ledger.lapse, by whoever finds a started effect whose attempt is gone.
-- Locks: the effect's row. An attempt that is alive after all finds its answer turned away and kept aside.
-- Index: effects_pkey; jobs_pkey.
UPDATE {schema}.effects e
SET state = 'unknown', unknown_since = clock_timestamp(), lease_expires_at = NULL,
    next_check_at = clock_timestamp() + %(delay)s * interval '1 second', updated_at = clock_timestamp(),
    moved_by = %(who)s, moved_why = 'the attempt that called has lost its lease without a word'
WHERE e.key = %(key)s AND e.state = 'started' AND e.token = %(token)s
    AND (e.job_id IS NOT NULL OR e.lease_expires_at <= clock_timestamp())
    AND NOT EXISTS (
        SELECT 1 FROM {schema}.jobs j
        WHERE j.id = e.job_id AND j.status = 'processing' AND j.lease_version = e.lease_version
            AND j.owned_by = e.owned_by AND j.lease_expires_at > clock_timestamp()
    )
RETURNING e.state
