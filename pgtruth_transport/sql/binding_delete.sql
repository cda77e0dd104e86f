-- Called by: transport.entities.
-- Locks: the binding.
-- Index: bindings_pkey.
DELETE FROM {schema}.bindings
WHERE exchange = %(exchange)s AND routing_key = %(routing_key)s AND queue = %(queue)s
