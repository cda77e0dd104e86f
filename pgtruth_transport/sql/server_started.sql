-- Called by: the settler, for each connection that it opens.
-- Locks: nothing.
-- Index: none.
SELECT pg_postmaster_start_time()
