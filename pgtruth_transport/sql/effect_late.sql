-- Called by: effects.ledger.late, when an answer arrives for a call that is no longer this attempt's to record.
-- Locks: the effect's row, if it is still unknown: the answer is kept aside for whoever reconciles it.
-- Index: effects_pkey.
WITH kept AS (
    UPDATE {schema}.effects
    SET late_result = COALESCE(late_result, %(result)s::bytea), updated_at = clock_timestamp()
    WHERE key = %(key)s AND state = 'unknown' AND calls = %(calls)s
)
INSERT INTO {schema}.effect_history (key, calls, from_state, to_state, who, why, fingerprint, fence)
SELECT key, %(calls)s, state, state, %(who)s, %(why)s, fingerprint, %(fence)s FROM {schema}.effects WHERE key = %(key)s
