-- Called by: effects.book.due, by beat: unknown effects whose recipient it is time to ask, each handed to one asker.
-- Locks: a bounded batch, for this statement only; pushing next_check_at ahead keeps other askers away.
-- Index: effects_unknown.
WITH due AS MATERIALIZED (
    SELECT key FROM {schema}.effects
    WHERE state = 'unknown' AND next_check_at <= (SELECT clock_timestamp()) AND kind = ANY (%(kinds)s)
    ORDER BY next_check_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
UPDATE {schema}.effects e
SET next_check_at = clock_timestamp() + interval '1 minute'
FROM due
WHERE e.key = due.key AND e.state = 'unknown'
RETURNING e.key
