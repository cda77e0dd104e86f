-- Called by: effects.ledger, in the transaction that begins or re-numbers an ordered effect.
-- Locks: the resource's row until that transaction ends: effects of one resource begin one after another.
-- Index: effect_fences_pkey.
INSERT INTO {schema}.effect_fences AS f (resource, last)
VALUES (%(resource)s, 1)
ON CONFLICT (resource) DO UPDATE SET last = f.last + 1
RETURNING last
