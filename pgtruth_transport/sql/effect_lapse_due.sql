-- Called by: effects.book.lapse_due, by beat: what nobody asks about again must become unknown as well.
-- Locks: a bounded batch of started effects, skipping those that somebody else works on.
-- Index: effects_started; jobs_pkey.
WITH dead AS MATERIALIZED (
    SELECT e.key FROM {schema}.effects e
    WHERE e.state = 'started' AND (e.job_id IS NOT NULL OR e.lease_expires_at <= clock_timestamp())
        AND NOT EXISTS (
            SELECT 1 FROM {schema}.jobs j
            WHERE j.id = e.job_id AND j.status = 'processing' AND j.lease_version = e.lease_version
                AND j.owned_by = e.owned_by AND j.lease_expires_at > clock_timestamp()
        )
    LIMIT %(limit)s
    FOR UPDATE OF e SKIP LOCKED
)
UPDATE {schema}.effects e
SET state = 'unknown', unknown_since = clock_timestamp(), lease_expires_at = NULL,
    next_check_at = clock_timestamp(), updated_at = clock_timestamp(),
    moved_by = %(who)s, moved_why = 'the attempt that called has lost its lease without a word'
FROM dead
WHERE e.key = dead.key AND e.state = 'started'
RETURNING e.key
