-- Called by: effects.book.prune, by hand only: a deleted key may be called again, so "old" is what the caller says.
-- Locks: a bounded batch of settled effects; their history goes with them.
-- Index: none, the table is read; effects_pkey for the batch.
WITH old AS MATERIALIZED (
    SELECT key FROM {schema}.effects
    WHERE state IN ('applied', 'no_effect') AND updated_at < clock_timestamp() - %(age)s * interval '1 second'
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
)
DELETE FROM {schema}.effects e USING old WHERE e.key = old.key
