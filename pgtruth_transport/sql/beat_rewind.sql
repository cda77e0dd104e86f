-- Called by: beat, for an entry whose last run lies in the future, after the server's clock was set back.
-- Locks: the entry's row.
-- Index: beat_entries_pkey.
UPDATE {schema}.beat_entries
SET last_run_at = clock_timestamp()
WHERE name = %(entry)s AND last_run_at = %(seen)s::timestamptz
