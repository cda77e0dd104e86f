-- Called by: effects.ledger.late, when a call ends that is no longer this attempt's to record: evidence is kept aside.
-- Locks: the effect's row, if it is unknown; or believed not to have happened, which a call not refused casts in doubt.
-- Index: effects_pkey.
WITH doubted AS (
    UPDATE {schema}.effects
    SET late_result = COALESCE(late_result, %(result)s::bytea), updated_at = clock_timestamp(), state = 'unknown',
        unknown_since = COALESCE(unknown_since, clock_timestamp()),
        next_check_at = COALESCE(next_check_at, clock_timestamp() + %(delay)s * interval '1 second'),
        moved_by = %(who)s, moved_why = %(why)s
    WHERE key = %(key)s AND (
        (state = 'unknown' AND calls = %(calls)s) OR (state = 'no_effect' AND NOT %(refused)s::boolean)
    )
)
INSERT INTO {schema}.effect_history (key, calls, from_state, to_state, who, why, fingerprint, fence)
SELECT key, %(calls)s, state, state, %(who)s, %(why)s, fingerprint, %(fence)s FROM {schema}.effects WHERE key = %(key)s
