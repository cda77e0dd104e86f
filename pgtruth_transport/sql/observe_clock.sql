-- Called by: observe.queries.clock: the database's time some seconds ago, as text.
-- Locks: nothing.
-- Index: none.
SELECT (clock_timestamp() - %(ago)s * interval '1 second')::text
