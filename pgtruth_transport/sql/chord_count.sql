-- Called by: chords.write, in the transaction that ends the members.
-- Locks: the chords' rows, in order of id; so exactly one transaction sees a chord become complete.
-- Index: chord_parts_pkey (a member counts once, however often it returns), chords_pkey.
WITH new AS (
    INSERT INTO {schema}.chord_parts (chord_id, part_id, position, state, result)
    SELECT g.chord_id, g.part_id, g.position, g.state, g.result
    FROM unnest(%(chord_ids)s::text[], %(part_ids)s::text[], %(positions)s::float8[], %(states)s::text[],
        %(results)s::bytea[]) AS g(chord_id, part_id, position, state, result)
    ORDER BY g.chord_id, g.part_id
    ON CONFLICT DO NOTHING
    RETURNING chord_id
), counts AS (
    SELECT chord_id, count(*)::int AS n FROM new GROUP BY chord_id
)
INSERT INTO {schema}.chords AS c (id, counted)
SELECT chord_id, n FROM counts ORDER BY chord_id
ON CONFLICT (id) DO UPDATE SET counted = c.counted + EXCLUDED.counted
RETURNING c.id,
    COALESCE(c.counted >= c.size + c.extra
        AND c.counted - (SELECT n FROM counts WHERE counts.chord_id = c.id) < c.size + c.extra, false) AS complete
