-- Called by: effects.ledger.postpone, when the recipient could not say: ask again later.
-- Locks: the effect's row, only while it is unknown about the very call that was asked about.
-- Index: effects_pkey.
UPDATE {schema}.effects
SET checks = checks + 1, error = %(error)s, updated_at = clock_timestamp(),
    next_check_at = clock_timestamp() + %(delay)s * interval '1 second'
WHERE key = %(key)s AND state = 'unknown' AND calls = %(calls)s
