-- Called by: transactions.scope, after an application's transaction has ended, to wake workers for what it committed.
-- Locks: nothing.
-- Index: jobs_pkey.
SELECT id FROM {schema}.jobs WHERE id = ANY(%(ids)s::text[])
