-- Called by: chords.extend (add_to_chord), by a member that runs, so the chord cannot be complete yet.
-- Locks: the chord's row.
-- Index: chords_pkey.
INSERT INTO {schema}.chords AS c (id, extra) VALUES (%(id)s, 1)
ON CONFLICT (id) DO UPDATE SET extra = c.extra + 1
