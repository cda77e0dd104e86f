-- Called by: transport.entities, for every exchange that a process declares (once a minute at most).
-- Locks: the row it inserts. Returns the type that the exchange has, which may not be the one asked for.
-- Index: exchanges_pkey.
WITH made AS (
    INSERT INTO {schema}.exchanges (name, type, durable, auto_delete)
    VALUES (%(name)s, %(type)s, %(durable)s, %(auto_delete)s)
    ON CONFLICT (name) DO NOTHING
    RETURNING type
)
SELECT type FROM made
UNION ALL
SELECT type FROM {schema}.exchanges WHERE name = %(name)s
