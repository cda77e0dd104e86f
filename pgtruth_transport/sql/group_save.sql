-- Called by: the result backend, GroupResult.save and chords with a nested header.
-- Locks: the row.
-- Index: groups_pkey.
INSERT INTO {schema}.groups (id, result) VALUES (%(id)s, %(result)s)
ON CONFLICT (id) DO UPDATE SET result = EXCLUDED.result
