-- Called by: transactions.finish, after the application's transaction has ended, to learn whether it was committed.
-- Locks: nothing.
-- Index: attempts_pkey.
SELECT true FROM {schema}.attempts WHERE job_id = %(id)s AND lease_version = %(version)s
