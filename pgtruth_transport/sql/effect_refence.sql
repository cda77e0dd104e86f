-- Called by: effects.ledger.refence, before the recipient of an ordered effect is asked what became of it.
-- Locks: the effect's row, after the resource's (effect_fence).
-- Index: effects_pkey.
UPDATE {schema}.effects
SET fence = %(fence)s, updated_at = clock_timestamp()
WHERE key = %(key)s AND state = 'unknown' AND calls = %(calls)s
RETURNING fence
