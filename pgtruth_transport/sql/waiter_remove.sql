-- Called by: waiting.Interest, when the client has stopped waiting.
-- Locks: the waiter's own rows.
-- Index: waiters_pkey.
DELETE FROM {schema}.waiters WHERE job_id = ANY(%(ids)s::text[]) AND waiter = %(waiter)s
