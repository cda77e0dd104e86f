-- Called by: the result backend, GroupResult.delete.
-- Locks: the row.
-- Index: groups_pkey.
DELETE FROM {schema}.groups WHERE id = %(id)s
