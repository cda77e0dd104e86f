-- Called by: effects.ledger.settle, with the recipient's word or a person's decision about an unknown effect.
-- Locks: the effect's row, only while it is unknown about the very call that was asked about.
-- Index: effects_pkey.
UPDATE {schema}.effects
SET state = %(state)s::text,
    result = CASE WHEN %(state)s::text = 'applied' THEN COALESCE(%(result)s::bytea, late_result) END,
    error = CASE WHEN %(state)s::text = 'applied' THEN NULL ELSE error END,
    unknown_since = NULL, next_check_at = NULL, moved_by = %(who)s, moved_why = %(why)s,
    checks = checks + 1, updated_at = clock_timestamp()
WHERE key = %(key)s AND state = 'unknown' AND calls = %(calls)s
RETURNING state
