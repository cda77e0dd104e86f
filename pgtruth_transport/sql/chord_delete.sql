-- Called by: chords.delete_forgotten, by the sweep: chords that no open job can complete any more, with the parts that came.
-- Locks: the chords' rows, skipping those that a transaction is counting.
-- Index: chords_pkey, chord_parts_pkey.
WITH forgotten AS MATERIALIZED (
    SELECT c.id FROM {schema}.chords c
    WHERE c.id = ANY(%(ids)s::text[]) AND c.created_at < clock_timestamp() - %(keep)s * interval '1 second'
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.chords c USING forgotten WHERE c.id = forgotten.id RETURNING c.id
), parts AS (
    DELETE FROM {schema}.chord_parts p USING gone WHERE p.chord_id = gone.id
)
SELECT id FROM gone
