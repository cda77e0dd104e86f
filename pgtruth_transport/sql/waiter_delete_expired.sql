-- Called by: the sweep: clients that died while they waited, complete chords and groups past their keeping time.
-- Locks: the deleted rows, skipping chords that a transaction is counting. A group says what shape its chord's results have: it stays as long.
-- Index: none, small tables; chords_pkey, chord_parts_pkey.
WITH waiters AS (
    DELETE FROM {schema}.waiters WHERE expires_at < clock_timestamp()
), groups AS (
    DELETE FROM {schema}.groups g WHERE g.created_at < clock_timestamp() - %(keep)s * interval '1 second'
        AND NOT EXISTS (SELECT 1 FROM {schema}.chords c WHERE c.id = g.id)
), complete AS MATERIALIZED (
    SELECT c.id FROM {schema}.chords c
    WHERE c.created_at < clock_timestamp() - %(keep)s * interval '1 second' AND c.counted >= c.size + c.extra
    LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
), chords AS (
    DELETE FROM {schema}.chords c USING complete WHERE c.id = complete.id RETURNING c.id
)
DELETE FROM {schema}.chord_parts p USING chords WHERE p.chord_id = chords.id
