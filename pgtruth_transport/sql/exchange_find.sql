-- Called by: transport.entities, for a passive declaration.
-- Locks: nothing.
-- Index: exchanges_pkey.
SELECT type FROM {schema}.exchanges WHERE name = %(name)s
