-- Called by: chords.delete_forgotten, by the sweep, once an hour: chords that still miss members after their keeping time.
-- Locks: nothing.
-- Index: chords_pkey, from the last id of the batch before.
SELECT c.id
FROM {schema}.chords c
WHERE c.id > %(after)s AND c.created_at < clock_timestamp() - %(keep)s * interval '1 second'
    AND (c.size IS NULL OR c.counted < c.size + c.extra)
ORDER BY c.id
LIMIT %(count)s
