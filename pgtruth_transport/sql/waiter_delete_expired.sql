-- Called by: the sweep: clients that died while they waited, groups and chords past their keeping time.
-- Locks: the deleted rows.
-- Index: none, small tables.
WITH waiters AS (
    DELETE FROM {schema}.waiters WHERE expires_at < clock_timestamp()
), groups AS (
    DELETE FROM {schema}.groups WHERE created_at < clock_timestamp() - %(keep)s * interval '1 second'
), chords AS (
    DELETE FROM {schema}.chords WHERE created_at < clock_timestamp() - %(keep)s * interval '1 second' RETURNING id
)
DELETE FROM {schema}.chord_parts p USING chords WHERE p.chord_id = chords.id
