-- Called by: the result backend, GroupResult.restore.
-- Locks: nothing.
-- Index: groups_pkey.
SELECT result FROM {schema}.groups WHERE id = %(id)s
