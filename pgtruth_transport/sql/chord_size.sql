-- Called by: the result backend (set_chord_size), before the last member of a header is published.
-- Locks: the chord's row.
-- Index: chords_pkey.
INSERT INTO {schema}.chords AS c (id, size) VALUES (%(id)s, %(size)s)
ON CONFLICT (id) DO UPDATE SET size = EXCLUDED.size
