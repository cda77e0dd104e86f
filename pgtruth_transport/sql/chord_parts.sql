-- Called by: chords.write, when a chord is complete.
-- Locks: nothing.
-- Index: chord_parts_pkey.
SELECT part_id, state, result FROM {schema}.chord_parts
WHERE chord_id = %(id)s
ORDER BY position NULLS LAST, part_id
