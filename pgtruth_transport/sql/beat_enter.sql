-- Called by: beat, for entries that the table does not know: they run for the first time one interval from now.
-- Locks: the rows it inserts; an entry that another beat has put there meanwhile is left alone.
-- Index: beat_entries_pkey.
INSERT INTO {schema}.beat_entries (name)
SELECT unnest(%(entries)s::text[])
ON CONFLICT (name) DO NOTHING
