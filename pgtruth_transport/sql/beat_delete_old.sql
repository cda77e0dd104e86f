-- Called by: beat, once a minute, in batches.
-- Locks: the rows it deletes; those that another beat is deleting are skipped.
-- Index: beat_ticks_sent.
WITH old AS MATERIALIZED (
    SELECT entry, tick_at FROM {schema}.beat_ticks
    WHERE sent_at < (SELECT clock_timestamp()) - %(keep)s * interval '1 second'
    ORDER BY sent_at LIMIT %(count)s
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.beat_ticks t USING old WHERE t.entry = old.entry AND t.tick_at = old.tick_at
    RETURNING 1
)
SELECT count(*) FROM gone
