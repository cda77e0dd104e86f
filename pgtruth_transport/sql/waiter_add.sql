-- Called by: waiting.Interest, before a client waits for results.
-- Locks: the waiter's own rows.
-- Index: waiters_pkey.
INSERT INTO {schema}.waiters (job_id, waiter, expires_at)
SELECT id, %(waiter)s, clock_timestamp() + %(seconds)s * interval '1 second' FROM unnest(%(ids)s::text[]) AS g(id)
ON CONFLICT (job_id, waiter) DO UPDATE SET expires_at = EXCLUDED.expires_at
