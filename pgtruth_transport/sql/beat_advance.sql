-- Called by: beat, in the transaction that publishes the tick's job. No row: another beat has sent this tick.
-- Locks: the entry's row, until that transaction ends; whoever waits for it finds last_run_at changed and does nothing.
-- Index: beat_entries_pkey, beat_ticks_pkey.
WITH moved AS (
    UPDATE {schema}.beat_entries
    SET last_run_at = %(last_run_at)s::timestamptz, runs = runs + 1
    WHERE name = %(entry)s AND last_run_at = %(seen)s::timestamptz
    RETURNING name
)
INSERT INTO {schema}.beat_ticks (entry, tick_at, job_id)
SELECT name, %(tick_at)s::timestamptz, %(job_id)s FROM moved
ON CONFLICT (entry, tick_at) DO NOTHING
RETURNING job_id
