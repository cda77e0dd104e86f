-- Called by: transport.entities.
-- Locks: the exchange and its bindings.
-- Index: exchanges_pkey; bindings_pkey, by its first column.
WITH unbound AS (
    DELETE FROM {schema}.bindings WHERE exchange = %(name)s
)
DELETE FROM {schema}.exchanges WHERE name = %(name)s
